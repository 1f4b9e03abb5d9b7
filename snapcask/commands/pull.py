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
    from transfer.pulling.pull_plan import PullPlan


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
@click.option("--dry-run", is_flag=True, help="Say what would be moved, and write nothing.")
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
    dry_run: bool,
    max_memory_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the image REF to DIR, which is absent or empty: all of it, or nothing.

    A pull that is interrupted keeps what it has, hidden, for the next one to the same DIR.
    Prints the image's digest. The only member is DIR itself; several become directories in it.
    """
    from snapcask import api

    if dry_run:
        plan = api.plan_pull(
            reference,
            directory,
            store=store,
            member=member,
            facts=dict(facts),
            resume=not no_resume,
            max_memory_bytes=max_memory_bytes,
        )
        _print_plan(plan, directory, as_json=as_json, quiet=quiet)
        return
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


def _print_plan(plan: PullPlan, directory: str, *, as_json: bool, quiet: bool) -> None:
    from snapcask import render

    if as_json:
        document = {
            "dry_run": True,
            "digest": str(plan.digest),
            "directory": directory,
            "logical_bytes": plan.logical_bytes,
            "zero_bytes": plan.zero_bytes,
            "present_bytes": plan.present_bytes,
            "fetch_bytes": plan.fetch_bytes,
            "requests": plan.requests,
            "packs": plan.packs,
            "chunks": plan.chunks,
            "plain_bytes": plan.plain_bytes,
            "files": plan.files,
        }
        render.print_json(document)
        return
    print(plan.digest)
    if not quiet:
        human = render.human_bytes
        pairs = [
            ("directory", render.one_line(directory)),
            ("files", f"{plan.files}, {human(plan.logical_bytes)}"),
            ("zeros", f"{human(plan.zero_bytes)}, not moved"),
            ("there already", human(plan.present_bytes)),
            ("to fetch", f"{human(plan.fetch_bytes)}: {plan.requests} reads of {plan.packs} packs"),
            ("brings", f"{plan.chunks} chunks, {human(plan.plain_bytes)}"),
        ]
        render.print_lines(render.facts(pairs))
