"""Runs a plan: ranges of packs in, verified chunks out.

Each worker reads one range into a buffer and has a thread verify it and hand it on: two hops off
the loop for each range. No byte is seen by a sink before its chunk's digest was checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from imgfmt import layout
from imgfmt.chunking import MAX_CHUNK_BYTES
from imgfmt.codec import RAW, decode_into
from imgfmt.digest import DIGEST_BYTES, Digest, raw_digest
from imgfmt.errors import CorruptData, NotFound
from transfer.buffers import Allocator, BufferPool, Lease, page_aligned
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.hedge import HedgeableStore, Hedger
from transfer.oserrors import printable
from transfer.plan import U1, ChunkTable, Numbers, ReadOp, ReadPlan, chunk_table, plan_reads
from transfer.progress import Progress, Silent
from transfer.tasks import first_cause
from transfer.threads import Threads

DECODED_BYTES = 2 * MAX_CHUNK_BYTES
"""Encoded chunks of one range are decoded and handed on about this many plain bytes at a time."""

_SCRATCH_BYTES = DECODED_BYTES + MAX_CHUNK_BYTES

T = TypeVar("T")


class Sink(Protocol):
    """Takes the chunks of a plan. Called from several threads at once, never twice for a chunk."""

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """Verified plain bytes of each of these chunks. The views end with the call."""

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        """These chunks, one and the same in its pack, can't be had. Raises `error` or notes it."""


class Strict:
    """What a sink does that needs every chunk."""

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        """See `Sink.damaged`."""
        advice = "`snapcask verify` tells what is lost and how to mend it"
        raise type(error)(f"{error}; {advice}") from error


@dataclass(frozen=True, slots=True)
class ReadStats:
    """`fetched_bytes` were read from packs; `plain_bytes` were verified and handed on."""

    fetched_bytes: int
    plain_bytes: int


async def each(
    items: Iterator[T], work: Callable[[T], Coroutine[Any, Any, None]], n_workers: int
) -> None:
    """Call `work` for every item, `n_workers` at once. The first error ends it and is raised."""

    async def worker() -> None:
        for item in items:
            await work(item)

    cause: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(n_workers):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        cause = first_cause(failed)
    if cause is not None:
        raise cause


class Executor:
    """Reads chunks of some trees from one store. For one event loop; `threads` are the caller's.

    The chunks of all `contents` are numbered through, as `table` has them. All memory that a sink
    sees is from `allocate`.
    """

    def __init__(
        self,
        catalog: Catalog,
        contents: Sequence[MemberContent],
        threads: Threads,
        config: TransferConfig,
        *,
        allocate: Allocator = page_aligned,
    ) -> None:
        self.catalog = catalog
        self.threads = threads
        self.allocate = allocate
        self.pool = BufferPool(config.n_slots, config.block_bytes, allocate)
        self._config = config
        self._locate(contents)

    def _locate(self, contents: Sequence[MemberContent]) -> None:
        self._contents = list(contents)
        pairs = [(content.tree, content.placement) for content in contents]
        self.table = chunk_table(pairs, self.catalog.record.page_bytes)

    async def _locate_again(self) -> None:
        contents = [
            MemberContent(c.tree, await self.catalog.placement(c.placement.tree, c.tree.n_chunks))
            for c in self._contents
        ]
        self._locate(contents)

    async def read(
        self, sink: Sink, wanted: Numbers | None = None, *, progress: Progress | None = None
    ) -> ReadStats:
        """Hand the chunks with these numbers, or all, to `sink`. The first error ends it.

        Where a pack is missing, the placements are read once more for what is still to be done.
        After an error or a cancellation no thread works for this call any more.
        """
        run = _Run(self, sink, progress or Silent())
        plan = await self._plan(wanted)
        try:
            await run.execute(plan, final=False)
        except _PackMissing:
            await self._locate_again()
            left = plan.numbers[~run.done[plan.numbers]]
            plan = await self._plan(left)
            await run.execute(plan, final=True)
        return ReadStats(run.fetched_bytes, run.plain_bytes)

    async def _plan(self, wanted: Numbers | None) -> ReadPlan:
        span_bytes = self._config.block_bytes
        return await self.threads.run(plan_reads, self.table, wanted, span_bytes=span_bytes)

    def scratch(self, n_bytes: int) -> memoryview:
        """Memory to decode to, of the kind that buffers have."""
        return self.allocate(n_bytes) if n_bytes else memoryview(bytearray())

    @property
    def n_workers(self) -> int:
        """How many ranges may be in memory at once, along with what they are decoded to."""
        decoded_bytes = _SCRATCH_BYTES + MAX_CHUNK_BYTES if self.table.codec.any() else 0
        n_ranges = self._config.max_memory_bytes // (self._config.block_bytes + decoded_bytes)
        spare = int(isinstance(self.catalog.store, HedgeableStore))  # for a second read
        return max(1, n_ranges - spare)

    def described(self, number: int) -> str:
        """A chunk, a file that it belongs to and its pack, for messages."""
        index, number_in_tree = self.table.tree_of(number)
        tree = self._contents[index].tree
        path = printable(tree.path(int(tree.chunk_entry[number_in_tree])))
        pack = self.table.packs[self.table.pack[number]].tobytes().hex()
        digest = Digest(self.table.digest[number].tobytes())
        return self.catalog.named(f"chunk {digest} of {path} in pack {pack}")


