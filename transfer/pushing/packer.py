"""Stores what a push has hashed: known chunks are noted, new ones go into packs (SPEC.md 5.3, 5.5).

Raw chunks are written from the buffers they were read into. Encoded ones, and what lies between
them, are first laid out in a page-aligned buffer of their own. Every page of a pack is written
once: one that is not full is carried on until what follows in it is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import numpy as np

from imgfmt import index, layout
from imgfmt.chunking import PAGE_BYTES_CHOICES
from imgfmt.codec import RAW, ZSTD, encode_zstd
from imgfmt.errors import ImageError
from imgfmt.pack import (
    MAX_CHUNKS,
    MAX_PACK_BYTES,
    MAX_TABLE_BYTES,
    PackTable,
    encode_header,
    encode_tail,
)
from imgfmt.store_record import NewChunks
from transfer.buffers import page_aligned
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.pushing.contents import Place, PlaceTaker
from transfer.pushing.indexing import write_segment
from transfer.pushing.ingest import Batch, Chunk, joined
from transfer.pushing.known import KnownChunks
from transfer.store.base import PackSink
from transfer.threads import Threads

AUTO_GAIN = 1.4
KEEP_GAIN = 1.05
_SAMPLE_BYTES = 65_536
_SAMPLE_EVERY = 16
_MAX_POSITION = MAX_PACK_BYTES - MAX_TABLE_BYTES - 2 * max(PAGE_BYTES_CHOICES)  # all else follows


_entry = attrgetter("entry")


@dataclass(slots=True)
class PackedCounts:
    """What became of the chunks so far. `stored_bytes` are as written, the others plain."""

    chunks: int = 0
    new_chunks: int = 0
    plain_bytes: int = 0
    new_bytes: int = 0
    stored_bytes: int = 0
    pack_overhead_bytes: int = 0
    index_bytes: int = 0

    @property
    def reused_bytes(self) -> int:
        """Plain bytes of chunks that were there, or came a second time."""
        return self.plain_bytes - self.new_bytes


@dataclass(slots=True)
class _OpenPack:
    name: bytes
    number: int
    sink: PackSink
    position: int
    names: list[bytes] = field(default_factory=list)
    stored_bytes: list[int] = field(default_factory=list)
    encoded: list[tuple[int, int, int]] = field(default_factory=list)
    carry: bytearray = field(default_factory=bytearray)
    writes: list[asyncio.Task[None]] = field(default_factory=list)

    def table(self, page_bytes: int) -> PackTable:
        rows, codecs, plain = zip(*self.encoded, strict=True) if self.encoded else ((), (), ())
        return PackTable(
            self.name, page_bytes,
            np.frombuffer(b"".join(self.names), dtype=np.uint8).reshape(-1, 32),
            np.array(self.stored_bytes, dtype=np.uint32),
            np.array(rows, dtype=np.uint32), np.array(codecs, dtype=np.uint8),
            np.array(plain, dtype=np.uint32),
        )  # fmt: skip


class Packer:
    """Takes batches in order. Its tasks run in `group`; call `finish` or `abort` in the end."""

    def __init__(
        self, catalog: Catalog, known: KnownChunks, group: asyncio.TaskGroup, threads: Threads,
        config: TransferConfig,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._known = known
        self._group = group
        self._threads = threads
        self._config = config
        self._page = catalog.record.page_bytes
        self._pack: _OpenPack | None = None
        self._unfinished: list[_OpenPack] = []
        self._closing: list[asyncio.Task[None]] = []
        self._unindexed: list[PackTable] = []
        self._segments: list[str] = []
        self._index_lock = asyncio.Lock()
        self.counts = PackedCounts()

    async def store(self, batch: Batch, contents: PlaceTaker) -> None:
        """Store a batch and note the places of its chunks. The batch is released when written."""
        found = await self._known.find(batch.digests)
        if wanted := self._new_chunks(batch, found):
            await self._store_new(batch, wanted, found)
        self._note(batch, found, contents)
        batch.release()

    def _new_chunks(self, batch: Batch, found: list[Place | None]) -> list[int]:
        """Numbers of the chunks to store: unknown ones, the first of equal ones only."""
        first: dict[bytes, int] = {}
        for i, place in enumerate(found):
            if place is None:
                first.setdefault(batch.digests[i], i)
        return list(first.values())

    async def _store_new(
        self, batch: Batch, wanted: Sequence[int], found: list[Place | None]
    ) -> None:
        encoded = await self._encode([batch.chunks[i] for i in wanted])
        group: list[tuple[Chunk, bytes | None]] = []
        for i, blob in zip(wanted, encoded, strict=True):
            chunk, digest = batch.chunks[i], batch.digests[i]
            stored = chunk.plain_bytes if blob is None else len(blob)
            pack = self._pack
            if pack is None or self._is_full(pack, stored):
                pack = await self._next_pack(batch, group)
            found[i] = place = self._append(pack, digest, chunk, blob, stored)
            self._known.add(digest, place)
            group.append((chunk, blob))
            self.counts.new_bytes += chunk.plain_bytes
            self.counts.stored_bytes += stored
        self._write_group(batch, group)
        self.counts.new_chunks += len(wanted)

    def _note(self, batch: Batch, found: list[Place | None], contents: PlaceTaker) -> None:
        """Tell where all chunks lie, file by file."""
        chunks, digests = batch.chunks, batch.digests
        by_digest = {d: p for d, p in zip(digests, found, strict=True) if p is not None}
        places = [by_digest[digest] for digest in digests]
        start = 0
        for entry, of_file in groupby(chunks, key=_entry):
            end = start + len(list(of_file))
            contents.place(entry, digests[start:end], places[start:end])
            start = end
        self.counts.chunks += len(chunks)
        self.counts.plain_bytes += sum(chunk.plain_bytes for chunk in chunks)

    async def _encode(self, chunks: list[Chunk]) -> list[bytes | None]:
        """Each chunk's encoded form, None where it stays raw."""
        codec = self._catalog.record.codec
        if codec is NewChunks.RAW or not chunks:
            return [None] * len(chunks)
        return await self._threads.run(_encoded, chunks, always=codec is NewChunks.ZSTD)

    def _is_full(self, pack: _OpenPack, stored_bytes: int) -> bool:
        """Whether a chunk of this length goes into the next pack; one without chunks takes any."""
        limit = min(self._catalog.record.pack_bytes, _MAX_POSITION)
        over = pack.position + stored_bytes > limit or len(pack.names) == MAX_CHUNKS
        return over and bool(pack.names)

    async def _next_pack(self, batch: Batch, group: list[tuple[Chunk, bytes | None]]) -> _OpenPack:
        """Begin a pack. The one before it is closed once `group`, which ends it, is written."""
        if self._pack is not None:
            self._write_group(batch, group)
            self._close(self._pack)
        name = secrets.token_bytes(16)
        sink = await self._catalog.store.open_pack(layout.pack_key(name))
        pack = self._pack = _OpenPack(name, self._known.number(name), sink, self._page)
        self._unfinished.append(pack)
        self._write(pack, 0, [_aligned_copy(encode_header(name, self._page))], None)
        return pack

    def _append(
        self, pack: _OpenPack, digest: bytes, chunk: Chunk, blob: bytes | None, stored: int
    ) -> Place:
        """Give the chunk the next place in the pack's table."""
        if blob is None:
            pack.position += -pack.position % self._page
        else:
            pack.encoded.append((len(pack.names), ZSTD, chunk.plain_bytes))
        offset = pack.position
        pack.position += stored
        pack.names.append(digest)
        pack.stored_bytes.append(stored)
        return Place(pack.number, offset, stored, RAW if blob is None else ZSTD)

    def _write_group(self, batch: Batch, group: list[tuple[Chunk, bytes | None]]) -> None:
        """Write chunks that end the open pack, one after the other, and empty `group`."""
        pack = self._pack
        if not group or pack is None:
            return
        if any(blob is not None for _, blob in group):
            self._write_staged(pack, group)
        else:
            self._write_raw(pack, batch, [chunk for chunk, _ in group])
        group.clear()

    def _write_raw(self, pack: _OpenPack, batch: Batch, chunks: list[Chunk]) -> None:
        """Write from the buffers; the last page is carried on unless it is full."""
        pieces = [_aligned_copy(bytes(pack.carry).ljust(self._page, b"\0"))] if pack.carry else []
        pieces += joined(chunks)
        pack.carry = bytearray()
        if padding := chunks[-1].padding_bytes:
            last = pieces.pop()
            whole = len(last) - self._page
            pack.carry += last[whole : len(last) - padding]
            pieces += [last[:whole]] if whole else []
        if pieces:
            start = pack.position - len(pack.carry) - sum(map(len, pieces))
            self._write(pack, start, pieces, batch)

    def _write_staged(self, pack: _OpenPack, group: list[tuple[Chunk, bytes | None]]) -> None:
        """Lay out encoded and raw chunks together; what does not fill a page is carried on."""
        parts: list[bytes | bytearray | memoryview] = [pack.carry]
        length = len(pack.carry)
        for chunk, blob in group:
            pieces: list[bytes | memoryview] = [blob] if blob is not None else [*chunk.pieces]
            if blob is None:
                parts.append(bytes(-length % self._page))
                length += len(parts[-1])
                if chunk.padding_bytes:
                    pieces[-1] = pieces[-1][: len(pieces[-1]) - chunk.padding_bytes]
            parts += pieces
            length += sum(map(len, pieces))
        start = pack.position - length
        whole = length - length % self._page
        raw = b"".join(parts)
        pack.carry = bytearray(raw[whole:])
        if whole:
            self._write(pack, start, [_aligned_copy(memoryview(raw)[:whole])], None)

    def _write(
        self, pack: _OpenPack, offset: int, pieces: list[memoryview], batch: Batch | None
    ) -> None:
        if batch is not None:
            batch.retain()

        async def write() -> None:
            await pack.sink.write(offset, pieces)
            if batch is not None:
                batch.release()

        pack.writes.append(self._group.create_task(write()))

    def _close(self, pack: _OpenPack) -> None:
        self._pack = None
        self._closing.append(self._group.create_task(self._finish_pack(pack)))

    async def _finish_pack(self, pack: _OpenPack) -> None:
        """Write the pack's end when its payload is written, and publish it."""
        for written in pack.writes:
            await written
        pack.writes.clear()
        table = pack.table(self._page)
        tail = encode_tail(table, pack.position)
        end = bytes(pack.carry) + bytes(-len(pack.carry) % self._page) + tail
        await pack.sink.write(pack.position - len(pack.carry), [_aligned_copy(end)])
        await pack.sink.commit()
        self._unfinished.remove(pack)
        self.counts.pack_overhead_bytes += self._page + len(tail)
        async with self._index_lock:
            self._unindexed.append(table)
            if len(self._unindexed) >= self._config.index_every_packs:
                await self._write_index()

    async def _write_index(self) -> None:
        tables, self._unindexed = self._unindexed, []
        segment = index.build(tables)
        key, size_bytes = await write_segment(self._catalog, segment)
        self.counts.index_bytes += size_bytes
        self._segments.append(key)
        self._known.settle(segment, tables)

    async def finish(self) -> list[str]:
        """Publish the last pack and index segment; returns the keys of the segments written."""
        if self._pack is not None:
            self._close(self._pack)
        for closed in self._closing:
            await closed
        self._closing.clear()
        async with self._index_lock:
            if self._unindexed:
                await self._write_index()
        segments, self._segments = self._segments, []
        return segments

    async def abort(self) -> None:
        """Forget packs that were not published. No task may be running any more.

        The others get into the index, so that a push that is tried again finds their chunks.
        """
        tables, self._unindexed = self._unindexed, []
        for pack in self._unfinished:
            await pack.sink.abort()
        with contextlib.suppress(ImageError):
            for pack in self._unfinished:  # one may be whole: who published it was cancelled
                if await self._catalog.store.facts(layout.pack_key(pack.name)) is not None:
                    tables.append(pack.table(self._page))
            if tables:
                await write_segment(self._catalog, index.build(tables))


def _aligned_copy(raw: bytes | memoryview) -> memoryview:
    view = page_aligned(len(raw))
    view[:] = raw
    return view


def _encoded(chunks: list[Chunk], *, always: bool) -> list[bytes | None]:
    """Encode chunks, if a sample shows that it pays. Runs on a thread."""
    if not always and not _sample_gains(chunks):
        return [None] * len(chunks)
    blobs: list[bytes | None] = []
    for chunk in chunks:
        blob = encode_zstd(_plain(chunk))
        blobs.append(blob if len(blob) * KEEP_GAIN <= chunk.plain_bytes else None)
    return blobs


def _sample_gains(chunks: list[Chunk]) -> bool:
    samples = [_plain(chunk)[0][:_SAMPLE_BYTES] for chunk in chunks[::_SAMPLE_EVERY]]
    encoded = sum(len(encode_zstd([sample])) for sample in samples)
    return sum(map(len, samples)) >= AUTO_GAIN * encoded


def _plain(chunk: Chunk) -> list[memoryview]:
    """The chunk's memory without its filling."""
    *others, last = chunk.pieces
    return [*others, last[: len(last) - chunk.padding_bytes]]
