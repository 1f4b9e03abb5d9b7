"""Packs that no index segment has: what a push that was killed left behind (SPEC.md 11.1, step 2).

A killed push leaves its lease, so nothing is searched for where no other lease is.
"""

from __future__ import annotations

from collections.abc import Iterator

from imgfmt import index, layout
from imgfmt.errors import ImageError, NotFound
from imgfmt.pack import PackTable
from transfer.catalog import Catalog
from transfer.execute import each
from transfer.pushing.indexing import write_segment
from transfer.pushing.known import N_LOOKERS, KnownChunks

N_FOLDERS = 256
LARGE_PACKS = 65_536
"""Stores with more packs are listed folder by folder, so that no listing takes much memory."""


async def adopt_packs(catalog: Catalog, known: KnownChunks, own_lease: str) -> int:
    """Write a segment of finished packs that no segment has; returns its size in bytes, or 0.

    `own_lease` is the key of the caller's lease, which was just written. Leases that have been over
    for long are removed after that, so that the search ends with what it was for.
    """
    leases = {facts.key: facts for facts in await catalog.store.list_objects(layout.LEASES)}
    own = leases.pop(own_lease, None)
    if not leases:
        return 0
    tables = await _unindexed_tables(catalog, known)
    size_bytes = 0
    if tables:
        segment = index.build(tables)
        _, size_bytes = await write_segment(catalog, segment)
        known.settle(segment, tables)
    if own is not None:
        over_ns = own.written_ns - 2 * catalog.record.lease_ttl_s * 10**9
        for facts in leases.values():
            if facts.written_ns < over_ns:
                await catalog.store.delete(facts.key)
    return size_bytes


async def _unindexed_tables(catalog: Catalog, known: KnownChunks) -> list[PackTable]:
    indexed = known.indexed_packs()
    tables: list[PackTable] = []

    async def look(prefix: str) -> None:
        for facts in await catalog.store.list_objects(prefix):
            name = layout.pack_name_of(facts.key)
            if name is None or name in indexed or known.is_doomed(name):
                continue
            try:
                tables.append(await catalog.pack_table(name))
            except NotFound:
                continue
            except ImageError as error:
                known.unreadable.add(f"{error}; run `snapcask verify --all`")

    await each(pack_prefixes(len(indexed)), look, N_LOOKERS)
    return tables


def pack_prefixes(n_packs: int) -> Iterator[str]:
    """What to list to see all packs of a store that has about so many."""
    if n_packs < LARGE_PACKS:
        yield layout.PACKS
        return
    for number in range(N_FOLDERS):
        yield f"{layout.PACKS}{number:02x}/"
