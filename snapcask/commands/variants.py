"""`snapcask variants`: make a list of images to choose from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, quiet_option, store_option

if TYPE_CHECKING:
    from transfer.naming import Naming


@click.command()
@click.argument("name_tag", metavar="NAME:TAG")
@click.argument("references", metavar="REF...", nargs=-1, required=True)
@store_option
@json_option
@quiet_option
def command(
    name_tag: str, references: tuple[str, ...], store: str, as_json: bool, quiet: bool
) -> None:
    """Point NAME:TAG at a list of the images REF, the preferred first.

    A pull of NAME:TAG takes the first image that is for the machine; `snapcask check` says which.
    Prints the digest of the list.
    """
    from snapcask.commands.naming import print_naming
    from snapcask.running import run

    print_naming(run(_write(name_tag, references, store)), as_json=as_json, quiet=quiet)


async def _write(name_tag: str, references: tuple[str, ...], store: str) -> Naming:
    from imgfmt.reference import parse_reference
    from snapcask.requests import parse_name_tag
    from snapcask.stores import opened, transfer_config
    from transfer.naming import write_variants

    sources, target = [parse_reference(text) for text in references], parse_name_tag(name_tag)
    async with opened(store, write=True) as catalog:
        return await write_variants(catalog, sources, *target, config=transfer_config(None))
