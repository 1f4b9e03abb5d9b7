"""Facts that whoever pushes declares of a snapshot: engine, model, its flags, container image."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from imgfmt.errors import InvalidInput
from imgfmt.facts import canonical


def declared_facts(
    *,
    engine: str | None = None,
    model: str | None = None,
    engine_flags: str | None = None,
    container_image: str | None = None,
) -> dict[str, str]:
    """The facts by name; only of what is given.

    `engine` is a name, or name:version. `engine_flags` are its arguments as on a command line.
    `container_image` ends with the digest: a tag may mean another image tomorrow. Raises
    InvalidInput.
    """
    facts = {}
    if engine is not None:
        facts["engine"], _, version = engine.partition(":")
        if version:
            facts["engine.version"] = version
    if model is not None:
        facts["model"] = model
    if engine_flags is not None:
        facts["engine.flags"] = normalised_flags(engine_flags)
    if container_image is not None:
        if canonical("container.image_id", container_image) is None:
            raise InvalidInput(
                f"container image {container_image!r} has no digest; use NAME@sha256:<hex>"
            )
        facts["container.image_id"] = container_image
    if empty := [fact for fact, value in facts.items() if not value and fact != "engine.flags"]:
        raise InvalidInput(f"{empty[0]} is empty")
    return facts


def with_declared(facts: Mapping[str, str], declared: Mapping[str, str]) -> dict[str, str]:
    """Both. Raises InvalidInput where they say different things of one fact."""
    for fact in facts.keys() & declared.keys():
        if facts[fact] != declared[fact]:
            raise InvalidInput(
                f"{fact} is given twice, as {facts[fact]!r} and as {declared[fact]!r}"
            )
    return {**facts, **declared}


def normalised_flags(arguments: str) -> str:
    """The same flags as `--flag=value`, in order of their names, whatever order they came in.

    `--flag value` is the same as `--flag=value`; what comes before the first flag stays first.
    Flags of one name keep their order. Raises InvalidInput for quotes that do not end.
    """
    try:
        parts = shlex.split(arguments)
    except ValueError as error:
        raise InvalidInput(f"engine flags {arguments[:80]!r}: {error}") from None
    first: list[str] = []
    flags: list[list[str]] = []
    for part in parts:
        if part.startswith("-") and not _is_number(part):
            flags.append([part])
        elif flags:
            flags[-1].append(part)
        else:
            first.append(part)
    joined = [_one(flag) for flag in flags]
    joined.sort(key=lambda text: text.partition("=")[0])
    return " ".join([*map(shlex.quote, first), *joined])


def _one(flag: list[str]) -> str:
    """`--flag=value`; of several values the others follow."""
    name, *values = flag
    if values and "=" not in name:
        name, values = f"{name}={values[0]}", values[1:]
    return " ".join(map(shlex.quote, [name, *values]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
