"""`snapcask gc`: delete what nothing refers to."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import age, json_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.collect import CollectReport


@click.command()
@store_option
@click.option(
    "--history", "history_s", type=age, metavar="AGE",
    help="Keep what references pointed to within this time: 30d, 12h, 0s.  [default: as the store"
    " says, 30 days]",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
@json_option
@quiet_option
def command(store: str, history_s: int | None, dry_run: bool, as_json: bool, quiet: bool) -> None:
    """Delete packs and other objects that no reference needs, nor needed lately.

    Safe beside pushes and pulls: if there is anything to delete, this waits for as long as a push
    may be silent (an hour), and for the pushes at work. Nothing is deleted if a reference, or what
    one needs, is damaged. A run that is stopped is ended by the next one.
    """
    from snapcask import api, render

    with display.progress(quiet=quiet) as bar:
        progress = bar if bar is not None or quiet else _Waiting()
        report = api.gc(store=store, history_s=history_s, dry_run=dry_run, progress=progress)
    if as_json:
        document = {
            "dry_run": dry_run,
            "packs": report.packs,
            "objects": report.objects,
            "freed_bytes": report.freed_bytes,
            "needed_bytes": report.needed_bytes,
            "young_bytes": report.young_bytes,
            "seconds": round(report.seconds, 3),
        }
        render.print_json(document)
    elif not quiet:
        print(_summary(report, dry_run))


class _Waiting:
    """A line on standard error where nobody sees a bar: this can take an hour."""

    def phase(self, name: str, total_bytes: int) -> None:
        """See `Progress.phase`."""
        if name.startswith("waiting"):
            print(f"snapcask: {name}", file=sys.stderr, flush=True)

    def advance(self, n_bytes: int) -> None:
        """Nothing is counted."""


def _summary(report: CollectReport, dry_run: bool) -> str:
    from snapcask.render import human_bytes

    verb = "would delete" if dry_run else "deleted"
    freed, needed = human_bytes(report.freed_bytes), human_bytes(report.needed_bytes)
    text = f"{verb} {report.packs} packs and {report.objects} other objects, {freed};"
    text += f" {needed} are needed"
    if report.young_bytes:
        text += f"; {human_bytes(report.young_bytes)} may be of a push at work"
    return text
