"""`snapcask doctor`: what a store and this machine can do, and what limits a transfer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, store_option

if TYPE_CHECKING:
    from transfer.doctor import Diagnosis


@click.command()
@store_option
@click.option(
    "--directory", metavar="DIR", default=".", show_default=True, help="Where pulls write."
)
@json_option
def command(store: str, directory: str, as_json: bool) -> None:
    """Check the store and this machine by using them, and say what limits a transfer.

    Looks at access, conditional writes, clock, range reads, throughput, unfinished uploads, local
    disk, memory and hashing. Writes 64 MiB to the store and removes them again.
    """
    from snapcask.running import run

    found = run(_diagnose(store, directory))
    _print(found, as_json=as_json)
    if not found.healthy:
        sys.exit(_unhealthy())


async def _diagnose(store: str, directory: str) -> Diagnosis:
    from transfer.doctor import diagnose
    from transfer.store.url import open_store

    backend = open_store(store)
    try:
        return await diagnose(backend, directory)
    finally:
        backend.close()


def _unhealthy() -> int:
    from imgfmt.errors import ErrorKind
    from snapcask.exitcodes import exit_code_of

    return exit_code_of(ErrorKind.UNAVAILABLE)


def _print(found: Diagnosis, *, as_json: bool) -> None:
    from snapcask import render

    if as_json:
        document = {
            "healthy": found.healthy,
            "findings": [
                {"check": f.check, "health": f.health.value, "detail": f.detail}
                for f in found.findings
            ],
            "rates_gb_s": {name: round(rate, 3) for name, rate in found.rates_gb_s.items()},
            "limited_by": found.limited_by,
        }
        render.print_json(document)
        return
    rows = [[f.health.value, f.check, render.sentence(f.detail)] for f in found.findings]
    render.print_lines(render.table((), rows))
    if found.limited_by is not None:
        rate = found.rates_gb_s[found.limited_by]
        print(f"a pull is limited by: {found.limited_by}, {rate:.2f} GB/s")
