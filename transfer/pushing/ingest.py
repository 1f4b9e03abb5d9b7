"""From files to hashed chunks: blocks are read, marked, cut and hashed on threads, several at once.

A block is one buffer filled from one large file, or from many small ones. One thread does all the
work of a block while it is warm in the CPU's cache; only the cutting, which is cheap, is done in
file order (`Turns`). A chunk that crosses two blocks is hashed and written from both buffers, never
copied.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blake3 import blake3

from imgfmt.chunking import (
    HOLE_PAGES,
    MIN_CHUNK_BYTES,
    Cuts,
    Cutter,
    PageMarks,
    Profile,
    page_marks,
)
from transfer.buffers import BufferPool, Lease
from transfer.oserrors import printable, translate
from transfer.pushing.contents import ContentRecorder
from transfer.pushing.scan import FileIdentity, Listing, SourceFile, changed
from transfer.threads import Threads, Turns

SMALL_FILE_BYTES = 1024 * 1024
"""Files up to this size share buffers and go first: they are what a restore reads first."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of one file in a block, after `hole_pages` pages that need not be read."""

    file: SourceFile
    hole_pages: int
    page: int
    slot_offset: int
    length_bytes: int
    last: bool


class Span(NamedTuple):
    """Bytes [begin, end) of a buffer."""

    buffer: memoryview
    begin: int
    end: int


class Chunk(NamedTuple):
    """A cut chunk in memory. `spans` are whole pages; the last `padding_bytes` are filling."""

    entry: int
    spans: list[Span]
    plain_bytes: int
    padding_bytes: int

    @property
    def pieces(self) -> list[memoryview]:
        """The memory, padding too."""
        return [buffer[begin:end] for buffer, begin, end in self.spans]


def joined(chunks: Iterable[Chunk]) -> list[memoryview]:
    """The memory of chunks, in as few pieces as can be: the kernel writes long ones faster."""
    spans: list[Span] = []
    for chunk in chunks:
        for span in chunk.spans:
            if spans and spans[-1].buffer is span.buffer and spans[-1].end == span.begin:
                spans[-1] = spans[-1]._replace(end=span.end)
            else:
                spans.append(span)
    return [buffer[begin:end] for buffer, begin, end in spans]


@dataclass(slots=True)
class Batch:
    """Chunks in file order that are to be stored together, and the buffers they lie in.

    `uses` are the leases of those buffers, `done_with` those that later batches will not use.
    """

    chunks: list[Chunk] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    uses: dict[int, Lease] = field(default_factory=dict)
    done_with: list[Lease] = field(default_factory=list)

    def retain(self) -> None:
        """Keep the buffers until `release`."""
        for lease in self.uses.values():
            lease.retain()

    def release(self) -> None:
        """The chunks' memory is no longer needed by one who retained it."""
        for lease in self.uses.values():
            lease.release()


@dataclass(slots=True)
class _OpenFile:
    """A file that is being cut; its open chunk's blocks: first page, pages, slot offset, lease."""

    cutter: Cutter
    held: deque[tuple[int, int, int, Lease]] = field(default_factory=deque)


