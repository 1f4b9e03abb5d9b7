"""What is read in which order, checked against what, and copied where. Pure.

A read fills a slot from one file; pieces of it are compared with digests, and ranges of it are
copied to blocks of device memory. Reads of a file with known chunks hold whole chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from imgfmt.digest import DIGEST_BYTES
from imgfmt.errors import CorruptData, OutOfResources
from restore.driver import CHECK_ROW
from transfer.plan import ReadPlan

PAGE_BYTES = 4096
GAP_BYTES = 128 * 1024
"""What lies between two wanted ranges is read along with them up to this length."""

Span = tuple[int, int, int, int]
"""Bytes [begin, end) of a file, and the rows [first, end) that tell its pieces."""

Numbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]


class Want(NamedTuple):
    """Bytes [start, end) of a file go to `offset` of a block. `tensor` is whose they are."""

    file: int
    start: int
    end: int
    block: int
    offset: int
    tensor: int


class Copy(NamedTuple):
    """`n_bytes` from `at` of a slot go to `offset` of a block."""

    at: int
    n_bytes: int
    block: int
    offset: int


class Read(NamedTuple):
    """Fill a slot with `n_bytes` of a file from `offset` on; rows [first, end) tell its pieces."""

    file: int
    offset: int
    n_bytes: int
    copies: tuple[Copy, ...]
    tensors: tuple[int, ...]
    first: int = 0
    end: int = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes that go to devices."""
        return sum(copy.n_bytes for copy in self.copies)


@dataclass(frozen=True, slots=True)
class FileChunks:
    """Chunks of a file, ascending; what lies between them is zero. `digest` is (n, 32)."""

    offset: Numbers
    n_bytes: Numbers
    digest: npt.NDArray[np.uint8]


@dataclass(slots=True)
class LoadPlan:
    """Reads in order. `rows` are the pieces of all reads; `fills` are copies of zeros.

    `checked` tells whether every byte that is copied belongs to a row.
    """

    reads: list[Read] = field(default_factory=list)
    rows: Rows = field(default_factory=lambda: np.zeros(0, CHECK_ROW))
    fills: list[Copy] = field(default_factory=list)
    checked: bool = True

    @property
    def read_bytes(self) -> int:
        """Bytes that are read."""
        return sum(read.n_bytes for read in self.reads)


def plan_files(
    wants: Sequence[Want],
    sizes: Sequence[int],
    chunks: Mapping[int, FileChunks] | None,
    slot_bytes: int,
) -> LoadPlan:
    """Plan reading files of these sizes. With `chunks`, each file's bytes are checked.

    Raises CorruptData if a want is not within its file, OutOfResources for a chunk beyond a slot.
    """
    plan = LoadPlan(checked=chunks is not None)
    rows: list[Rows] = []
    n_rows = 0
    for file, of_file in _by_file(wants):
        _check_inside(of_file, sizes[file])
        if chunks is None:
            spans = [(*span, 0, 0) for span in _spans(of_file, sizes[file], slot_bytes)]
            plan.reads += _reads(file, spans, of_file)
            continue
        known = chunks[file]
        groups = _groups(known, of_file, slot_bytes)
        plan.reads += _reads(file, _spans_of(known, groups, n_rows), of_file)
        rows.append(_rows_of(known, groups))
        n_rows += len(rows[-1])
        plan.fills += _fills(known, of_file, sizes[file])
    if rows:
        plan.rows = np.concatenate(rows)
    return plan


def _by_file(wants: Sequence[Want]) -> Iterator[tuple[int, list[Want]]]:
    found: dict[int, list[Want]] = {}
    for want in wants:
        if want.end > want.start:
            found.setdefault(want.file, []).append(want)
    for file, of_file in found.items():
        yield file, sorted(of_file, key=lambda want: want.start)


def _check_inside(wants: Sequence[Want], size_bytes: int) -> None:
    last = max(want.end for want in wants)
    if last > size_bytes:
        raise CorruptData(f"a file of {size_bytes} bytes is to have bytes up to {last}")


