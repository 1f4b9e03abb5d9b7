"""`snapcask mount`: mount an image of the cache, read-only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import cache_options, json_option, quiet_option, store_option

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
@json_option
@quiet_option
def command(
    reference: str,
    directory: str,
    store: str,
    cache: CacheOptions,
    member: str | None,
    volume: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Mount the image REF, which is in the cache, at the directory DIR.

    Nobody can write to it, or make it writable. The only member is DIR itself; several become
    directories in it.
    """
    from snapcask import render
    from snapcask.running import run

    digest, mounted = run(_mount(reference, directory, store, cache, member, volume))
    if as_json:
        document = {"digest": str(digest), "mounts": [_row(one) for one in mounted]}
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
) -> tuple[Digest, list[Mounted]]:
    from snapcask.caches import locate
    from transfer.cache.publish import mount_image

    cache = options.open()
    paths, digest = await locate(cache, reference, store)
    found = mount_image(cache, paths, digest, directory, member=member, volume=volume)
    return digest, found


def _row(mounted: Mounted) -> dict[str, str]:
    return {
        "directory": mounted.directory,
        "volume": mounted.volume,
        "tree": f"blake3:{mounted.tree}",
    }
