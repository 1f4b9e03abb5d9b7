"""What a push has learnt of each file: its cuts and where its chunks lie; 47 bytes a chunk."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from imgfmt.chunking import Cuts
from imgfmt.digest import DIGEST_BYTES
from imgfmt.errors import Internal
from imgfmt.tree import FileContent


class Place(NamedTuple):
    """Where one chunk lies. `pack` is a number that the push gave to the pack."""

    pack: int
    offset: int
    stored_bytes: int
    codec: int


@dataclass(slots=True)
class _FileRecord:
    """`first` is the number of the file's first chunk in the order of arrival."""

    first: int
    n_chunks: int = 0
    n_placed: int = 0
    extent_chunks: array[int] = field(default_factory=lambda: array("I"))
    extent_holes: array[int] = field(default_factory=lambda: array("Q"))
    run_chunks: int = 0


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

    def place(self, entry: int, digests: Sequence[bytes], places: Sequence[Place]) -> None:
        """Where the file's next chunks lie."""


class ContentRecorder:
    """Files are told apart by the index of their entry. They come one after the other.

    So all chunks together are a few columns that grow, whatever the number of files.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._files: dict[int, _FileRecord] = {}
        self._n_placed = 0
        self._pages = array("H")
        self._digests = bytearray()
        self._pack = array("I")
        self._offset = array("I")
        self._stored_bytes = array("I")
        self._codec = array("B")

    def add(self, entry: int, cuts: Cuts) -> None:
        """The next chunks and holes of a file. Raises Internal if another one has begun since."""
        record = self._files.get(entry)
        if record is None:
            record = self._files[entry] = _FileRecord(len(self._pages))
        if record.first + record.n_chunks != len(self._pages):
            raise Internal(f"chunks of entry {entry} came after those of another file")
        self._pages.extend([run.pages for run in cuts.chunks])
        record.n_chunks += len(cuts.chunks)
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

    def place(self, entry: int, digests: Sequence[bytes], places: Sequence[Place]) -> None:
        """See `PlaceTaker.place`. Raises Internal unless chunks come in the order of `add`."""
        record = self._files[entry]
        if record.first + record.n_placed != self._n_placed:
            raise Internal(f"a chunk of entry {entry} was placed before those that came earlier")
        record.n_placed += len(digests)
        self._n_placed += len(digests)
        self._digests += b"".join(digests)
        packs, offsets, stored_bytes, codecs = zip(*places, strict=True)
        self._pack.extend(packs)
        self._offset.extend(offsets)
        self._stored_bytes.extend(stored_bytes)
        self._codec.extend(codecs)

    def finish(self) -> tuple[dict[int, FileContent], ChunkPlaces]:
        """The cuts of all files, and where their chunks lie in the order of the tree.

        Both share the digests. The recorder is left empty, so that nothing is held twice.
        """
        records = dict(sorted(self._files.items()))
        order = [slice(r.first, r.first + r.n_chunks) for r in records.values()]
        digests = np.frombuffer(self._digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        places = ChunkPlaces(
            _joined(digests, order),
            _joined(np.frombuffer(self._pack, dtype=np.uint32), order),
            _joined(np.frombuffer(self._offset, dtype=np.uint32), order),
            _joined(np.frombuffer(self._stored_bytes, dtype=np.uint32), order),
            _joined(np.frombuffer(self._codec, dtype=np.uint8), order),
        )
        pages = np.frombuffer(self._pages, dtype=np.uint16)
        self._clear()
        contents: dict[int, FileContent] = {}
        start = 0
        for (entry, record), arrived in zip(records.items(), order, strict=True):
            contents[entry] = FileContent(
                places.digest[start : start + record.n_chunks],
                pages[arrived],
                np.array(record.extent_chunks, dtype=np.uint32),
                np.array(record.extent_holes, dtype=np.uint64),
            )
            start += record.n_chunks
        return contents, places


def _joined(column: npt.NDArray[Any], parts: Sequence[slice]) -> npt.NDArray[Any]:
    """These parts of the column, one after the other; a copy."""
    return np.concatenate([column[part] for part in parts]) if parts else column[:0].copy()
