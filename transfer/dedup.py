"""What dedup would find in directories that are pushed in order, by way of cutting.

Nothing is stored. Files are read a block at a time: memory is BLOCK_BYTES + LEAD_BYTES (24 MiB) for
all, and for each way of cutting a set of at most MAX_KEPT digests, some 60 MB. Where there would be
more, only digests below a bound are kept and count for the others, which gives sizes to about 0.3 %
(see `Sample`). So 100 GB or 1 TB takes no more memory than 30 GB.

Digests are cut to 8 bytes here: of a thousand million chunks, a few hundredths would collide.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from imgfmt.chunking import (
    MAX_CHUNK_BYTES,
    MEAN_BITS,
    MIN_CHUNK_BYTES,
    Cutter,
    Flags,
    PageRun,
    Profile,
    page_marks,
)
from imgfmt.digest import raw_digest
from imgfmt.errors import InvalidInput
from transfer.buffers import page_aligned
from transfer.oserrors import printable

PAGE = 4096
KIB = 1024
BLOCK_BYTES = 16 * KIB * KIB
LEAD_BYTES = 8 * KIB * KIB
"""What is kept of the blocks before: more than the longest chunk and the zero pages behind it."""

MAX_KEPT = 1 << 19

ReadInto = Callable[[memoryview, int], None]
"""Fills memory with the bytes of a file from an offset on."""


@dataclass(frozen=True, slots=True)
class ScaledProfile(Profile):
    """`page-cdc-1` with all lengths multiplied by 2**`scale`: for comparison, no store has it."""

    scale: int = 0

    @property
    def cut_bits(self) -> int:
        """See `Profile.cut_bits`."""
        return MEAN_BITS + self.scale - (self.page_bytes.bit_length() - 1)

    @property
    def min_pages(self) -> int:
        """See `Profile.min_pages`."""
        return max(1, _scaled(MIN_CHUNK_BYTES, self.scale) // self.page_bytes)

    @property
    def max_pages(self) -> int:
        """See `Profile.max_pages`."""
        return _scaled(MAX_CHUNK_BYTES, self.scale) // self.page_bytes


def _scaled(size_bytes: int, scale: int) -> int:
    return size_bytes << scale if scale >= 0 else size_bytes >> -scale


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut: at page-CDC's cuts where `scale` is given, else every `step_pages`."""

    name: str
    scale: int | None = None
    step_pages: int = 0


PAGE_CDC = Way("page-CDC", scale=0)
BOUND = Way("single pages (the bound)", step_pages=1)
WAYS = (
    PAGE_CDC,
    Way("page-CDC, a quarter", scale=-2),
    Way("page-CDC, four times", scale=2),
    Way("fixed 64 KiB", step_pages=16),
    Way("fixed 256 KiB", step_pages=64),
    Way("fixed 1 MiB", step_pages=256),
    BOUND,
)
"""No cut at page boundaries finds more than the last. page-CDC's chunks have 256 KiB on average."""


@dataclass(slots=True)
class Found:
    """What one directory added, cut in one way. Zero pieces and holes are in none of these."""

    new_bytes: int = 0
    n_new: int = 0
    n_chunks: int = 0


class Sample:
    """Which digests were seen. Once there are MAX_KEPT, only each 2**`shift`-th counts, for all.

    Which one counts depends on its value alone, so that a digest that was left out is left out
    whenever it comes again: an unbiased estimate from at least a quarter million digests.
    """

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self.shift = 0
        self._max_kept = max_kept
        self._below = 1 << 64
        self._seen: set[int] = set()

    def weight(self, digest: bytes) -> int:
        """How many new digests this one stands for: 0 if it was seen, or is left out."""
        number = int.from_bytes(digest[:8], "big")
        if number >= self._below or number in self._seen:
            return 0
        self._seen.add(number)
        weight = 1 << self.shift
        if len(self._seen) >= self._max_kept:
            self.shift += 1
            self._below >>= 1
            self._seen = {kept for kept in self._seen if kept < self._below}
        return weight


@dataclass(slots=True)
class DirectoryFound:
    """What reading one directory showed. CPU seconds are those of page-CDC alone."""

    logical_bytes: int
    zero_bytes: int
    by_way: dict[str, Found]
    cut_bytes: int = 0
    cut_s: float = 0.0
    hashed_bytes: int = 0
    hash_s: float = 0.0


