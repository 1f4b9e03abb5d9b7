"""`snapcask push`: store a directory, or several, as an image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapcask.commands import display
from snapcask.commands.options import (
    bwlimit_option,
    facts_option,
    json_option,
    key_value,
    memory_option,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from snapcask.requests import MemberSource
    from transfer.push import PushReport

Pairs = tuple[tuple[str, str], ...]


@click.command()
@click.argument("operands", nargs=-1, metavar="[DIR] NAME:TAG")
@store_option
@click.option(
    "--member", "members", type=key_value, multiple=True, metavar="NAME=SOURCE",
    help="A member of the image, instead of DIR, several times: SOURCE is a directory, or @REF or"
    " @REF#MEMBER for one that is in the store.",
)  # fmt: skip
@click.option(
    "--role", "roles", type=key_value, multiple=True, metavar="NAME=ROLE",
    help="What a member is for, such as rank or cache.",
)  # fmt: skip
@click.option(
    "--mount-path", "mount_paths", type=key_value, multiple=True, metavar="NAME=/PATH",
    help="Where a member is meant to be mounted.",
)  # fmt: skip
@click.option(
    "--annotation", "annotations", type=key_value, multiple=True, metavar="KEY=VALUE",
    help="A note that is stored with the image.",
)  # fmt: skip
@click.option(
    "--require", multiple=True, metavar="RULE",
    help="What a machine must be like to use the image: FACT=VALUE, FACT>=1.2 or FACT~=A,B.",
)  # fmt: skip
@facts_option("A fact to record of each directory, beside those that it tells itself.")
@click.option("--engine", metavar="NAME[:VERSION]", help="The inference engine, to be recorded.")
@click.option("--model", metavar="NAME", help="The model it serves, to be recorded.")
@click.option(
    "--engine-flags", metavar="FLAGS", help="Its arguments, in one argument, to be recorded."
)
@click.option(
    "--container-image", metavar="IMAGE@DIGEST", help="Its container image, to be recorded."
)
@click.option("--record-host", is_flag=True, help="Record facts of this machine too.")
@click.option(
    "--skip-special", is_flag=True, help="Leave out sockets, fifos and devices, with a warning."
)
@memory_option
@bwlimit_option
@json_option
@quiet_option
def command(
    operands: tuple[str, ...],
    store: str,
    members: Pairs,
    roles: Pairs,
    mount_paths: Pairs,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Store the directory DIR as an image and point NAME:TAG at it.

    Prints the image's digest. DIR becomes the member main. What the store has already is not stored
    again. Nothing is published if a file changes meanwhile.
    """
    from snapcask import api, render

    if len(operands) != (1 if members else 2):
        wanted = "NAME:TAG alone with --member" if members else "DIR and NAME:TAG"
        raise click.UsageError(f"expected {wanted}, got {len(operands)} arguments")
    sources = _sources(members or (("main", operands[0]),), dict(roles), dict(mount_paths))
    with display.progress(quiet=quiet) as progress:
        report = api.push(
            None,
            operands[-1],
            store=store,
            members=sources,
            annotations=_once("--annotation", options.pop("annotations")),
            facts=_once("--fact", options.pop("facts")),
            progress=progress,
            **options,
        )
    if as_json:
        render.print_json(_document(report))
        return
    print(report.digest)
    if not quiet:
        render.warn(report.warnings)
        if render.on_terminal():
            render.print_lines(_summary(report))


def _sources(
    members: Pairs, roles: dict[str, str], mount_paths: dict[str, str]
) -> dict[str, MemberSource]:
    """The members by name. A single DIR is taken as a directory whatever it begins with."""
    from snapcask.requests import MemberSource

    by_name = _once("--member", members)
    for option, given in (("--role", roles), ("--mount-path", mount_paths)):
        if unknown := sorted(given.keys() - by_name.keys()):
            raise click.UsageError(f"{option} names {unknown[0]!r}, which is not a member")
    sources = {}
    for name, source in by_name.items():
        role, mount_path = roles.get(name, ""), mount_paths.get(name, "")
        if source.startswith("@"):
            image, _, member = source[1:].partition("#")
            sources[name] = MemberSource(
                image=image, image_member=member or None, role=role, mount_path=mount_path
            )
        else:
            sources[name] = MemberSource(source, role=role, mount_path=mount_path)
    return sources


def _once(option: str, given: Pairs) -> dict[str, str]:
    """Pairs as a dictionary. Raises UsageError for a key that is given twice."""
    found = dict(given)
    if len(found) != len(given):
        keys = [key for key, _ in given]
        again = next(key for key in keys if keys.count(key) > 1)
        raise click.UsageError(f"{option} gives {again!r} more than once")
    return found


def _document(report: PushReport) -> dict[str, Any]:
    from snapcask.render import rounded

    counts = report.counts
    return {
        "digest": str(report.digest),
        "reference": report.reference,
        "logical_bytes": report.logical_bytes,
        "zero_bytes": report.zero_bytes,
        "chunks": counts.chunks,
        "new_chunks": counts.new_chunks,
        "new_bytes": counts.new_bytes,
        "reused_bytes": counts.reused_bytes,
        "stored_bytes": counts.stored_bytes,
        "metadata_bytes": report.metadata_bytes,
        "seconds": rounded(report.seconds),
        "warnings": list(report.warnings),
    }


def _summary(report: PushReport) -> list[str]:
    from snapcask.render import facts, human_bytes, seconds_text, share

    counts = report.counts
    whole = report.logical_bytes
    return facts(
        [
            ("reference", report.reference or "none"),
            ("files", human_bytes(whole)),
            ("zeros", f"{human_bytes(report.zero_bytes)} ({share(report.zero_bytes, whole)})"),
            ("reused", f"{human_bytes(counts.reused_bytes)} ({share(counts.reused_bytes, whole)})"),
            ("new", f"{human_bytes(counts.new_bytes)} ({share(counts.new_bytes, whole)})"),
            ("written", f"{human_bytes(counts.stored_bytes + report.metadata_bytes)}"),
            ("time", seconds_text(report.seconds)),
        ]
    )
