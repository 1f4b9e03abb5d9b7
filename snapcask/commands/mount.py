"""`snapcask mount`: mount an image of the cache, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import (
    cache_options,
    facts_option,
    json_option,
    mismatch_options,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from imgfmt.digest import Digest
    from snapcask.caches import CacheOptions
    from transfer.mounts import Mounted


@click.command()
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR")
@store_option
@cache_options
@click.option("--member", metavar="NAME", help="Mount this member only, at DIR itself.")
@click.option("--volume", metavar="NAME", help="Name in the mount table; by default a random one.")
@facts_option("A fact of the machine that the image is for, before what is found here.")
@mismatch_options
@json_option
@quiet_option
def command(
    reference: str,
    directory: str,
    store: str,
    cache: CacheOptions,
    member: str | None,
    volume: str | None,
    facts: tuple[tuple[str, str], ...],
    on_mismatch: str,
    override: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Mount the image REF, which is in the cache, at the directory DIR.

    Nobody can write to it, or make it writable. The only member is DIR itself; several become
    directories in it.
    """
    from snapcask import render
    from snapcask.running import run

    fit = dict(facts), on_mismatch, override
    digest, mounted, warnings = run(_mount(reference, directory, store, cache, member, volume, fit))
    if not quiet and not as_json:
        render.warn(warnings)
    if as_json:
        document = {
            "digest": str(digest),
            "mounts": [_row(one) for one in mounted],
            "warnings": list(warnings),
        }
        render.print_json(document)
    elif not quiet:
        render.print_lines(render.one_line(one.directory) for one in mounted)


async def _mount(
    reference: str,
    directory: str,
    store: str,
    options: CacheOptions,
    member: str | None,
    volume: str | None,
    fit: tuple[dict[str, str], str, tuple[str, ...]],
) -> tuple[Digest, list[Mounted], tuple[str, ...]]:
    from restore.compat import OnMismatch
    from snapcask.caches import locate_fitting
    from transfer.cache.publish import mount_image

    facts, on_mismatch, override = fit
    cache = options.open()
    paths, digest, warnings = await locate_fitting(
        cache, reference, store, member=member, facts=facts,
        on_mismatch=OnMismatch.parse(on_mismatch), override=override,
    )  # fmt: skip
    found = mount_image(cache, paths, digest, directory, member=member, volume=volume)
    return digest, found, warnings


def _row(mounted: Mounted) -> dict[str, str]:
    return {
        "directory": mounted.directory,
        "volume": mounted.volume,
        "tree": f"blake3:{mounted.tree}",
    }
