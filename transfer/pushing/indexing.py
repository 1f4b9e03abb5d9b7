"""Index segments in a store: writing, joining and rebuilding them. Losing one costs only dedup."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from imgfmt import index, layout
from imgfmt.errors import ImageError, NotFound
from imgfmt.index import IndexSegment
from imgfmt.pack import PackTable
from transfer.catalog import Catalog
from transfer.store.base import ObjectFacts

JOIN_FROM_SEGMENTS = 8
MAX_JOINED_BYTES = 2_000_000 * index.ENTRY_BYTES
"""Joining takes three times the memory of its result."""

_PACKS_PER_ROUND = 4096


async def write_segment(catalog: Catalog, segment: IndexSegment) -> tuple[str, int]:
    """Store a segment under a new name; returns its key and size in bytes."""
    key = layout.segment_key(secrets.token_bytes(16))
    pieces = index.encode(segment)
    await catalog.store.put(key, pieces)
    return key, sum(len(piece) for piece in pieces)


async def join_segments(catalog: Catalog, own: Sequence[str]) -> None:
    """Replace the segments `own` by their union, and small ones of the store when they are many.

    No union gets larger than MAX_JOINED_BYTES. Segments are hints, so a reader that loses one
    meanwhile loses nothing but dedup.
    """
    there = await catalog.store.list_objects(layout.INDEX)
    mine = set(own)
    if len(mine) > 1:
        for keys in _groups([facts for facts in there if facts.key in mine]):
            await _replace(catalog, keys)
        there = await catalog.store.list_objects(layout.INDEX)
    small = [facts for facts in there if facts.size_bytes < MAX_JOINED_BYTES]
    if len(small) >= JOIN_FROM_SEGMENTS:
        await _replace(catalog, _groups(small)[0])


def _groups(segments: Sequence[ObjectFacts]) -> list[list[str]]:
    """The keys of `segments` in groups that are to be joined, the smallest segments first."""
    groups: list[list[str]] = [[]]
    total = 0
    for facts in sorted(segments, key=lambda facts: facts.size_bytes):
        if total + facts.size_bytes > MAX_JOINED_BYTES and groups[-1]:
            groups.append([])
            total = 0
        groups[-1].append(facts.key)
        total += facts.size_bytes
    return groups


async def _replace(catalog: Catalog, keys: list[str]) -> None:
    """Write the union of the segments `keys` and remove them; a single one stays as it is."""
    segments: list[IndexSegment] = []
    read: list[str] = []
    for key in keys if len(keys) > 1 else ():
        try:
            segments.append(index.decode(await catalog.read(key), catalog.named(key)))
            read.append(key)
        except NotFound:
            continue
        except ImageError:
            continue
    if len(read) > 1:
        await write_segment(catalog, index.merge(segments))
        for key in read:
            await catalog.store.delete(key)


async def forget_packs(catalog: Catalog, packs: Sequence[bytes]) -> None:
    """Take the entries of packs that are gone out of the segments that have them."""
    for facts in await catalog.store.list_objects(layout.INDEX) if packs else ():
        try:
            segment = index.decode(await catalog.read(facts.key), catalog.named(facts.key))
        except ImageError:  # gone or damaged: a hint that nobody can follow
            continue
        left = index.without(segment, packs)
        if len(left.packs) == len(segment.packs):
            continue
        if len(left):
            await write_segment(catalog, left)
        await catalog.store.delete(facts.key)


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What `rebuild_index` found. `unreadable`: one line a pack whose table can't be read."""

    packs: int
    chunks: int
    segments: int
    unreadable: list[str]


async def rebuild_index(catalog: Catalog) -> RebuildReport:
    """Write segments of all packs from their own tables, then remove the earlier ones."""
    before = [facts.key for facts in await catalog.store.list_objects(layout.INDEX)]
    packs = chunks = segments = 0
    unreadable: list[str] = []
    tables: list[PackTable] = []

    async def flush() -> None:
        nonlocal segments
        if tables:
            await write_segment(catalog, index.build(tables))
            segments += 1
            tables.clear()

    for facts in await catalog.store.list_objects(layout.PACKS):
        name = layout.pack_name_of(facts.key)
        if name is None:
            unreadable.append(f"{catalog.named(facts.key)} is no pack; remove it")
            continue
        try:
            table = await catalog.pack_table(name)
        except NotFound:
            continue
        except ImageError as error:
            unreadable.append(str(error))
            continue
        packs, chunks = packs + 1, chunks + len(table)
        tables.append(table)
        if len(tables) == _PACKS_PER_ROUND:
            await flush()
    await flush()
    for key in before:
        await catalog.store.delete(key)
    return RebuildReport(packs, chunks, segments, unreadable)
