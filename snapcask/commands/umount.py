"""`snapcask umount`: undo `snapcask mount`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import cache_options, json_option, quiet_option

if TYPE_CHECKING:
    from snapcask.caches import CacheOptions


@click.command()
@click.argument("directory", metavar="DIR")
@cache_options
@json_option
@quiet_option
def command(directory: str, cache: CacheOptions, as_json: bool, quiet: bool) -> None:
    """Unmount what `snapcask mount` mounted at DIR."""
    from imgfmt.errors import ImageError
    from snapcask import render
    from transfer.cache.publish import unmount_image

    opened, problem = None, ""
    try:
        opened = cache.open()
    except ImageError as error:
        problem = f"{error}; what was mounted stays in the cache until the machine starts again"
    found = unmount_image(opened, directory)
    if problem and not quiet:
        render.warn([problem])
    if as_json:
        render.print_json({"unmounted": [one.directory for one in found]})
    elif not quiet:
        render.print_lines(render.one_line(one.directory) for one in found)
