"""What a push has learnt of each file: its cuts and where its chunks lie; 47 bytes a chunk."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from imgfmt.chunking import Cuts
from imgfmt.digest import DIGEST_BYTES
from imgfmt.tree import FileContent


@dataclass(slots=True)
class _FileRecord:
    pages: array[int] = field(default_factory=lambda: array("H"))
    extent_chunks: array[int] = field(default_factory=lambda: array("I"))
    extent_holes: array[int] = field(default_factory=lambda: array("Q"))
    run_chunks: int = 0
    digests: bytearray = field(default_factory=bytearray)
    pack: array[int] = field(default_factory=lambda: array("I"))
    offset: array[int] = field(default_factory=lambda: array("I"))
    stored_bytes: array[int] = field(default_factory=lambda: array("I"))
    codec: array[int] = field(default_factory=lambda: array("B"))


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """Where the chunks of a tree lie, in chunk order; shapes (n,), `digest` (n, 32)."""

    digest: npt.NDArray[np.uint8]
    pack: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint32]
    stored_bytes: npt.NDArray[np.uint32]
    codec: npt.NDArray[np.uint8]


class PlaceTaker(Protocol):
    """Told where chunks lie, in the order in which they were handed to the packer."""

    def place(
        self, entry: int, digest: bytes, pack: int, offset: int, stored_bytes: int, codec: int
    ) -> None:
        """Where the file's next chunk lies. `pack` is the packer's number for it."""


class ContentRecorder:
    """Files are told apart by the index of their entry; each file's chunks come in order."""

    def __init__(self) -> None:
        self._files: dict[int, _FileRecord] = {}

    def add(self, entry: int, cuts: Cuts) -> None:
        """The next chunks and holes of a file."""
        record = self._files.setdefault(entry, _FileRecord())
        record.pages.extend([run.pages for run in cuts.chunks])
        taken = 0
        if cuts.holes:
            starts = [run.start for run in cuts.chunks]
            for hole in cuts.holes:
                before = bisect_left(starts, hole.start)
                record.extent_chunks.append(record.run_chunks + before - taken)
                record.extent_holes.append(hole.pages)
                record.run_chunks, taken = 0, before
        record.run_chunks += len(cuts.chunks) - taken

    def close(self, entry: int) -> None:
        """The file has no more chunks and holes."""
        record = self._files[entry]
        if record.run_chunks:
            record.extent_chunks.append(record.run_chunks)
            record.extent_holes.append(0)

    def place(
        self, entry: int, digest: bytes, pack: int, offset: int, stored_bytes: int, codec: int
    ) -> None:
        """See `PlaceTaker.place`."""
        record = self._files[entry]
        record.digests += digest
        record.pack.append(pack)
        record.offset.append(offset)
        record.stored_bytes.append(stored_bytes)
        record.codec.append(codec)

    def finish(self) -> tuple[dict[int, FileContent], ChunkPlaces]:
        """The cuts of all files, and where their chunks lie in the order of the tree.

        Both share the digests. The recorder is left empty, so that nothing is held twice.
        """
        n_chunks = sum(len(record.codec) for record in self._files.values())
        digest = np.empty((n_chunks, DIGEST_BYTES), dtype=np.uint8)
        pack, offset, stored_bytes = (np.empty(n_chunks, dtype=np.uint32) for _ in range(3))
        codec = np.empty(n_chunks, dtype=np.uint8)
        contents: dict[int, FileContent] = {}
        start = 0
        for entry in sorted(self._files):
            record = self._files.pop(entry)
            here = slice(start, start + len(record.codec))
            digest[here] = np.frombuffer(record.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
            pack[here], offset[here] = record.pack, record.offset
            stored_bytes[here], codec[here] = record.stored_bytes, record.codec
            contents[entry] = FileContent(
                digest[here],
                np.frombuffer(record.pages, dtype=np.uint16),
                np.array(record.extent_chunks, dtype=np.uint32),
                np.array(record.extent_holes, dtype=np.uint64),
            )
            start = here.stop
        return contents, ChunkPlaces(digest, pack, offset, stored_bytes, codec)
