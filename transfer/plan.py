"""What is read, in which order: chunks of some trees become a few large ranges of packs. Pure.

All that grows with the number of chunks is a numpy column. A chunk is known by its number: those of
the first tree come first, then those of the second, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt.errors import OutOfResources
from imgfmt.placement import Placement, locate
from imgfmt.tree import Tree

GAP_BYTES = 128 * 1024
"""What lies between two wanted chunks is read along with them up to this length."""

SMALL_FILE_BYTES = 1024 * 1024
"""Files up to this size are what a restore reads first."""

U1 = npt.NDArray[np.uint8]
U4 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """The chunks of some trees and where they lie, one item a chunk; `digest` is (n, 32).

    `pack` is an index into `packs`, (p, 16). `first` has the number of each tree's first chunk, and
    the number of all chunks last. `rank` says what is wanted early: lower first. Nobody changes it.
    """

    packs: U1
    pack: U4
    offset: U8
    stored_bytes: U4
    codec: U1
    plain_bytes: U4
    digest: U1
    rank: Numbers
    first: tuple[int, ...]

    def __len__(self) -> int:
        return self.first[-1]

    def tree_of(self, number: int) -> tuple[int, int]:
        """Index of the tree that has this chunk, and the chunk's number within it."""
        index = int(np.searchsorted(self.first, number, side="right")) - 1
        return index, number - self.first[index]


def chunk_table(contents: Sequence[tuple[Tree, Placement]], page_bytes: int) -> ChunkTable:
    """Join the chunks of one or more trees. `page_bytes` is what packs are aligned to.

    Raises InvalidImage if a placement does not fit its tree.
    """
    places = [locate(placement, tree.chunk_bytes, page_bytes) for tree, placement in contents]
    packs, renumbered = _join_packs([placement.packs for _, placement in contents])
    first = np.cumsum([0] + [tree.n_chunks for tree, _ in contents]).tolist()
    return ChunkTable(
        packs=packs,
        pack=_joined([new[place.pack] for new, place in zip(renumbered, places, strict=True)]),
        offset=_joined([place.offset for place in places]),
        stored_bytes=_joined([place.stored_bytes for place in places]),
        codec=_joined([place.codec for place in places]),
        plain_bytes=_joined([tree.chunk_bytes for tree, _ in contents]),
        digest=_joined([tree.chunk_digest for tree, _ in contents]),
        rank=_ranks([tree for tree, _ in contents]),
        first=tuple(first),
    )


