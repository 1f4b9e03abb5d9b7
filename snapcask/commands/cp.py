"""`snapcask cp`: copy an image to another store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import (
    bwlimit_option,
    json_option,
    memory_option,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from transfer.copy import CopyReport
    from transfer.progress import Progress


@click.command()
@click.argument("reference", metavar="REF")
@click.argument("name_tag", metavar="NAME:TAG", required=False)
@store_option
@click.option("--to", "target", metavar="STORE", required=True, help="The store to copy to.")
@memory_option
@bwlimit_option
@json_option
@quiet_option
def command(
    reference: str,
    name_tag: str | None,
    store: str,
    target: str,
    max_memory_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Copy the image REF to another store, where NAME:TAG will name it.

    Without NAME:TAG it has the name that REF gives. The digest stays, and only packs that the other
    store lacks are moved. Prints the digest.
    """
    from snapcask.running import run

    with display.progress(quiet=quiet) as progress:
        report = run(_copy(reference, name_tag, store, target, max_memory_bytes, progress))
    _print(report, as_json=as_json, quiet=quiet)


async def _copy(
    reference: str,
    name_tag: str | None,
    store: str,
    target: str,
    max_memory_bytes: int | None,
    progress: Progress | None,
) -> CopyReport:
    from imgfmt.errors import InvalidInput
    from imgfmt.reference import parse_reference
    from snapcask.requests import parse_name_tag
    from snapcask.stores import opened, transfer_config
    from transfer.copy import copy

    parsed = parse_reference(reference)
    if name_tag is None and (parsed.by_digest or parsed.name is None):
        raise InvalidInput(f"{reference} gives no tag; say NAME:TAG of the copy too")
    name, tag = parse_name_tag(name_tag or f"{parsed.name}:{parsed.effective_tag}")
    async with opened(store) as source, opened(target, write=True) as other:
        digest = await source.resolve(parsed)
        config = transfer_config(max_memory_bytes)
        return await copy(source, other, digest, name, tag, config=config, progress=progress)


def _print(report: CopyReport, *, as_json: bool, quiet: bool) -> None:
    from snapcask import render

    if as_json:
        document = {
            "digest": str(report.digest),
            "reference": report.reference,
            "packs_moved": report.packs_moved,
            "packs_present": report.packs_present,
            "moved_bytes": report.moved_bytes,
            "metadata_bytes": report.metadata_bytes,
            "seconds": render.rounded(report.seconds),
        }
        render.print_json(document)
        return
    print(report.digest)
    if not quiet and render.on_terminal():
        moved = render.human_bytes(report.moved_bytes)
        pairs = [
            ("reference", report.reference),
            ("moved", f"{report.packs_moved} packs, {moved}"),
            ("there already", f"{report.packs_present} packs"),
            ("time", render.seconds_text(report.seconds)),
        ]
        render.print_lines(render.facts(pairs))