class Ingest:
    """Reads the files of one listing into batches: `start` it, then take `batches`."""

    def __init__(
        self,
        listing: Listing,
        profile: Profile,
        pool: BufferPool,
        threads: Threads,
        group: asyncio.TaskGroup,
    ) -> None:
        self._listing = listing
        self._profile = profile
        self._pool = pool
        self._threads = threads
        self._group = group
        self._batches: asyncio.Queue[asyncio.Task[Batch] | None] = asyncio.Queue()
        self._ahead = asyncio.Semaphore(threads.n_threads + 1)  # few buffers stay in the CPU cache
        self._turns = Turns()
        self._n_blocks = 0
        self._open: dict[int, _OpenFile] = {}
        self.contents = ContentRecorder()

    def start(self) -> None:
        """Begin reading."""
        self._group.create_task(self._read_blocks())

    async def batches(self) -> AsyncIterator[Batch]:
        """Hashed batches in file order. Each is retained; the caller releases it."""
        while (task := await self._batches.get()) is not None:
            batch = await task
            self._ahead.release()
            batch.retain()
            for lease in batch.done_with:
                lease.release()
            yield batch

    async def _read_blocks(self) -> None:
        small = [file for file in self._listing.files if file.size_bytes <= SMALL_FILE_BYTES]
        for segments in _share_blocks(small, self._profile, self._pool.slot_bytes):
            await self._submit(segments)
        for file in self._listing.files:
            if file.size_bytes > SMALL_FILE_BYTES:
                extents = await self._threads.run(_data_extents, file, self._profile)
                for segments in _split_file(file, extents, self._profile, self._pool.slot_bytes):
                    await self._submit(segments)
        self._batches.put_nowait(None)

    async def _submit(self, segments: list[Segment]) -> None:
        await self._ahead.acquire()
        lease = await self._pool.acquire()
        work = self._threads.run(self._process, self._n_blocks, segments, lease)
        self._n_blocks += 1
        self._batches.put_nowait(self._group.create_task(work))

    def _process(self, number: int, segments: list[Segment], lease: Lease) -> Batch:
        """All work of one block. Runs on a thread; `_open` and `contents` only change in turn."""
        try:
            marks = _read_segments(segments, lease.view, self._profile)
            batch = Batch()
            with self._turns.take(number):
                for segment, marked in zip(segments, marks, strict=True):
                    self._cut_segment(lease, segment, marked, batch)
                if not any(held[3] is lease for file in self._open.values() for held in file.held):
                    batch.done_with.append(lease)
        except BaseException as error:
            self._turns.fail(error)
            raise
        batch.digests = [_digest(chunk) for chunk in batch.chunks]
        return batch

    def _cut_segment(
        self, lease: Lease, segment: Segment, marks: PageMarks | None, batch: Batch
    ) -> None:
        file = segment.file
        state = self._open.get(file.entry)
        if state is None:
            state = self._open[file.entry] = _OpenFile(Cutter(self._profile, file.size_bytes))
        if segment.hole_pages:
            self._take(file, state, state.cutter.feed_zeros(segment.hole_pages), batch, lease)
        if marks is not None:
            pages = self._profile.pages(segment.length_bytes)
            state.held.append((segment.page, pages, segment.slot_offset, lease))
            self._take(file, state, state.cutter.feed(marks), batch, lease)
        if segment.last:
            self._take(file, state, state.cutter.finish(), batch, lease)
            self.contents.close(file.entry)
            batch.done_with += _distinct_others(state.held, lease)
            del self._open[file.entry]

    def _take(
        self, file: SourceFile, state: _OpenFile, cuts: Cuts, batch: Batch, lease: Lease
    ) -> None:
        """Turn what became certain into chunks in memory, and drop blocks that are done with."""
        page_bytes, size_bytes = self._profile.page_bytes, file.size_bytes
        for run in cuts.chunks:
            spans = self._spans(state, run.start, run.start + run.pages, batch)
            padded = run.pages * page_bytes
            plain = min(padded, size_bytes - run.start * page_bytes)
            batch.chunks.append(Chunk(file.entry, spans, plain, padded - plain))
        self.contents.add(file.entry, cuts)
        dropped = []
        while state.held and state.held[0][0] + state.held[0][1] <= state.cutter.certain_pages:
            dropped.append(state.held.popleft())
        kept = {id(held[3]) for held in state.held}
        batch.done_with += [
            other for other in _distinct_others(dropped, lease) if id(other) not in kept
        ]

    def _spans(self, state: _OpenFile, start: int, end: int, batch: Batch) -> list[Span]:
        """The memory of pages [start, end) of the file."""
        page_bytes = self._profile.page_bytes
        first, _, slot_offset, lease = state.held[-1]
        if start >= first:  # as most do
            batch.uses[id(lease)] = lease
            begin = slot_offset + (start - first) * page_bytes
            return [Span(lease.view, begin, begin + (end - start) * page_bytes)]
        spans: list[Span] = []
        for first, pages, slot_offset, lease in state.held:
            low, high = max(start, first), min(end, first + pages)
            if low < high:
                begin = slot_offset + (low - first) * page_bytes
                spans.append(Span(lease.view, begin, begin + (high - low) * page_bytes))
                batch.uses[id(lease)] = lease
        return spans


def _distinct_others(held: Iterable[tuple[int, int, int, Lease]], lease: Lease) -> list[Lease]:
    """The leases in `held`, each once, without the block's own."""
    return list({id(h[3]): h[3] for h in held if h[3] is not lease}.values())


