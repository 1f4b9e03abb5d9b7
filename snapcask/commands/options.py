"""Options and types that several verbs have."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])

_SIZE = re.compile(r"([0-9]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_AGE = re.compile(r"([0-9]{1,9})(d|h|min|s)")
_UNIT_S = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def byte_size(text: str) -> int:
    """A number of bytes: 65536, 64K or 64KiB (1024 each), 64KB (1000 each)."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise click.BadParameter(f"{text!r} is not a size; write 512MiB or a number of bytes")
    digits, prefix, binary, unit = found.groups()
    base = 1000 if prefix and unit and not binary else 1024
    power: int = _POWERS[prefix.lower()]
    return int(digits) * int(base**power)


def age(text: str) -> int:
    """A number of seconds: 90s, 15min, 12h or 30d."""
    found = _AGE.fullmatch(text.strip())
    if found is None:
        raise click.BadParameter(f"{text!r} is not an age; write 30d, 12h, 15min or 90s")
    return int(found[1]) * _UNIT_S[found[2]]


class _KeyValue(click.ParamType):  # type: ignore[type-arg]
    """`KEY=VALUE`, or as the option's metavar says; the value may hold further `=`."""

    name = "pair"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, rest = str(value).partition("=")
        if not key or not equals:
            form = getattr(param, "metavar", None) or "KEY=VALUE"
            self.fail(f"{value!r} is not of the form {form}", param, ctx)
        return key, rest


key_value = _KeyValue()


def _needed(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    if not value:
        raise click.UsageError("no store is given: use --store or set SNAPCASK_STORE", ctx)
    return value


def store_option(function: F) -> F:
    """`--store`, or the environment."""
    return click.option(
        "--store", metavar="STORE", envvar="SNAPCASK_STORE", show_envvar=True, callback=_needed,
        help="Directory, file:// or s3:// URL of the store.",
    )(function)  # fmt: skip


def optional_store_option(function: F) -> F:
    """`--store` where a digest will do."""
    return click.option(
        "--store", metavar="STORE", envvar="SNAPCASK_STORE", show_envvar=True,
        help="Directory, file:// or s3:// URL of the store, where REF is a name.",
    )(function)  # fmt: skip


def cache_options(function: F) -> F:
    """`--cache`, what it may be and which disks it has, as one argument `cache`."""

    @functools.wraps(function)
    def with_cache(
        *args: Any,
        cache: str,
        allow_root_filesystem: bool,
        disks: tuple[str, ...],
        allow_root_disk: bool,
        **kwargs: Any,
    ) -> Any:
        from snapcask.caches import CacheOptions

        options = CacheOptions(cache, allow_root_filesystem, disks, allow_root_disk)
        return function(*args, cache=options, **kwargs)

    options = [
        click.option(
            "--cache", metavar="DIR", envvar="SNAPCASK_CACHE", show_envvar=True,
            default="/var/lib/snapcask", show_default=True, help="The cache of this node.",
        ),
        click.option(
            "--allow-root-filesystem", is_flag=True, envvar="SNAPCASK_ALLOW_ROOT_FILESYSTEM",
            help="Let the cache lie on the root filesystem.",
        ),
        click.option(
            "--disk", "disks", metavar="DIR", multiple=True, type=click.Path(),
            envvar="SNAPCASK_CACHE_DISKS", show_envvar=True,
            help="Directory on a further disk that the cache uses from now on; several times.",
        ),
        click.option(
            "--allow-root-disk", is_flag=True, envvar="SNAPCASK_ALLOW_ROOT_DISK",
            help="Let such a disk lie on the root filesystem.",
        ),
    ]  # fmt: skip
    for option in reversed(options):
        with_cache = option(with_cache)
    return cast(F, with_cache)


def bwlimit_option(function: F) -> F:
    """`--bwlimit`, which becomes an option in the store's URL."""

    @functools.wraps(function)
    def limited(*args: Any, bytes_per_s: int | None, store: str, **kwargs: Any) -> Any:
        if bytes_per_s is not None:
            if not store.lower().startswith("s3://"):
                raise click.UsageError(f"--bwlimit is for s3:// stores, {store} is none")
            store += f"{'&' if '?' in store else '?'}bwlimit={bytes_per_s}"
        return function(*args, store=store, **kwargs)

    return cast(
        F,
        click.option(
            "--bwlimit", "bytes_per_s", type=byte_size, metavar="SIZE",
            help="Bytes a second to and from an s3:// store.",
        )(limited),
    )  # fmt: skip


def json_option(function: F) -> F:
    """`--json`."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document instead of text."
    )(function)


def quiet_option(function: F) -> F:
    """`--quiet`."""
    return click.option(
        "-q", "--quiet", is_flag=True, help="No progress, no summary, no warnings."
    )(function)


def memory_option(function: F) -> F:
    """`--max-memory`."""
    return click.option(
        "--max-memory", "max_memory_bytes", type=byte_size, metavar="SIZE",
        help="Limit of all buffers together.  [default: 128MiB]",
    )(function)  # fmt: skip


def facts_option(what: str) -> Callable[[F], F]:
    """`--fact`, with `what` it is used for."""
    return click.option(
        "--fact", "facts", type=key_value, multiple=True, metavar="FACT=VALUE", help=what
    )


def override_option(function: F) -> F:
    """`--override`."""
    return click.option(
        "--override", multiple=True, metavar="RULE",
        help="A rule, by its name, that may differ on this machine; several times.",
    )(function)  # fmt: skip


def mismatch_options(function: F) -> F:
    """`--on-mismatch` and `--override`."""
    return click.option(
        "--on-mismatch", type=click.Choice(["fail", "warn", "ignore"]), default="fail",
        show_default=True, help="What to do if the image is not for this machine.",
    )(override_option(function))  # fmt: skip
