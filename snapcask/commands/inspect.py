"""`snapcask inspect`: show what an image or a directory holds."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import json_option, quiet_option

if TYPE_CHECKING:
    from imgfmt.digest import Digest
    from imgfmt.image import Variants
    from transfer.inspect import DirectoryReport, ImageFacts
    from transfer.progress import Progress

_PATH_STARTS = ("/", "./", "../", "~")


@click.command()
@click.argument("what", metavar="REF|DIR")
@click.option(
    "--store", metavar="STORE", envvar="SNAPCASK_STORE", show_envvar=True,
    help="Directory, file:// or s3:// URL of the store; not needed for DIR.",
)  # fmt: skip
@click.option("--entries", is_flag=True, help="List all entries, not only the largest files.")
@json_option
@quiet_option
def command(what: str, store: str | None, entries: bool, as_json: bool, quiet: bool) -> None:
    """Show what an image, or a directory that could become one, holds.

    What exists as a directory is taken as one; write NAME:TAG to name an image then. A directory is
    read whole. Of a CRIU dump its processes, pages and version are shown.
    """
    from snapcask import render
    from snapcask.commands import inspecting
    from snapcask.running import run

    if os.path.isdir(what) or what.startswith(_PATH_STARTS) or what in (".", ".."):
        with display.progress(quiet=quiet) as progress:
            report = run(_directory(what, progress))
        document = inspecting.directory_document(what, report)
        lines = inspecting.directory_lines(what, report, all_entries=entries)
        if not as_json and not quiet:
            render.warn(report.warnings)
    elif store:
        found = run(_stored(what, store))
        document = inspecting.stored_document(what, found)
        lines = inspecting.stored_lines(what, found, all_entries=entries)
    else:
        raise click.UsageError("no store is given: use --store or set SNAPCASK_STORE")
    if as_json:
        render.print_json(document)
    else:
        render.print_lines(lines)


async def _directory(path: str, progress: Progress | None) -> DirectoryReport:
    from imgfmt.chunking import Profile
    from snapcask.stores import transfer_config
    from transfer.inspect import inspect_directory
    from transfer.progress import Silent

    return await inspect_directory(
        path, profile=Profile(), config=transfer_config(None), progress=progress or Silent()
    )


async def _stored(reference: str, store: str) -> ImageFacts | tuple[Digest, Variants]:
    from imgfmt.image import Variants
    from imgfmt.reference import parse_reference
    from snapcask.stores import opened
    from transfer.inspect import inspect_image

    async with opened(store) as catalog:
        digest = await catalog.resolve(parse_reference(reference))
        found = await catalog.image(digest)
        if isinstance(found, Variants):
            return digest, found
        return await inspect_image(catalog, digest, found)
