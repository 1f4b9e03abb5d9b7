"""`snapcask bench`: what dedup would find in directories of the user's own. Stores nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option

if TYPE_CHECKING:
    from transfer.dedup import DirectoryFound, Study


@click.command()
@click.argument("directories", metavar="DIR...", nargs=-1, required=True)
@json_option
def command(directories: tuple[str, ...], as_json: bool) -> None:
    """Show what each DIR would add to a store, were they pushed in this order.

    For each: the new bytes with page-CDC, as a push cuts, and with chunks a quarter and four times
    as long; with fixed sizes; and as single pages, which no way of cutting at page boundaries can
    beat. Also how fast one core of this machine cuts and hashes. Reads everything once, writes
    nothing, and takes at most 500 MB of memory, whatever the size: beyond half a million chunks
    of a kind, sizes are estimated to about 0.3 %.
    """
    from snapcask import render
    from transfer.dedup import Study

    study = Study()
    found = [study.add(directory) for directory in directories]
    if as_json:
        render.print_json(_document(directories, found, study))
    else:
        render.print_lines(_table(directories, found, study))


def _document(
    directories: tuple[str, ...], found: list[DirectoryFound], study: Study
) -> dict[str, object]:
    return {
        "directories": [
            {
                "directory": directory,
                "logical_bytes": each.logical_bytes,
                "zero_bytes": each.zero_bytes,
                "ways": [
                    {
                        "way": name,
                        "new_bytes": way.new_bytes,
                        "new_chunks": way.n_new,
                        "chunks": way.n_chunks,
                    }
                    for name, way in each.by_way.items()
                ],
            }
            for directory, each in zip(directories, found, strict=True)
        ],
        "estimated": [name for name, sample in study.samples.items() if sample.shift],
        "rates_gb_s": {name: round(rate, 3) for name, rate in _rates(found).items()},
    }


def _rates(found: list[DirectoryFound]) -> dict[str, float]:
    cut_s = sum(each.cut_s for each in found)
    hash_s = sum(each.hash_s for each in found)
    return {
        "cut": sum(each.cut_bytes for each in found) / 1e9 / cut_s if cut_s else 0.0,
        "hash": sum(each.hashed_bytes for each in found) / 1e9 / hash_s if hash_s else 0.0,
    }


def _table(directories: tuple[str, ...], found: list[DirectoryFound], study: Study) -> list[str]:
    from snapcask.render import human_bytes, one_line, share, table

    header = ["", *(one_line(directory) for directory in directories)]
    rows = [
        ["size", *(human_bytes(each.logical_bytes) for each in found)],
        ["zero pages", *(share(each.zero_bytes, each.logical_bytes) for each in found)],
    ]
    for name, sample in study.samples.items():
        mark = ", estimated" if sample.shift else ""
        new = [human_bytes(each.by_way[name].new_bytes) for each in found]
        rows.append([f"new, {name}{mark}", *new])
    rates = _rates(found)
    return [
        *table(header, rows, right=" " + "r" * len(found)),
        "",
        f"one core cuts {rates['cut']:.1f} GB/s and hashes {rates['hash']:.1f} GB/s",
    ]
