"""`snapcask prefetch`, also `snapcask cache warm`: have an image in the cache of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands import display
from snapcask.commands.options import (
    cache_options,
    facts_option,
    json_option,
    memory_option,
    quiet_option,
    store_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapcask.caches import CacheOptions
    from transfer.cache.warm import WarmConfig, WarmReport
    from transfer.progress import Progress


@click.command()
@click.argument("reference", metavar="REF")
@store_option
@cache_options
@click.option("--member", metavar="NAME", help="This member only.")
@facts_option("A fact of the machine, to choose among variants.")
@click.option("--buffered", is_flag=True, help="Leave it in memory: for what is read at once.")
@click.option(
    "--no-fsync", is_flag=True, help="Do not wait until it is on disk; read again after a restart."
)
@memory_option
@json_option
@quiet_option
def command(
    reference: str,
    store: str,
    cache: CacheOptions,
    member: str | None,
    facts: tuple[tuple[str, str], ...],
    buffered: bool,
    no_fsync: bool,
    max_memory_bytes: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Have the image REF in the cache of this node, fetching only what no image there has.

    Prints the image's digest. However many ask at once, it is fetched once.
    """
    from snapcask import render
    from snapcask.running import run
    from snapcask.stores import transfer_config
    from transfer.cache.warm import WarmConfig

    transfer = transfer_config(max_memory_bytes, fsync=not no_fsync)
    config = WarmConfig(transfer=transfer, direct=not buffered)
    with display.progress(quiet=quiet) as progress:
        report = run(_warm(reference, store, cache, member, dict(facts), config, progress))
    if as_json:
        render.print_json(_document(report))
        return
    print(report.digest)
    if not quiet:
        render.warn(report.warnings)
        if render.on_terminal():
            render.print_lines(render.facts(_summary(report)))


async def _warm(
    reference: str,
    store: str,
    options: CacheOptions,
    member: str | None,
    facts: Mapping[str, str],
    config: WarmConfig,
    progress: Progress | None,
) -> WarmReport:
    from imgfmt.reference import parse_reference
    from restore.host_facts import MachineFacts
    from snapcask.caches import opened_both
    from transfer.cache.warm import warm

    async with opened_both(options, store) as (cache, catalog, paths):
        return await warm(
            cache,
            paths,
            catalog,
            await catalog.resolve(parse_reference(reference)),
            member=member,
            config=config,
            facts=MachineFacts(facts),
            progress=progress,
        )


def _document(report: WarmReport) -> dict[str, object]:
    from snapcask.render import rounded

    return {
        "digest": str(report.digest),
        "trees": [str(member.tree) for member in report.members],
        "built": report.built,
        "waited": report.waited,
        "logical_bytes": report.logical_bytes,
        "fetched_bytes": report.fetched_bytes,
        "shared_bytes": report.shared_bytes,
        "copied_bytes": report.copied_bytes,
        "seconds": rounded(report.seconds),
        "warnings": list(report.warnings),
    }


def _summary(report: WarmReport) -> list[tuple[str, str]]:
    from snapcask.render import human_bytes, seconds_text

    return [
        ("trees", f"{len(report.members)}, {report.built} of them new"),
        ("fetched", human_bytes(report.fetched_bytes)),
        ("shared", human_bytes(report.shared_bytes)),
        ("copied", human_bytes(report.copied_bytes)),
        ("time", seconds_text(report.seconds)),
    ]