def _share_blocks(
    files: Sequence[SourceFile], profile: Profile, slot_bytes: int
) -> Iterator[list[Segment]]:
    """Lay whole small files into blocks, each from a page boundary on."""
    segments: list[Segment] = []
    used = 0
    for file in files:
        padded = profile.pages(file.size_bytes) * profile.page_bytes
        if used + padded > slot_bytes:
            yield segments
            segments, used = [], 0
        segments.append(Segment(file, 0, 0, used, file.size_bytes, last=True))
        used += padded
    if segments:
        yield segments


def _data_extents(file: SourceFile, profile: Profile) -> list[tuple[int, int]]:
    """Page ranges [start, end) of the file that have to be read; what is between them is zero.

    Holes shorter than `HOLE_PAGES` are read: only longer ones are certain to be holes of the tree.
    """
    n_pages = profile.pages(file.size_bytes)
    if not file.sparse:
        return [(0, n_pages)]
    extents: list[tuple[int, int]] = []
    descriptor = _open(file)
    try:
        position = 0
        while position < file.size_bytes:
            try:
                start = os.lseek(descriptor, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    break
                raise translate(error, printable(file.path)) from error
            position = os.lseek(descriptor, start, os.SEEK_HOLE)
            first, end = start // profile.page_bytes, profile.pages(position)
            if extents and first - extents[-1][1] < HOLE_PAGES:
                extents[-1] = (extents[-1][0], end)
            elif not extents and first < HOLE_PAGES:
                extents.append((0, end))
            else:
                extents.append((first, end))
    finally:
        os.close(descriptor)
    return extents


def _split_file(
    file: SourceFile, extents: Sequence[tuple[int, int]], profile: Profile, slot_bytes: int
) -> Iterator[list[Segment]]:
    """Cut a large file's data into blocks of at most one slot; short extents share one."""
    slot_pages, n_pages = slot_bytes // profile.page_bytes, profile.pages(file.size_bytes)
    segments: list[Segment] = []
    used = at = 0
    for first, end in extents:
        while first < end:
            if used == slot_pages:
                yield segments
                segments, used = [], 0
            stop = min(end, first + slot_pages - used)
            length = min(stop * profile.page_bytes, file.size_bytes) - first * profile.page_bytes
            offset = used * profile.page_bytes
            segments.append(Segment(file, first - at, first, offset, length, last=stop == n_pages))
            used += stop - first
            at = first = stop
    if at < n_pages:
        segments.append(Segment(file, n_pages - at, n_pages, 0, 0, last=True))
    yield segments


def _open(file: SourceFile) -> int:
    """Open a file that must still be the one that was listed."""
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise changed(file.path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise changed(file.path) from error
        raise translate(error, printable(file.path)) from error
    if FileIdentity.of(os.fstat(descriptor)) != file.identity:
        os.close(descriptor)
        raise changed(file.path)
    return descriptor


def _read_segments(
    segments: Sequence[Segment], view: memoryview, profile: Profile
) -> list[PageMarks | None]:
    """Fill a block from its files and mark its pages. Runs on a thread."""
    marks: list[PageMarks | None] = []
    descriptor, opened = -1, None
    try:
        for segment in segments:
            if not segment.length_bytes:
                marks.append(None)
                continue
            if opened is not segment.file:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor, opened = -1, segment.file
                descriptor = _open(segment.file)
            marks.append(_read_segment(descriptor, segment, view, profile))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return marks


def _read_segment(
    descriptor: int, segment: Segment, view: memoryview, profile: Profile
) -> PageMarks:
    begin, length = segment.slot_offset, segment.length_bytes
    padded = profile.pages(length) * profile.page_bytes
    offset = segment.page * profile.page_bytes
    done = 0
    while done < length:
        try:
            got = os.preadv(descriptor, [view[begin + done : begin + length]], offset + done)
        except OSError as error:
            raise translate(error, printable(segment.file.path)) from error
        if not got:
            raise changed(segment.file.path)
        done += got
    if padded > length:
        view[begin + length : begin + padded] = bytes(padded - length)
    if segment.file.size_bytes <= MIN_CHUNK_BYTES:
        return PageMarks.unmarked(padded // profile.page_bytes)
    return page_marks(view[begin : begin + padded], profile)


def _digest(chunk: Chunk) -> bytes:
    """BLAKE3 of a chunk's plain bytes; releases the GIL."""
    pieces = chunk.pieces
    if len(pieces) == 1:
        return blake3(pieces[0][: chunk.plain_bytes]).digest()
    hasher = blake3()
    left = chunk.plain_bytes
    for piece in pieces:
        hasher.update(piece[:left])
        left -= len(piece)
    return hasher.digest()
