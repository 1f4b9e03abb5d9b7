"""`snapcask verify`: read images back and check every chunk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from snapcask.commands import display
from snapcask.commands.options import json_option, memory_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.verify import Damage, VerifyReport

_PACK_NAME = re.compile(r"[0-9a-f]{32}")


@click.command()
@click.argument("references", metavar="REF...", nargs=-1)
@store_option
@click.option("--all", "everything", is_flag=True, help="Every image and reference of the store.")
@memory_option
@json_option
@quiet_option
def command(
    references: tuple[str, ...],
    store: str,
    everything: bool,
    max_memory_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Read back all that the images REF need, and check every chunk.

    Prints each damaged object and the files that are lost by it; the exit code is 6 then. Changes
    nothing.
    """
    from snapcask import api, render
    from snapcask.exitcodes import ExitCode

    if everything == bool(references):
        raise click.UsageError("give either images or --all")
    with display.progress(quiet=quiet) as progress:
        report = api.verify(
            None if everything else references,
            store=store,
            max_memory_bytes=max_memory_bytes,
            progress=progress,
        )
    if as_json:
        render.print_json(_document(report))
    else:
        render.print_lines(line for damage in report.damages for line in _damage_lines(damage))
        render.print_lines(_advice(report))
        if not quiet:
            print(_verdict(report))
    return ExitCode.OK if report.sound else ExitCode.CORRUPT


def _verdict(report: VerifyReport) -> str:
    from snapcask.render import human_bytes

    n_damaged = len(report.damages)
    found = f"{n_damaged} damaged objects" if n_damaged else "all is well"
    return (
        f"{found}: {report.images} images, {report.trees} trees, {report.chunks} chunks in"
        f" {report.packs} packs, {human_bytes(report.fetched_bytes)} read"
        f" in {report.seconds['total']:.1f} s"
    )


def _damage_lines(damage: Damage) -> list[str]:
    from snapcask.render import one_line, sentence

    lines = [f"damaged {damage.kind}: {sentence(damage.reason)}"]
    lines += [
        f"  lost: {one_line(file.path)} of member {file.member}, image {file.image.short}"
        for file in damage.files
    ]
    return lines


def _advice(report: VerifyReport) -> list[str]:
    """How to mend what is damaged, a line for each pack and each kind of other object."""
    from imgfmt import layout
    from transfer.verify import DamageKind

    packs = {damage.pack for damage in report.damages if damage.pack}
    gone = {damage.name for damage in report.damages if damage.gone}
    packs |= {damage.name for damage in report.damages if damage.kind is DamageKind.PACK} - gone
    keys = [
        layout.pack_key(bytes.fromhex(name)) for name in sorted(packs) if _PACK_NAME.fullmatch(name)
    ]
    again = "push the directories of the images again, or `snapcask cp` them from another store"
    lines = [f"to mend: move {key} out of the store, then {again}" for key in keys]
    kinds = {damage.kind for damage in report.damages}
    written_anew = {DamageKind.IMAGE, DamageKind.TREE, DamageKind.PLACEMENT}
    if gone or (not keys and kinds & written_anew):
        lines.append(f"to mend: {again}")
    if DamageKind.REFERENCE in kinds:
        lines.append("to mend a reference: push to it again, or `snapcask tag` an image with it")
    if DamageKind.INDEX in kinds:
        lines.append("to mend the index: `snapcask index rebuild`")
    return lines


def _document(report: VerifyReport) -> dict[str, Any]:
    from snapcask.render import path_fields, rounded

    return {
        "sound": report.sound,
        "images": report.images,
        "trees": report.trees,
        "packs": report.packs,
        "chunks": report.chunks,
        "fetched_bytes": report.fetched_bytes,
        "damages": [
            {
                "kind": damage.kind.value,
                "name": damage.name,
                "reason": damage.reason,
                "pack": damage.pack,
                "files": [
                    {"image": str(f.image), "member": f.member, **path_fields(f.path)}
                    for f in damage.files
                ],
            }
            for damage in report.damages
        ],
        "seconds": rounded(report.seconds),
    }
