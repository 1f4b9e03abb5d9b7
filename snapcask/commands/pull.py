"""`snapcask pull`: write an image to a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import (
    bwlimit_option,
    facts_option,
    json_option,
    memory_option,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from transfer.pull import PullReport


@click.command()
@click.argument("reference", metavar="REF")
@click.argument("directory", metavar="DIR")
@store_option
@click.option("--member", metavar="NAME", help="Write this member only, as DIR itself.")
@facts_option("A fact of the machine that the image is for, to choose among variants.")
@click.option(
    "--no-fsync", is_flag=True, help="Do not wait until all is on disk: not safe in a crash."
)
@click.option("--buffered", is_flag=True, help="Leave it in memory: for what is read at once.")
@click.option(
    "--no-resume", is_flag=True, help="Begin anew, and leave nothing behind when interrupted."
)
@memory_option
@bwlimit_option
@json_option
@quiet_option
def command(
    reference: str,
    directory: str,
    store: str,
    member: str | None,
    facts: tuple[tuple[str, str], ...],
    no_fsync: bool,
    buffered: bool,
    no_resume: bool,
    max_memory_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the image REF to DIR, which is absent or empty: all of it, or nothing.

    A pull that is interrupted keeps what it has, hidden, for the next one to the same DIR.
    Prints the image's digest. The only member is DIR itself; several become directories in it.
    """
    from snapcask import api

    with display.progress(quiet=quiet) as progress:
        report = api.pull(
            reference,
            directory,
            store=store,
            member=member,
            facts=dict(facts),
            fsync=not no_fsync,
            buffered=buffered,
            resume=not no_resume,
            max_memory_bytes=max_memory_bytes,
            progress=progress,
        )
    _print(report, directory, as_json=as_json, quiet=quiet)


def _print(report: PullReport, directory: str, *, as_json: bool, quiet: bool) -> None:
    from snapcask import render

    if as_json:
        document = {
            "digest": str(report.digest),
            "directory": directory,
            "logical_bytes": report.logical_bytes,
            "fetched_bytes": report.fetched_bytes,
            "chunks": report.chunks,
            "files": report.files,
            "seconds": render.rounded(report.seconds),
            "warnings": list(report.warnings),
        }
        render.print_json(document)
        return
    print(report.digest)
    if not quiet:
        render.warn(report.warnings)
        if render.on_terminal():
            pairs = [
                ("directory", render.one_line(directory)),
                ("files", f"{report.files}, {render.human_bytes(report.logical_bytes)}"),
                ("fetched", render.human_bytes(report.fetched_bytes)),
                ("time", render.seconds_text(report.seconds)),
            ]
            render.print_lines(render.facts(pairs))