class Study:
    """Sees directories in order; what one has is known when the next comes."""

    def __init__(self, ways: Sequence[Way] = WAYS, *, max_kept: int = MAX_KEPT) -> None:
        self.ways = tuple(ways)
        self.samples = {way.name: Sample(max_kept) for way in self.ways}
        self._buffer = page_aligned(LEAD_BYTES + BLOCK_BYTES)

    def add(self, directory: str | os.PathLike[str]) -> DirectoryFound:
        """Read all regular files below `directory`, by name. Links are not followed."""
        found = self.nothing_found()
        for path in regular_files(Path(directory)):
            self._add_file(path, found)
        return found

    def nothing_found(self) -> DirectoryFound:
        """What to add the files of another directory to."""
        return DirectoryFound(0, 0, {way.name: Found() for way in self.ways})

    def _add_file(self, path: Path, found: DirectoryFound) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            size_bytes = os.fstat(descriptor).st_size
            self.add_content(size_bytes, partial(_read_whole, descriptor, path), found)
        finally:
            os.close(descriptor)

    def add_content(self, size_bytes: int, read_into: ReadInto, found: DirectoryFound) -> None:
        """Add one file to `found`, by the bytes that `read_into` gives of it, in order."""
        cutters = [_cutter(way, size_bytes) for way in self.ways]
        position = 0
        while position < size_bytes:
            n_bytes = min(BLOCK_BYTES, size_bytes - position)
            end = LEAD_BYTES + n_bytes
            read_into(self._buffer[LEAD_BYTES:end], position)
            self._buffer[end : end + -n_bytes % PAGE] = bytes(-n_bytes % PAGE)
            self._cut_block(cutters, position, n_bytes, size_bytes, found)
            position += n_bytes
            self._buffer[:LEAD_BYTES] = self._buffer[n_bytes : n_bytes + LEAD_BYTES]
        found.logical_bytes += size_bytes

    def _cut_block(
        self,
        cutters: Sequence[_Cutter],
        position: int,
        n_bytes: int,
        size_bytes: int,
        found: DirectoryFound,
    ) -> None:
        block = self._buffer[LEAD_BYTES : LEAD_BYTES + n_bytes + -n_bytes % PAGE]
        zeros = page_marks(block, Profile()).zeros
        n_zero_bytes = int(zeros.sum()) * PAGE
        if len(zeros) and zeros[-1]:
            n_zero_bytes -= -n_bytes % PAGE
        found.zero_bytes += n_zero_bytes
        origin = position - LEAD_BYTES  # the place in the file of the buffer's first byte
        for way, cutter in zip(self.ways, cutters, strict=True):
            begun_s = time.thread_time()
            runs = cutter.feed(block, zeros, last=position + n_bytes == size_bytes)
            cut_s = time.thread_time()
            sample, of_way = self.samples[way.name], found.by_way[way.name]
            n_hashed_bytes = 0
            for start_page, n_pages in runs:
                start = start_page * PAGE
                end = min(start + n_pages * PAGE, size_bytes)
                weight = sample.weight(raw_digest([self._buffer[start - origin : end - origin]]))
                n_hashed_bytes += end - start
                of_way.n_new += weight
                of_way.new_bytes += weight * (end - start)
            of_way.n_chunks += len(runs)
            if way == PAGE_CDC:
                found.cut_bytes += n_bytes
                found.cut_s += cut_s - begun_s
                found.hashed_bytes += n_hashed_bytes
                found.hash_s += time.thread_time() - cut_s


def _read_whole(descriptor: int, path: Path, target: memoryview, position: int) -> None:
    done = 0
    while done < len(target):
        got = os.preadv(descriptor, [target[done:]], position + done)
        if not got:
            raise InvalidInput(f"{printable(str(path))} became shorter while it was read")
        done += got


def regular_files(directory: Path) -> Iterator[Path]:
    """Regular files below `directory` that are not empty, by name. Raises OSError if unreadable."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(directory, onerror=fail):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                yield path


class _Cutter:
    """Cuts one file in one way. What `feed` returns begins within LEAD_BYTES before its block."""

    def __init__(self, profile: ScaledProfile, size_bytes: int) -> None:
        self._profile = profile
        self._cutter = Cutter(profile, size_bytes)

    def feed(self, block: memoryview, zeros: Flags, *, last: bool) -> Sequence[PageRun]:
        """Chunks that became certain with these pages."""
        runs = self._cutter.feed(page_marks(block, self._profile)).chunks
        return runs + self._cutter.finish().chunks if last else runs


class _Steps(_Cutter):
    """Cuts at multiples of one length, which blocks are multiples of; pieces of zeros are none."""

    def __init__(self, step_pages: int) -> None:
        self._step = step_pages
        self._done = 0

    def feed(self, block: memoryview, zeros: Flags, *, last: bool) -> Sequence[PageRun]:
        """The pieces of this block."""
        starts = np.arange(0, len(zeros), self._step)
        holds_data = np.logical_or.reduceat(~zeros, starts)
        runs = [
            PageRun(self._done + start, min(self._step, len(zeros) - start))
            for start in starts[holds_data].tolist()
        ]
        self._done += len(zeros)
        return runs


def _cutter(way: Way, size_bytes: int) -> _Cutter:
    if way.scale is None:
        return _Steps(way.step_pages)
    return _Cutter(ScaledProfile(scale=way.scale), size_bytes)
