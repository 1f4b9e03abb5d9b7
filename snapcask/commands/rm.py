"""`snapcask rm`: delete a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.naming import Removal


@click.command()
@click.argument("name_tag", metavar="NAME:TAG")
@store_option
@json_option
@quiet_option
def command(name_tag: str, store: str, as_json: bool, quiet: bool) -> None:
    """Delete the reference NAME:TAG. This frees no bytes.

    What it pointed to stays in the store, named by its digest, until `snapcask gc` deletes it.
    """
    from snapcask import render
    from snapcask.running import run

    removed, history_s = run(_remove(name_tag, store))
    if as_json:
        document = {
            "reference": removed.reference,
            "digest": None if removed.target is None else str(removed.target),
            "target_kind": removed.target_kind.value,
            "freed_bytes": 0,
        }
        render.print_json(document)
    elif removed.target is None:
        if not quiet:
            print(
                f"{removed.reference} is deleted. Its record was damaged: what it pointed to is not"
                " known"
            )
    elif not quiet:
        print(
            f"{removed.reference} is deleted. It frees no bytes:"
            f" {removed.target} stays for {render.human_age(history_s)} at least"
        )


async def _remove(name_tag: str, store: str) -> tuple[Removal, int]:
    from snapcask.requests import parse_name_tag
    from snapcask.stores import opened
    from transfer.naming import remove

    target = parse_name_tag(name_tag)
    async with opened(store, write=True) as catalog:
        return await remove(catalog, *target), catalog.record.history_s
