"""Packing at the limits of a pack, which no real push of a test reaches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from imgfmt.digest import digest_of
from imgfmt.pack import MAX_CHUNKS, MAX_PACK_BYTES
from imgfmt.store_record import NewChunks
from tests.transfer.pushes import CONFIG, KIB, MIB, new_store, run
from transfer.buffers import page_aligned
from transfer.catalog import Catalog, open_catalog
from transfer.pushing.contents import Place
from transfer.pushing.ingest import Batch, Chunk, Span
from transfer.pushing.known import KnownChunks
from transfer.pushing.packer import Packer
from transfer.store.base import PackSink
from transfer.store.posix import PosixStore
from transfer.threads import Threads

PAGE = 4096


class WeighingStore(PosixStore):
    """Forgets what packs hold, and knows how long they are."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.pack_bytes: list[int] = []

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`."""
        return _Weighed(self)


class _Weighed:
    def __init__(self, store: WeighingStore) -> None:
        self._store = store
        self._end = 0

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        assert offset % PAGE == 0
        self._end = max(self._end, offset + sum(map(len, pieces)))

    async def commit(self) -> None:
        self._store.pack_bytes.append(self._end)

    async def abort(self) -> None:
        pass


class Nowhere:
    """Does not care where chunks lie."""

    def place(self, entry: int, digests: Sequence[bytes], places: Sequence[Place]) -> None:
        """See `PlaceTaker.place`."""


def packed(catalog: Catalog, n_chunks: int, chunk_bytes: int) -> tuple[Packer, KnownChunks]:
    """Store this many chunks, which differ only by their names."""
    memory = page_aligned(chunk_bytes + -chunk_bytes % PAGE)
    span = Span(memory, 0, len(memory))

    async def work() -> tuple[Packer, KnownChunks]:
        known = KnownChunks(catalog, frozenset())
        with Threads("test", 1) as threads:
            async with asyncio.TaskGroup() as group:
                packer = Packer(catalog, known, group, threads, CONFIG)
                for first in range(0, n_chunks, 4096):
                    numbers = range(first, min(first + 4096, n_chunks))
                    chunk = Chunk(0, [span], chunk_bytes, len(memory) - chunk_bytes)
                    digests = [digest_of(b"%d" % number).raw for number in numbers]
                    await packer.store(Batch([chunk] * len(numbers), digests), Nowhere())
                await packer.finish()
        return packer, known

    return run(work())


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    new_store(tmp_path / "store", codec=NewChunks.RAW, pack_bytes=MAX_PACK_BYTES)
    return run(open_catalog(WeighingStore(str(tmp_path / "store"))))


@pytest.mark.slow
def test_a_pack_has_as_many_chunks_as_allowed_and_no_more(catalog: Catalog) -> None:
    packer, known = packed(catalog, MAX_CHUNKS + 1, 100)
    assert len(known.names) == 2
    assert packer.counts.new_chunks == MAX_CHUNKS + 1
    assert isinstance(catalog.store, WeighingStore)
    assert sorted(catalog.store.pack_bytes)[0] < 4 * PAGE


@pytest.mark.slow
def test_a_pack_is_as_long_as_allowed_and_no_longer(catalog: Catalog) -> None:
    packer, known = packed(catalog, 65_600, 64 * KIB)
    assert len(known.names) == 2
    assert packer.counts.new_bytes == 65_600 * 64 * KIB
    assert isinstance(catalog.store, WeighingStore)
    assert MAX_PACK_BYTES - 8 * MIB < max(catalog.store.pack_bytes) <= MAX_PACK_BYTES


def test_packs_are_counted_as_they_are_written(tmp_path: Path) -> None:
    record = {"codec": NewChunks.RAW, "pack_bytes": MIB}
    new_store(tmp_path / "store", **record)
    catalog = run(open_catalog(WeighingStore(str(tmp_path / "store"))))
    packer, known = packed(catalog, 50, 65_000)
    assert isinstance(catalog.store, WeighingStore)
    assert len(known.names) == len(catalog.store.pack_bytes) == 4
    assert all(n <= MIB + 64 * 1024 for n in catalog.store.pack_bytes)
    assert packer.counts.stored_bytes == 50 * 65_000
    filling = 50 * (-65_000 % PAGE)
    overhead = sum(catalog.store.pack_bytes) - packer.counts.stored_bytes
    assert packer.counts.pack_overhead_bytes <= overhead
    assert overhead <= packer.counts.pack_overhead_bytes + filling
