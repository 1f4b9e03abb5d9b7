"""Merging index segments: bounded in size and memory, and the same entries whatever the ranges."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from imgfmt import index, layout
from imgfmt.index import IndexSegment
from imgfmt.pack import PackTable
from tests.imgfmt.hostile import peak_bytes
from tests.transfer.pushes import (
    CONFIG,
    MIB,
    new_store,
    noise,
    push_request,
    request_of,
    run,
    write_files,
)
from transfer.catalog import Catalog, open_catalog
from transfer.pushing import indexing, known
from transfer.pushing.indexing import join_segments, write_segment
from transfer.pushing.known import KnownChunks


def segment_of(seed: int, n_entries: int) -> IndexSegment:
    """A segment of one pack with chunks of random names."""
    names = np.frombuffer(noise(32 * n_entries, seed), "u1").reshape(-1, 32)
    none = np.zeros(0, "u4")
    pack = noise(16, seed)
    table = PackTable(pack, 4096, names, np.full(n_entries, 7, "u4"), none, none.astype("u1"), none)
    return index.build([table])


def columns(segment: IndexSegment) -> list[list[int]]:
    parts = (segment.packs, segment.key, segment.entry_pack, segment.entry_row)
    return [part.reshape(-1).tolist() for part in parts]


@pytest.mark.parametrize("at_once", [1, 7, 50, 1000])
def test_a_union_does_not_depend_on_how_many_entries_are_merged_at_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [segment_of(seed, 40) for seed in (1, 2, 3, 1)]
    whole = index.merge(segments)
    monkeypatch.setattr(index, "_MERGED_AT_ONCE", at_once)
    assert columns(index.merge(segments)) == columns(whole)
    assert len(whole) == 120


def test_merging_takes_little_more_memory_than_its_result() -> None:
    segments = [segment_of(seed, 60_000) for seed in range(20)]
    result_bytes = index.ENTRY_BYTES * 60_000 * 20
    assert peak_bytes(lambda: index.merge(segments)) < 3 * result_bytes


def put_segments(catalog: Catalog, sizes: list[int]) -> list[str]:
    async def put() -> list[str]:
        found = [segment_of(1000 * size + i, size) for i, size in enumerate(sizes)]
        return [(await write_segment(catalog, segment))[0] for segment in found]

    return run(put())


def lengths(catalog: Catalog) -> list[int]:
    """Entries of the store's segments."""

    async def read() -> list[int]:
        facts = await catalog.store.list_objects(layout.INDEX)
        raw = [await catalog.store.get(fact.key) for fact in facts]
        return sorted(len(index.decode(octets, "segment")) for octets in raw)

    return run(read())


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return run(open_catalog(new_store(tmp_path / "store"), write=True))


def test_the_segments_of_a_push_become_one(catalog: Catalog) -> None:
    own = put_segments(catalog, [10, 20, 30])
    run(join_segments(catalog, own))
    assert lengths(catalog) == [60]


def test_no_union_gets_larger_than_the_limit(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MAX_JOINED_BYTES", 1800)
    own = put_segments(catalog, [40, 40, 40, 40, 300])
    run(join_segments(catalog, own))
    assert lengths(catalog) == [80, 80, 300]


def test_segments_of_others_are_joined_when_they_are_many(catalog: Catalog) -> None:
    put_segments(catalog, [5] * (indexing.JOIN_FROM_SEGMENTS - 1))
    run(join_segments(catalog, []))
    assert len(lengths(catalog)) == indexing.JOIN_FROM_SEGMENTS - 1
    put_segments(catalog, [6])
    run(join_segments(catalog, []))
    assert lengths(catalog) == [6 + 5 * (indexing.JOIN_FROM_SEGMENTS - 1)]


def test_a_push_merges_small_segments_and_leaves_large_ones_mapped(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "LARGE_ENTRIES", 50)
    put_segments(catalog, [60, 70] + [3] * (known.MERGE_ABOVE_SEGMENTS + 1))
    merged: list[int] = []
    really_merge = index.merge

    def merge(segments: list[IndexSegment]) -> IndexSegment:
        merged.append(max(map(len, segments)))
        return really_merge(segments)

    monkeypatch.setattr(index, "merge", merge)
    run(KnownChunks(catalog, frozenset()).load())
    assert merged == [3]


def test_a_pack_table_does_not_keep_the_tail_it_was_read_with(
    catalog: Catalog, tmp_path: Path
) -> None:
    sample = write_files(tmp_path / "d", {"f": noise(MIB)})
    run(push_request(catalog.store, request_of(sample), config=CONFIG))
    facts, *_ = run(catalog.store.list_objects(layout.PACKS))
    name = layout.pack_name_of(facts.key)
    assert name is not None
    table = run(catalog.pack_table(name))
    kept = table.names
    while isinstance(kept.base, np.ndarray):
        kept = kept.base
    assert isinstance(kept.base, memoryview)
    assert sys.getsizeof(kept.base.obj) < 4096
