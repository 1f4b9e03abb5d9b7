"""`snapcask tag`: point a reference at an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.naming import Naming


@click.command()
@click.argument("reference", metavar="REF")
@click.argument("name_tag", metavar="NAME:TAG")
@store_option
@json_option
@quiet_option
def command(reference: str, name_tag: str, store: str, as_json: bool, quiet: bool) -> None:
    """Point NAME:TAG at what REF means now. Prints the digest."""
    from snapcask.commands.naming import print_naming
    from snapcask.running import run

    print_naming(run(_tag(reference, name_tag, store)), as_json=as_json, quiet=quiet)


async def _tag(reference: str, name_tag: str, store: str) -> Naming:
    from imgfmt.reference import parse_reference
    from snapcask.requests import parse_name_tag
    from snapcask.stores import opened, transfer_config
    from transfer.naming import tag

    source, target = parse_reference(reference), parse_name_tag(name_tag)
    async with opened(store, write=True) as catalog:
        return await tag(catalog, source, *target, config=transfer_config(None))
