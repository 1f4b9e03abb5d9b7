"""`snapcask index`: maintain the index of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.pushing.indexing import RebuildReport


@click.group(no_args_is_help=False)
def command() -> None:
    """Maintain the index, which tells a push what the store has already."""


@command.command()
@store_option
@json_option
@quiet_option
def rebuild(store: str, as_json: bool, quiet: bool) -> int:
    """Write the index anew from all packs.

    Nothing is lost without an index but space: chunks are stored again that it does not name. The
    exit code is 6 if the table of a pack can't be read.
    """
    from snapcask import render
    from snapcask.exitcodes import ExitCode
    from snapcask.running import run

    report = run(_rebuild(store))
    if as_json:
        document = {
            "packs": report.packs,
            "chunks": report.chunks,
            "segments": report.segments,
            "unreadable": report.unreadable,
        }
        render.print_json(document)
    else:
        render.print_lines(f"damaged pack: {reason}" for reason in report.unreadable)
        if not quiet:
            print(f"indexed {report.chunks} chunks in {report.packs} packs")
    return ExitCode.CORRUPT if report.unreadable else ExitCode.OK


async def _rebuild(store: str) -> RebuildReport:
    from snapcask.stores import opened
    from transfer.pushing.indexing import rebuild_index

    async with opened(store, write=True) as catalog:
        return await rebuild_index(catalog)
