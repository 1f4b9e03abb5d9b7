"""`snapcask ls`: list the references of a store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from snapcask.commands.options import json_option, store_option

if TYPE_CHECKING:
    from transfer.naming import ListedReference


@click.command()
@store_option
@click.option("--all", "hidden", is_flag=True, help="Deleted and reserved references too.")
@json_option
def command(store: str, hidden: bool, as_json: bool) -> None:
    """List the references of a store: what they point to, since when, and how large it is."""
    from snapcask import render
    from snapcask.running import run

    listed = run(_list(store, hidden=hidden))
    if as_json:
        render.print_json({"references": [_document(found) for found in listed]})
    else:
        now_ns = time.time_ns()
        header = ("REFERENCE", "DIGEST", "KIND", "AGE", "SIZE", "ZEROS")
        rows = [_row(found, now_ns) for found in listed]
        render.print_lines(render.table(header, rows, right="   rrr"))
        render.warn(
            f"{found.record.name}:{found.record.tag}: {found.problem}"
            for found in listed
            if found.problem
        )


async def _list(store: str, *, hidden: bool) -> list[ListedReference]:
    from snapcask.stores import opened
    from transfer.naming import list_references

    async with opened(store) as catalog:
        return await list_references(catalog, hidden=hidden)


def _document(found: ListedReference) -> dict[str, Any]:
    record = found.record
    return {
        "reference": f"{record.name}:{record.tag}",
        "name": record.name,
        "tag": record.tag,
        "target_kind": record.target_kind.value,
        "digest": None if record.target is None else str(record.target),
        "time_ns": record.time_ns,
        "who": record.who,
        "members": found.n_members,
        "variants": found.n_variants,
        "logical_bytes": found.logical_bytes,
        "zero_bytes": found.zero_bytes,
        "problem": found.problem,
    }


def _row(found: ListedReference, now_ns: int) -> tuple[str, ...]:
    from snapcask.render import human_age, human_bytes

    record = found.record
    if found.n_variants is not None:
        kind = f"variants, {found.n_variants} images"
    elif found.n_members is not None and found.n_members > 1:
        kind = f"image, {found.n_members} members"
    else:
        gone = "damaged" if found.problem else "deleted"
        kind = gone if record.target is None else record.target_kind.value
    sizes = (found.logical_bytes, found.zero_bytes)
    return (
        f"{record.name}:{record.tag}",
        record.target.short if record.target else "-",
        kind,
        human_age((now_ns - record.time_ns) / 1e9),
        *("-" if size is None else human_bytes(size) for size in sizes),
    )
