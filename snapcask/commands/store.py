"""`snapcask store`: show how a store is set up and what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import json_option, store_option

if TYPE_CHECKING:
    from imgfmt.probe_record import ProbeRecord
    from imgfmt.store_record import StoreRecord

Held = dict[str, tuple[int, int]]


@click.command()
@store_option
@json_option
def command(store: str, as_json: bool) -> None:
    """Show how a store is set up, and how many objects of each kind it holds."""
    from snapcask import render
    from snapcask.running import run

    record, probed, held = run(_look(store))
    setup = {
        "uuid": record.uuid.hex(),
        "profile": record.profile,
        "page_bytes": record.page_bytes,
        "pack_bytes": record.pack_bytes,
        "codec": record.codec.value,
        "history_s": record.history_s,
        "lease_ttl_s": record.lease_ttl_s,
    }
    if as_json:
        features = {"read": record.read, "write": record.write, "delete": record.delete}
        objects = {kind: {"objects": n, "bytes": size} for kind, (n, size) in held.items()}
        found = probed.found if probed else None
        render.print_json(
            {"store": store, **setup, "features": features, "probe": found, "holds": objects}
        )
        return
    if probed:
        seen = ", ".join(f"{name} {what}" for name, what in sorted(probed.found.items()))
        setup["probe"] = render.one_line(seen)
    render.print_lines(render.facts((name, str(value)) for name, value in setup.items()))
    rows = [(kind, str(n), render.human_bytes(size)) for kind, (n, size) in held.items()]
    render.print_lines(["", *render.table(("KIND", "OBJECTS", "BYTES"), rows, right=" rr")])


async def _look(store: str) -> tuple[StoreRecord, ProbeRecord | None, Held]:
    from imgfmt import layout
    from snapcask.stores import opened

    prefixes = (
        layout.PACKS, layout.TREES, layout.PLACEMENTS, layout.IMAGES, layout.INDEX, layout.LEASES,
        layout.DOOMED, layout.TMP,
    )  # fmt: skip
    held: Held = {}
    async with opened(store) as catalog:
        for prefix in prefixes:
            found = await catalog.store.list_objects(prefix)
            held[prefix.rstrip("/")] = (len(found), sum(facts.size_bytes for facts in found))
        return catalog.record, await catalog.probe_record(), held
