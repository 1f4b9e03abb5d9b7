"""Pushes of data that no disk holds: everything but reading, hashing and storing payload is real.

The files are sparse and as large as they claim, so that listing them is real too. What would be
read from them follows from the numbers of their pages alone.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from imgfmt.chunking import MIN_CHUNK_BYTES, PageMarks, Profile
from imgfmt.digest import Octets
from imgfmt.layout import PACKS, REFS
from imgfmt.reference import ReferenceRecord
from transfer.pushing.ingest import Chunk, Segment
from transfer.pushing.scan import SourceFile
from transfer.store.base import PackSink, StoredReference
from transfer.store.posix import PosixStore

REGION_PAGES = 1024
HOLE_PAGES = 51
"""Of each region of the synthetic data, one run of this many pages is zero: 5 %."""

_FOOTER_MAGIC = b"SNAPFOOT"  # the last bytes of a pack (SPEC.md 5.3)
_PAGE_BITS = 40  # of an identity; the file's entry is above them

U8 = npt.NDArray[np.uint64]


def make_sparse_files(folder: Path, total_bytes: int, n_files: int = 40) -> None:
    """Files of `total_bytes` together that take no space, and a dozen small ones beside them."""
    folder.mkdir()
    for number in range(n_files):
        with (folder / f"pages-{number + 1}.img").open("wb") as file:
            file.truncate(total_bytes // n_files - 123)  # the last page is short
    for number in range(12):
        (folder / f"core-{number}.img").write_bytes(bytes(3000))


@contextlib.contextmanager
def synthetic_reading(changed_share: float = 0.0) -> Iterator[None]:
    """While this lasts, pushes read synthetic data; `changed_share` of its chunks have new bytes.

    Cuts stay the same, whatever the share. The buffers are touched as if they were filled.
    """

    def digest(chunk: Chunk) -> bytes:
        found = blake3(chunk.pieces[0][:8]).digest()
        is_changed = int.from_bytes(found[:4], "little") < changed_share * 2**32
        return blake3(found).digest() if is_changed else found

    with mock.patch.multiple(
        "transfer.pushing.ingest",
        _data_extents=_all_data,
        _read_segments=_read_segments,
        _digest=digest,
    ):
        yield


def _all_data(file: SourceFile, profile: Profile) -> list[tuple[int, int]]:
    return [(0, profile.pages(file.size_bytes))]


def _read_segments(
    segments: Sequence[Segment], view: memoryview, profile: Profile
) -> list[PageMarks | None]:
    """Write the identity of each page at its beginning, and mark the pages by it."""
    marks: list[PageMarks | None] = []
    words = np.frombuffer(view, dtype="<u8")
    for segment in segments:
        pages = profile.pages(segment.length_bytes)
        first = (segment.file.entry << _PAGE_BITS) + segment.page
        identity = np.arange(first, first + pages, dtype=np.uint64)
        begin = segment.slot_offset // 8
        words[begin : begin + pages * profile.page_bytes // 8 : profile.page_bytes // 8] = identity
        if segment.file.size_bytes <= MIN_CHUNK_BYTES:
            marks.append(PageMarks.unmarked(pages))
        else:
            marks.append(_marks(identity, profile))
    return marks


def _marks(identity: U8, profile: Profile) -> PageMarks:
    region, page = np.divmod(identity, np.uint64(REGION_PAGES))
    hole_start = _mixed(region) % np.uint64(REGION_PAGES - HOLE_PAGES)
    zeros = (page >= hole_start) & (page < hole_start + np.uint64(HOLE_PAGES))
    hits = _mixed(~identity) < np.uint64(1 << (64 - profile.cut_bits))
    return PageMarks(hits & ~zeros, zeros)


def _mixed(words: U8) -> U8:
    """Numbers that look random (the finisher of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


class MeteredStore(PosixStore):
    """A local store that counts what is written, by the first part of the key; payload too."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.written_bytes: Counter[str] = Counter()

    def count(self, key: str, pieces: Sequence[Octets]) -> None:
        """Add the length of `pieces` to what was written under such keys."""
        self.written_bytes[key.partition("/")[0]] += sum(map(len, pieces))

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """See `Store.put`."""
        self.count(key, pieces)
        await super().put(key, pieces)

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """See `Store.create`."""
        self.count(key, pieces)
        return await super().create(key, pieces)

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`."""
        self.count(REFS, [record.encode()])
        await super().change_reference(record, seen)

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`."""
        return _MeteredPack(self, await super().open_pack(key))


class _MeteredPack:
    def __init__(self, store: MeteredStore, sink: PackSink) -> None:
        self._store = store
        self._sink = sink

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._store.count(PACKS, pieces)
        await self._sink.write(offset, pieces)

    async def commit(self) -> None:
        await self._sink.commit()

    async def abort(self) -> None:
        await self._sink.abort()


class TablesOnlyStore(MeteredStore):
    """Keeps all but the payload of packs, which are sparse files. Packs are not fsynced."""

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`."""
        return _TableOnlyPack(self, Path(self.root, key))


class _TableOnlyPack:
    def __init__(self, store: MeteredStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._tail: tuple[int, bytes] | None = None

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        self._store.count(PACKS, pieces)
        if pieces[-1][-len(_FOOTER_MAGIC) :] == _FOOTER_MAGIC:
            self._tail = offset, b"".join(pieces)

    async def commit(self) -> None:
        assert self._tail is not None
        offset, tail = self._tail
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.pwrite(descriptor, tail, offset)
        finally:
            os.close(descriptor)

    async def abort(self) -> None:
        """Nothing is on disk before `commit`."""