@dataclass(slots=True)
class _Slot:
    """The buffer that a worker holds."""

    lease: Lease


class _PackMissing(Exception):
    """A pack is gone. The placement may have been rewritten since it was read."""


class _Run:
    """One call of `Executor.read`. `done` tells the chunks that a sink was told of."""

    def __init__(self, executor: Executor, sink: Sink, progress: Progress) -> None:
        self._executor = executor
        self._sink = sink
        self._progress = progress
        self._hedger: Hedger | None = None
        self.done = np.zeros(len(executor.table), dtype=np.bool_)
        self.fetched_bytes = 0
        self.plain_bytes = 0

    async def execute(self, plan: ReadPlan, *, final: bool) -> None:
        """Run all operations. A missing pack raises _PackMissing unless this is `final`."""
        scratch_bytes = _SCRATCH_BYTES if plan.table.codec.any() else 0
        free: list[memoryview] = []

        async def work(op: ReadOp) -> None:
            slot = _Slot(await self._executor.pool.acquire())
            try:
                scratch = free.pop() if free else self._executor.scratch(scratch_bytes)
                await self._fetch(plan, op, slot, scratch, final=final)
                free.append(scratch)
            finally:
                slot.lease.release()
            self._progress.advance(op.plain_bytes)

        n_workers = min(self._executor.n_workers, len(plan))
        store = self._executor.catalog.store
        if isinstance(store, HedgeableStore):
            async with Hedger(store, self._executor.pool, len(plan)) as self._hedger:
                await each(plan.ops(), work, n_workers)
        else:
            await each(plan.ops(), work, n_workers)

    async def _read_range(self, op: ReadOp, slot: _Slot) -> None:
        """Fill the slot, which may be another one then."""
        key, store = layout.pack_key(op.pack), self._executor.catalog.store
        if self._hedger is not None:
            slot.lease = await self._hedger.read(key, op.offset, op.size_bytes, slot.lease)
        else:
            await store.read_into(key, op.offset, slot.lease.view[: op.size_bytes])

    async def _fetch(
        self, plan: ReadPlan, op: ReadOp, slot: _Slot, scratch: memoryview, *, final: bool
    ) -> None:
        """Read a range. One that is cut short is read again piece by piece, for what is there."""
        try:
            await self._read_range(op, slot)
        except NotFound as error:
            if not final:
                raise _PackMissing from error
            self._lose(plan, op, "its pack does not exist", NotFound)
        except CorruptData as error:
            if op.end - op.first == 1:
                self._lose(plan, op, str(error), CorruptData)
                return
            for part in plan.split(op):
                await self._fetch(plan, part, slot, scratch, final=final)
        else:
            self.fetched_bytes += op.size_bytes
            run, buffer = self._executor.threads.run, slot.lease.view[: op.size_bytes]
            plain_bytes = await run(self._verify, plan, op, buffer, scratch)
            self.plain_bytes += plain_bytes  # not across the await: others add to it meanwhile

    def _lose(
        self, plan: ReadPlan, op: ReadOp, why: str, kind: type[CorruptData | NotFound]
    ) -> None:
        for piece in range(op.first, op.end):
            self._damaged(plan, piece, why, kind)

    def _damaged(
        self, plan: ReadPlan, piece: int, why: str, kind: type[CorruptData | NotFound]
    ) -> None:
        numbers = plan.wanted_as(piece)
        self.done[numbers] = True
        message = f"{self._executor.described(int(numbers[0]))}: {why}"
        self._sink.damaged(numbers, kind(message))

    def _verify(self, plan: ReadPlan, op: ReadOp, buffer: memoryview, scratch: memoryview) -> int:
        """Check the chunks of one range and hand them on; returns their bytes. Runs on a thread."""
        heads = plan.numbers[plan.piece_first[op.first : op.end]]
        edges = [0, len(heads)]
        if len(scratch):
            encoded = plan.table.codec[heads] != RAW
            decoded = np.cumsum(plan.table.plain_bytes[heads] * encoded, dtype=np.int64)
            batch = np.concatenate([[0], decoded[:-1]]) // DECODED_BYTES
            edges = np.flatnonzero(np.diff(batch, prepend=-1, append=-1)).tolist()
        done_bytes = 0
        for low, high in pairwise(edges):
            views = _plain_views(plan.table, heads[low:high], op.offset, buffer, scratch)
            done_bytes += self._check(plan, op.first + low, views)
        return done_bytes

    def _check(self, plan: ReadPlan, first: int, views: list[memoryview]) -> int:
        """Hand on those of the pieces from `first` on that have the right digest."""
        edges = plan.piece_first[first : first + len(views) + 1]
        numbers = plan.numbers[edges[0] : edges[-1]]
        found = b"".join([raw_digest((view,)) for view in views])
        wanted = plan.table.digest[plan.numbers[edges[:-1]]]
        places = np.diff(edges)
        if found != wanted.tobytes():
            good = self._sift(plan, first, views, found, wanted)
            numbers = numbers[np.repeat(good, places)]
            views = [view for view, kept in zip(views, good.tolist(), strict=True) if kept]
            places = places[good]
        if len(numbers) != len(views):
            views = [v for v, n in zip(views, places.tolist(), strict=True) for _ in range(n)]
        if views:
            self._sink.accept(numbers, views)
        self.done[numbers] = True
        return sum(map(len, views))

    def _sift(
        self, plan: ReadPlan, first: int, views: Sequence[memoryview], found: bytes, wanted: U1
    ) -> npt.NDArray[np.bool_]:
        """Which pieces are as they must be; the sink is told of the others."""
        digests = np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)
        good: npt.NDArray[np.bool_] = (digests == wanted).all(axis=1)
        for i in np.flatnonzero(~good).tolist():
            actual = Digest(digests[i].tobytes())
            why = f"it hashes to {actual.short}" if len(views[i]) else "it can't be decoded"
            self._damaged(plan, first + i, why, CorruptData)
        return good


def _plain_views(
    table: ChunkTable, heads: Numbers, offset: int, buffer: memoryview, scratch: memoryview
) -> list[memoryview]:
    """Plain bytes of some chunks of the range in `buffer`, which begins at `offset` of its pack.

    Encoded chunks are decoded to `scratch`; the view of one that can't be decoded is empty.
    """
    begin = table.offset[heads].astype(np.int64) - offset
    end = begin + table.stored_bytes[heads]
    views = [buffer[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
    codecs = table.codec[heads]
    used = 0
    for i in np.flatnonzero(codecs != RAW).tolist():
        out = scratch[used : used + int(table.plain_bytes[heads[i]])]
        used += len(out)
        try:
            decode_into(int(codecs[i]), views[i], out)
        except CorruptData:
            out = scratch[:0]
        views[i] = out
    return views
