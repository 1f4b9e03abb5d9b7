"""Plans: what is read together, once, and in which order."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.errors import OutOfResources
from tests.transfer.fixture_store import KIB, MIB, PAGE, FixtureStore, Node, noise
from transfer.plan import (
    GAP_BYTES,
    ChunkTable,
    Numbers,
    ReadPlan,
    chunk_table,
    plan_reads,
)

SPAN = 2 * MIB
Place = tuple[int, int, int]


def table_of(places: list[Place], digests: list[int] | None = None) -> ChunkTable:
    """Raw chunks at these (pack, offset, bytes); equal places have equal digests unless given."""
    known: dict[Place, int] = {}
    numbered = digests or [known.setdefault(place, len(known)) for place in places]
    n_packs = max((pack for pack, _, _ in places), default=-1) + 1
    sizes = np.array([size for _, _, size in places], "u4")
    return ChunkTable(
        packs=np.arange(16 * n_packs, dtype=np.uint8).reshape(-1, 16),
        pack=np.array([pack for pack, _, _ in places], "u4"),
        offset=np.array([offset for _, offset, _ in places], "u8"),
        stored_bytes=sizes,
        codec=np.zeros(len(places), "u1"),
        plain_bytes=sizes,
        digest=np.repeat(np.array(numbered, "u1")[:, None], 32, axis=1),
        rank=np.arange(len(places)),
        first=(0, len(places)),
    )


def ranges(plan: ReadPlan) -> list[tuple[int, int, int]]:
    """Pack, offset and length of each operation in order; a pack is told by its first byte."""
    return [(op.pack[0] // 16, op.offset, op.size_bytes) for op in plan.ops()]


def numbers_of(plan: ReadPlan) -> list[list[list[int]]]:
    """For each operation, for each piece, the chunks that it is."""
    return [
        [plan.wanted_as(piece).tolist() for piece in range(op.first, op.end)] for op in plan.ops()
    ]


def test_chunks_are_read_together_over_small_gaps_only() -> None:
    near, far = 8192 + GAP_BYTES, 12288 + 2 * GAP_BYTES + 1
    plan = plan_reads(
        table_of([(0, 4096, 4096), (0, near, 4096), (0, far, 4096)]), None, span_bytes=SPAN
    )
    assert ranges(plan) == [(0, 4096, near), (0, far, 4096)]


def test_an_operation_stays_within_a_pack() -> None:
    plan = plan_reads(table_of([(0, 2**32 - 8192, 4096), (1, 4096, 4096)]), None, span_bytes=SPAN)
    assert ranges(plan) == [(0, 2**32 - 8192, 4096), (1, 4096, 4096)]


def test_no_operation_spans_more_than_a_buffer() -> None:
    plan = plan_reads(table_of([(0, 4096 + i * MIB, MIB) for i in range(5)]), None, span_bytes=SPAN)
    assert ranges(plan) == [(0, 4096, SPAN), (0, 4096 + SPAN, SPAN), (0, 4096 + 2 * SPAN, MIB)]


def test_a_chunk_that_no_buffer_holds_is_refused() -> None:
    with pytest.raises(OutOfResources, match=f"takes {SPAN + 1} bytes, a buffer has {SPAN}"):
        plan_reads(table_of([(0, 4096, SPAN + 1)]), None, span_bytes=SPAN)


def test_a_chunk_that_is_wanted_in_many_places_is_read_once() -> None:
    table = table_of([(0, 4096, 4096), (0, 8192, 4096), (0, 4096, 4096)])
    plan = plan_reads(table, None, span_bytes=SPAN)
    assert ranges(plan) == [(0, 4096, 8192)]
    assert numbers_of(plan) == [[[0, 2], [1]]]
    assert [op.plain_bytes for op in plan.ops()] == [12288]
    assert (plan.n_chunks, plan.plain_bytes) == (3, 12288)


def test_chunks_at_one_place_that_should_differ_are_checked_each() -> None:
    table = table_of([(0, 4096, 4096), (0, 4096, 4096)], digests=[1, 2])
    assert numbers_of(plan_reads(table, None, span_bytes=SPAN)) == [[[0], [1]]]


def test_chunks_that_overlap_are_read_together() -> None:
    table = table_of([(0, 4096, MIB), (0, 8192, 4096), (0, 4096 + MIB, 4096)])
    plan = plan_reads(table, None, span_bytes=SPAN)
    assert ranges(plan) == [(0, 4096, MIB + 4096)]


def test_only_wanted_chunks_are_read() -> None:
    table = table_of([(0, 4096 * (i + 1), 4096) for i in range(100)])
    plan = plan_reads(table, np.array([7, 90]), span_bytes=SPAN)
    assert ranges(plan) == [(0, 8 * 4096, 4096), (0, 91 * 4096, 4096)]
    assert plan.n_chunks == 2


def test_an_empty_plan_has_no_operations() -> None:
    plan = plan_reads(table_of([]), None, span_bytes=SPAN)
    assert (list(plan.ops()), len(plan), plan.plain_bytes) == ([], 0, 0)


def test_splitting_an_operation_gives_one_for_each_piece() -> None:
    table = table_of([(0, 4096, 100), (0, 8192, 200), (0, 4096, 100)])
    plan = plan_reads(table, None, span_bytes=SPAN)
    (op,) = plan.ops()
    parts = [(part.offset, part.size_bytes, part.plain_bytes) for part in plan.split(op)]
    assert parts == [(4096, 100, 200), (8192, 200, 200)]


def test_small_files_come_first_and_the_others_in_their_order(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path / "store", chunks_a_pack=1)
    large, small = Node(noise(2 * MIB, 1)), Node(noise(64 * KIB, 2))
    content = store.content(store.add_tree({b"a": large, b"b": small, b"c": large, b"d": small}))
    store.close()
    table = chunk_table([(content.tree, content.placement)], PAGE)
    plan = plan_reads(table, None, span_bytes=SPAN)
    entries = [content.tree.chunk_entry[plan.wanted_as(op.first)].tolist() for op in plan.ops()]
    assert entries[0] == [2, 4]  # b and d, which are the same bytes
    assert all(found == [1, 3] for found in entries[1:])
    order = [int(plan.wanted_as(op.first)[0]) for op in plan.ops()][1:]
    assert order == sorted(order)


def test_two_trees_share_the_packs_that_both_lie_in(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path / "store")
    shared, own = Node(noise(MIB, 1)), Node(noise(MIB, 2))
    trees = [store.add_tree({b"x": shared}), store.add_tree({b"x": shared, b"y": own})]
    contents = [store.content(tree) for tree in trees]
    store.close()
    table = chunk_table([(c.tree, c.placement) for c in contents], PAGE)
    assert len(table.packs) == 2
    n_shared = contents[0].tree.n_chunks
    assert table.first == (0, n_shared, n_shared + contents[1].tree.n_chunks)
    assert table.tree_of(n_shared - 1) == (0, n_shared - 1)
    assert table.tree_of(n_shared) == (1, 0)
    plan = plan_reads(table, None, span_bytes=SPAN)
    assert sum(op.size_bytes for op in plan.ops()) == 2 * MIB
    assert plan.plain_bytes == 3 * MIB


@st.composite
def _wanted_chunks(draw: st.DrawFn) -> tuple[ChunkTable, Numbers]:
    near = st.integers(1, 60).map(lambda page: page * 4096)
    far = st.integers(1, 60).map(lambda page: page * 40 * 4096)
    place = st.tuples(st.integers(0, 2), near | far, st.integers(1, 300_000))
    table = table_of(draw(st.lists(place, min_size=1, max_size=40)))
    chosen = draw(st.sets(st.integers(0, len(table) - 1)))
    return table, np.array(sorted(chosen), dtype=np.int64)


@given(_wanted_chunks())
def test_every_wanted_chunk_is_in_one_operation_that_covers_it(
    case: tuple[ChunkTable, Numbers],
) -> None:
    table, wanted = case
    plan = plan_reads(table, wanted, span_bytes=MIB)
    found: list[int] = []
    urgency = []
    for op in plan.ops():
        assert 0 < op.size_bytes <= MIB
        of_op = [n for piece in range(op.first, op.end) for n in plan.wanted_as(piece).tolist()]
        for number in of_op:
            begin = int(table.offset[number]) - op.offset
            assert 0 <= begin <= begin + int(table.stored_bytes[number]) <= op.size_bytes
            assert table.packs[table.pack[number]].tobytes() == op.pack
        found += of_op
        urgency.append(min(of_op))
    assert sorted(found) == wanted.tolist()
    assert urgency == sorted(urgency)


@pytest.mark.slow
@pytest.mark.parametrize("shuffled", [False, True])
def test_three_million_chunks_are_planned_in_a_second(shuffled: bool) -> None:
    n_chunks = 3_000_000
    place = np.arange(n_chunks)
    if shuffled:
        np.random.default_rng(1).shuffle(place)
    size = 260 * KIB
    table = ChunkTable(
        packs=np.zeros((n_chunks // 256 + 1, 16), np.uint8),
        pack=(place // 256).astype("u4"),
        offset=(4096 + place % 256 * size).astype("u8"),
        stored_bytes=np.full(n_chunks, size, "u4"),
        codec=np.zeros(n_chunks, "u1"),
        plain_bytes=np.full(n_chunks, size, "u4"),
        digest=np.zeros((n_chunks, 32), np.uint8),
        rank=np.arange(n_chunks),
        first=(0, n_chunks),
    )
    begun = time.process_time()
    plan = plan_reads(table, None, span_bytes=16 * MIB)
    assert time.process_time() - begun < 2
    assert plan.n_chunks == n_chunks