def _spans(wants: Sequence[Want], size_bytes: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Ranges to read: from page boundaries, no longer than a slot, ascending."""
    joined: list[list[int]] = []
    for want in wants:
        begin = want.start // PAGE_BYTES * PAGE_BYTES
        if joined and begin <= joined[-1][1] + GAP_BYTES:
            joined[-1][1] = max(joined[-1][1], want.end)
        else:
            joined.append([begin, want.end])
    return [
        (at, min(at + slot_bytes, end, size_bytes))
        for begin, end in joined
        for at in range(begin, end, slot_bytes)
    ]


def _reads(file: int, spans: Sequence[Span], wants: Sequence[Want]) -> Iterator[Read]:
    """One read for each of the ascending spans, with what of it is wanted."""
    waiting, active = iter(wants), list[Want]()
    following = next(waiting, None)
    for begin, end, first, last in spans:
        if len(active) == 1:  # most often it is but a part of one
            want, n_bytes = active[0], end - begin
            alone = following is None or following.start >= end
            if alone and want.start <= begin and end <= want.end:
                copy = Copy(0, n_bytes, want.block, want.offset + begin - want.start)
                yield Read(file, begin, n_bytes, (copy,), (want.tensor,), first, last)
                continue
        active = [want for want in active if want.end > begin]
        while following is not None and following.start < end:
            if following.end > begin:
                active.append(following)
            following = next(waiting, None)
        copies = [
            Copy(
                max(begin, want.start) - begin,
                min(end, want.end) - max(begin, want.start),
                want.block,
                want.offset + max(0, begin - want.start),
            )
            for want in active
        ]
        tensors = tuple(dict.fromkeys(want.tensor for want in active))
        yield Read(file, begin, end - begin, merged(copies), tensors, first, last)


def merged(copies: list[Copy]) -> tuple[Copy, ...]:
    """The same with copies joined that continue each other on both sides."""
    if len(copies) == 1:
        return (copies[0],)
    found: list[Copy] = []
    for copy in sorted(copies, key=lambda copy: (copy.block, copy.offset)):
        last = found[-1] if found else None
        if (
            last is not None
            and last.block == copy.block
            and last.offset + last.n_bytes == copy.offset
            and last.at + last.n_bytes == copy.at
        ):
            found[-1] = last._replace(n_bytes=last.n_bytes + copy.n_bytes)
        else:
            found.append(copy)
    return tuple(found)


def _groups(known: FileChunks, wants: Sequence[Want], slot_bytes: int) -> Numbers:
    """Chunks [low, high) that are read together, (n, 2): adjacent, wanted, within a slot."""
    nothing = np.zeros((0, 2), np.int64)
    if not len(known.offset):
        return nothing
    ends = known.offset + known.n_bytes
    if int(known.n_bytes.max()) > slot_bytes:
        raise OutOfResources(f"a chunk takes {known.n_bytes.max()} bytes, a slot {slot_bytes}")
    wanted = np.zeros(len(ends) + 1, np.int64)
    for want in wants:
        low = int(np.searchsorted(ends, want.start, side="right"))
        high = int(np.searchsorted(known.offset, want.end, side="left"))
        if high > low:
            wanted[low] += 1
            wanted[high] -= 1
    numbers = np.flatnonzero(np.cumsum(wanted[:-1]) > 0)
    if not len(numbers):
        return nothing
    apart = (np.diff(numbers) > 1) | (known.offset[numbers[1:]] != ends[numbers[:-1]])
    last = np.append(np.flatnonzero(apart), len(numbers) - 1)  # of each run of adjacent chunks
    run_ends = np.repeat(last + 1, np.diff(last, prepend=-1))
    bounds = known.offset[numbers] + slot_bytes
    following = np.minimum(np.searchsorted(ends[numbers], bounds, side="right"), run_ends).tolist()
    edges = [0]
    while edges[-1] < len(numbers):
        edges.append(following[edges[-1]])
    firsts = numbers[edges[:-1]]
    return np.stack([firsts, firsts + np.diff(edges)], axis=1)


def _spans_of(known: FileChunks, groups: Numbers, n_rows: int) -> list[Span]:
    """What groups of chunks cover, their rows numbered from `n_rows` on."""
    firsts, ends = groups.T
    rows = n_rows + np.cumsum(ends - firsts)
    columns = (
        known.offset[firsts],
        known.offset[ends - 1] + known.n_bytes[ends - 1],
        rows - (ends - firsts),
        rows,
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _rows_of(known: FileChunks, groups: Numbers) -> Rows:
    """The chunks of all groups, each with its place in its group."""
    firsts, ends = groups.T
    counts = ends - firsts
    numbers = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    rows = np.zeros(len(numbers), CHECK_ROW)
    rows["offset"] = known.offset[numbers] - np.repeat(known.offset[firsts], counts)
    rows["n_bytes"] = known.n_bytes[numbers]
    rows["digest"] = known.digest[numbers]
    return rows


def _fills(known: FileChunks, wants: Sequence[Want], size_bytes: int) -> list[Copy]:
    """What is wanted of the holes between the chunks."""
    begins = np.concatenate([[0], known.offset + known.n_bytes])
    ends = np.concatenate([known.offset, [size_bytes]])
    real = np.flatnonzero(ends > begins)
    holes = [(b, e, 0, 0) for b, e in zip(begins[real].tolist(), ends[real].tolist(), strict=True)]
    return [copy for read in _reads(0, holes, wants) for copy in read.copies]


def plan_packs(
    reads: ReadPlan, chunk_copies: Mapping[int, list[tuple[Want, int]]], files: Mapping[bytes, int]
) -> LoadPlan:
    """Plan reading raw chunks from packs, which are numbered by `files`.

    `chunk_copies` has for each wanted chunk what wants it, and where the chunk begins in its file.
    """
    plan, table = LoadPlan(), reads.table
    n_pieces = len(reads.piece_first) - 1
    heads = reads.numbers[reads.piece_first[:-1]]
    plan.rows = np.zeros(n_pieces, CHECK_ROW)
    plan.rows["n_bytes"] = table.plain_bytes[heads]
    plan.rows["digest"] = table.digest[heads].reshape(n_pieces, DIGEST_BYTES)
    for op in reads.ops():
        begins = table.offset[heads[op.first : op.end]].astype(np.int64) - op.offset
        plan.rows["offset"][op.first : op.end] = begins
        copies: list[Copy] = []
        tensors: dict[int, None] = {}
        for piece, at in zip(range(op.first, op.end), begins.tolist(), strict=True):
            for number in reads.wanted_as(piece).tolist():
                length = int(table.plain_bytes[number])
                for want, begin in chunk_copies[number]:
                    low, high = max(begin, want.start), min(begin + length, want.end)
                    where = want.offset + low - want.start
                    copies.append(Copy(at + low - begin, high - low, want.block, where))
                    tensors[want.tensor] = None
        plan.reads.append(
            Read(
                files[op.pack], op.offset, op.size_bytes, merged(copies), tuple(tensors),
                op.first, op.end,
            )
        )  # fmt: skip
    return plan