def _joined(columns: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _join_packs(lists: Sequence[U1]) -> tuple[U1, list[U4]]:
    """The packs of all lists, each once, and for each list where its packs are among them."""
    packs, index = np.unique(np.concatenate(lists), axis=0, return_inverse=True)
    ends = np.cumsum([len(names) for names in lists])[:-1]
    return packs, np.split(index.reshape(-1).astype("u4"), ends)


def _ranks(trees: Sequence[Tree]) -> Numbers:
    """Restore order: chunks of small files, then the others, each in the order of entries."""
    large = _joined([(tree.columns["size"] > SMALL_FILE_BYTES)[tree.chunk_entry] for tree in trees])
    rank: Numbers = np.arange(len(large), dtype=np.int64)
    rank[large] += len(large)
    return rank


@dataclass(frozen=True, slots=True)
class ReadOp:
    """Read `size_bytes` of a pack from `offset` on; they hold pieces [first, end) of the plan.

    `plain_bytes` is what the chunks there come to, each counted as often as it is wanted.
    """

    pack: bytes
    offset: int
    size_bytes: int
    first: int
    end: int
    plain_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """Ranges to read, the most urgent first.

    A piece is a chunk at its place in a pack; pieces are in order of place. Piece `p` is wanted as
    chunks `numbers[piece_first[p] : piece_first[p + 1]]`, which have the same digest. Operation `k`
    reads `op_bytes[k]` from `op_offset[k]` on and holds pieces [`op_first[k]`, `op_end[k]`).
    """

    table: ChunkTable
    numbers: Numbers
    piece_first: Numbers
    op_offset: Numbers
    op_bytes: Numbers
    op_first: Numbers
    op_end: Numbers

    def __len__(self) -> int:
        return len(self.op_bytes)

    @property
    def n_chunks(self) -> int:
        """Chunks that are wanted."""
        return len(self.numbers)

    @property
    def plain_bytes(self) -> int:
        """Bytes that the plan brings, each chunk counted as often as it is wanted."""
        return int(self.table.plain_bytes[self.numbers].sum(dtype=np.uint64))

    def ops(self) -> Iterator[ReadOp]:
        """All operations; each is made when it is asked for."""
        table = self.table
        columns = (self.op_offset, self.op_bytes, self.op_first, self.op_end)
        for offset, size_bytes, first, end in zip(*(c.tolist() for c in columns), strict=True):
            numbers = self.numbers[self.piece_first[first] : self.piece_first[end]]
            pack = table.packs[table.pack[numbers[0]]].tobytes()
            plain = int(table.plain_bytes[numbers].sum(dtype=np.uint64))
            yield ReadOp(pack, offset, size_bytes, first, end, plain)

    def wanted_as(self, piece: int) -> Numbers:
        """Numbers of the chunks that this piece is."""
        return self.numbers[self.piece_first[piece] : self.piece_first[piece + 1]]

    def split(self, op: ReadOp) -> Iterator[ReadOp]:
        """One operation for each piece of `op`; together they do the same."""
        for piece in range(op.first, op.end):
            numbers = self.wanted_as(piece)
            offset, stored = self.table.offset[numbers[0]], self.table.stored_bytes[numbers[0]]
            plain = int(self.table.plain_bytes[numbers].sum(dtype=np.uint64))
            yield ReadOp(op.pack, int(offset), int(stored), piece, piece + 1, plain)


def plan_reads(table: ChunkTable, wanted: Numbers | None, *, span_bytes: int) -> ReadPlan:
    """Plan the reading of the chunks with these numbers, or of all.

    No operation spans more than `span_bytes`; raises OutOfResources for a chunk that does.
    """
    numbers, place = _by_place(table, wanted)
    piece_first = np.flatnonzero(_begins_piece(table, numbers, place))
    begin = place[piece_first]
    del place
    reach = table.stored_bytes[numbers[piece_first]].astype(np.int64)
    if len(reach) and (largest := int(reach.max())) > span_bytes:
        raise OutOfResources(
            f"a chunk takes {largest} bytes, a buffer has {span_bytes}; enlarge it"
        )
    reach += begin
    np.maximum.accumulate(reach, out=reach)
    op_first = _op_starts(begin, reach, span_bytes)
    op_end = np.append(op_first[1:], len(begin))[: len(op_first)]
    piece_first = np.append(piece_first, len(numbers))
    if len(op_first):
        urgency = np.minimum.reduceat(table.rank[numbers], piece_first[op_first])
        by_urgency = np.argsort(urgency, kind="stable")
        op_first, op_end = op_first[by_urgency], op_end[by_urgency]
    return ReadPlan(
        table=table,
        numbers=numbers,
        piece_first=piece_first,
        op_offset=begin[op_first] & 0xFFFFFFFF,
        op_bytes=reach[op_end - 1] - begin[op_first],
        op_first=op_first,
        op_end=op_end,
    )


def _by_place(table: ChunkTable, wanted: Numbers | None) -> tuple[Numbers, Numbers]:
    """Numbers of the wanted chunks in order of place, and the places: pack and offset in one."""
    pack, offset = table.pack, table.offset
    if wanted is not None:
        pack, offset = pack[wanted], offset[wanted]
    place = pack.astype(np.int64)
    place <<= 32
    place += offset.view(np.int64)
    order = np.argsort(place, kind="stable")
    place = place[order]
    return (order if wanted is None else wanted.astype(np.int64)[order]), place


def _begins_piece(table: ChunkTable, numbers: Numbers, place: Numbers) -> npt.NDArray[np.bool_]:
    """Which of the chunks, in order of place, is not the same chunk as the one before it."""
    begins = np.ones(len(numbers), dtype=np.bool_)
    again = np.flatnonzero(place[1:] == place[:-1])
    one, other = numbers[again], numbers[again + 1]
    same = (table.digest[one] == table.digest[other]).all(axis=1)
    for column in (table.stored_bytes, table.codec, table.plain_bytes):
        same &= column[one] == column[other]
    begins[again[same] + 1] = False
    return begins


def _op_starts(begin: Numbers, reach: Numbers, span_bytes: int) -> Numbers:
    """First piece of each operation. `reach` is where the pieces up to each one end at most.

    Places of two packs are at least a pack's header apart, but that may be less than a gap.
    """
    if not len(begin):
        return np.zeros(0, dtype=np.int64)
    apart = begin[1:] >> 32 != begin[:-1] >> 32
    apart |= begin[1:] - reach[:-1] > GAP_BYTES
    starts = np.append(0, np.flatnonzero(apart) + 1)
    bounds = np.append(starts[1:], len(begin))
    found = []
    while len(starts):  # what is left of each stretch begins with an operation
        found.append(starts)
        ends = np.searchsorted(reach, begin[starts] + span_bytes, side="right")
        is_longer = ends < bounds
        starts, bounds = ends[is_longer], bounds[is_longer]
    return np.sort(np.concatenate(found))
