"""Page-CDC (SPEC.md section 3): where a file is cut, found from page fingerprints alone.

Two steps that can run on different threads: `page_marks` reduces bytes to two flags a page (pure
numpy, releases the GIL, any block by itself), and `Cutter` turns the flags of one file, in order,
into chunks and holes. There is no Python loop per page; `Cutter` loops once per chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Octets, raw_digest
from imgfmt.errors import InvalidInput, Unsupported

PAGE_CDC_1 = "page-cdc-1"
PAGE_BYTES_CHOICES = (4096, 16384, 65536)
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 1024 * 1024
MEAN_BITS = 18
HOLE_PAGES = 16
CREDIT_PAGES = 64
CREDIT_START = 8
N_WORDS = 57
WORD_STRIDE = 9
_FEW_RUNS = 64

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Profile:
    """The chunking profile `page-cdc-1` for one page size. Raises on unknown names and sizes."""

    page_bytes: int = 4096
    name: str = PAGE_CDC_1

    def __post_init__(self) -> None:
        if self.name != PAGE_CDC_1:
            raise Unsupported(f"chunking profile {self.name!r} is not known; use a newer snapcask")
        if self.page_bytes not in PAGE_BYTES_CHOICES:
            raise InvalidInput(f"page size {self.page_bytes} is not one of {PAGE_BYTES_CHOICES}")

    @property
    def cut_bits(self) -> int:
        """Top bits of a fingerprint that are zero in a page that hits."""
        return MEAN_BITS - (self.page_bytes.bit_length() - 1)

    @property
    def min_pages(self) -> int:
        """Fewest pages of a chunk that ends at a hit."""
        return MIN_CHUNK_BYTES // self.page_bytes

    @property
    def max_pages(self) -> int:
        """Most pages of a chunk."""
        return MAX_CHUNK_BYTES // self.page_bytes

    def pages(self, size_bytes: int) -> int:
        """Pages that `size_bytes` take, the last one perhaps short."""
        return -(-size_bytes // self.page_bytes)


@dataclass(frozen=True, slots=True)
class PageMarks:
    """What cutting needs to know of some pages: shape (n,) each. No page is both."""

    hits: Flags
    zeros: Flags

    @classmethod
    def unmarked(cls, pages: int) -> PageMarks:
        """Data pages that do not hit, as in files too small to be cut."""
        return cls(np.zeros(pages, dtype=np.bool_), np.zeros(pages, dtype=np.bool_))


class PageRun(NamedTuple):
    """Pages [start, start + pages) of one file."""

    start: int
    pages: int


@dataclass(frozen=True, slots=True)
class Cuts:
    """Chunks and holes that became certain, each in file order."""

    chunks: list[PageRun]
    holes: list[PageRun]


@cache
def constants() -> npt.NDArray[np.uint64]:
    """The 57 multipliers and the additive constant, shape (58,). Derived as SPEC.md 3.1 states."""
    digests = (raw_digest([b"snapcask page-cdc-1 constant %d" % j]) for j in range(N_WORDS + 1))
    return np.array([int.from_bytes(d[:8], "little") | 1 for d in digests], dtype=np.uint64)


def fingerprints(block: Octets, profile: Profile) -> npt.NDArray[np.uint64]:
    """Fingerprint of every page of `block`, whose length is a multiple of the page size."""
    sampled = _as_pages(block, profile)[:, :: WORD_STRIDE * profile.page_bytes // 4096][:, :N_WORDS]
    result: npt.NDArray[np.uint64] = np.einsum("ij,j->i", sampled, constants()[:N_WORDS])
    result += constants()[N_WORDS]
    return result


def page_marks(block: Octets, profile: Profile) -> PageMarks:
    """Hits and zero pages of `block`, whose length is a multiple of the page size."""
    prints = fingerprints(block, profile)
    zeros = prints == constants()[N_WORDS]
    hits = prints < np.uint64(1 << (64 - profile.cut_bits))
    _confirm_zeros(zeros, _as_pages(block, profile))
    hits &= ~zeros
    return PageMarks(hits, zeros)


def zero_marks(pages: int) -> PageMarks:
    """Marks of `pages` zero pages that need not be read."""
    return PageMarks(np.zeros(pages, dtype=np.bool_), np.ones(pages, dtype=np.bool_))


class Cutter:
    """Cuts one file. Feed its pages in order, then call `finish`; chunks come out when certain."""

    def __init__(self, profile: Profile, size_bytes: int) -> None:
        self._profile = profile
        self._n_pages = profile.pages(size_bytes)
        self._whole = size_bytes <= MIN_CHUNK_BYTES
        self._base = 0
        self._fed = 0
        self._hits = np.zeros(0, dtype=np.bool_)
        self._zeros = np.zeros(0, dtype=np.bool_)
        self._hole_start: int | None = None
        self._small_holes = 0

    @property
    def certain_pages(self) -> int:
        """Pages from the start that lie in chunks and holes already returned or in an open hole."""
        return self._base

    def feed(self, marks: PageMarks) -> Cuts:
        """Take the marks of the next pages."""
        self._fed += len(marks.hits)
        if self._whole:
            return Cuts([], [])
        self._hits = np.concatenate([self._hits, marks.hits])
        self._zeros = np.concatenate([self._zeros, marks.zeros])
        return self._cut(final=False)

    def feed_zeros(self, pages: int) -> Cuts:
        """Take `pages` zero pages, however many, at the cost of a few."""
        cuts = self.feed(zero_marks(min(pages, HOLE_PAGES)))
        rest = pages - min(pages, HOLE_PAGES)
        self._fed += rest
        self._base += rest
        return cuts

    def finish(self) -> Cuts:
        """The remaining chunks and holes. Raises InvalidInput unless all pages were fed."""
        if self._fed != self._n_pages:
            raise InvalidInput(f"{self._fed} pages were read of a file of {self._n_pages} pages")
        if self._whole:
            return Cuts([PageRun(0, self._n_pages)] if self._n_pages else [], [])
        return self._cut(final=True)

    def _cut(self, *, final: bool) -> Cuts:
        chunks: list[PageRun] = []
        holes: list[PageRun] = []
        starts, ends, open_run = self._holes(final=final)
        hits = (np.flatnonzero(self._hits) + 1).tolist()
        if (
            self._hole_start is not None
            and not (starts and starts[0] == 0)
            and (len(self._zeros) or final)
        ):
            holes.append(PageRun(self._hole_start, self._base - self._hole_start))
            self._hole_start = None
        position = 0
        for start, end in zip(starts, ends, strict=True):
            position = self._stretch(position, start, hits, chunks, closed=True)
            self._hole_start = self._base + start if self._hole_start is None else self._hole_start
            if end < len(self._zeros) or final:
                holes.append(PageRun(self._hole_start, self._base + end - self._hole_start))
                self._hole_start = None
            position = end
        position = self._stretch(position, open_run, hits, chunks, closed=final)
        self._hits, self._zeros = self._hits[position:], self._zeros[position:]
        self._base += position
        return Cuts(chunks, holes)

    def _holes(self, *, final: bool) -> tuple[list[int], list[int], int]:
        """Starts and ends of holes among the pending pages, and where the undecided end begins."""
        n = len(self._zeros)
        edges = np.flatnonzero(np.diff(self._zeros.view(np.int8), prepend=0, append=0))
        starts, ends = edges[::2], edges[1::2]
        long = ends - starts >= HOLE_PAGES
        if self._hole_start is not None and len(starts) and starts[0] == 0:
            long[0] = True
        open_run = n
        if not final and len(ends) and ends[-1] == n and not long[-1]:
            open_run = int(starts[-1])
            starts, ends, long = starts[:-1], ends[:-1], long[:-1]
        holes = long | self._credited(starts, ~long)
        return starts[holes].tolist(), ends[holes].tolist(), open_run

    def _credited(self, starts: npt.NDArray[Any], small: Flags) -> Flags:
        """Which of the small runs that begin at `starts` become holes (SPEC.md 3.2, rule 3).

        With a[k] small holes among the first k small runs and limits c[k] that never fall, the rule
        says a[k] = min(a[k-1] + 1, c[k]); unrolled, a[k] = k + min(a[0], min of c[j] - j up to k).
        """
        result = np.zeros(len(starts), dtype=np.bool_)
        where = np.flatnonzero(small)
        if not len(where):
            return result
        limits = CREDIT_START + (starts[where] + self._base) // CREDIT_PAGES
        order = np.arange(1, len(where) + 1)
        reached = order + np.minimum(self._small_holes, np.minimum.accumulate(limits - order))
        reached = np.maximum(reached, self._small_holes)
        taken = np.diff(reached, prepend=self._small_holes) > 0
        result[where] = taken
        self._small_holes = int(reached[-1])
        return result

    def _stretch(
        self, start: int, end: int, hits: list[int], chunks: list[PageRun], *, closed: bool
    ) -> int:
        """Cut the data pages [start, end); returns where the last certain chunk ends."""
        low, high = self._profile.min_pages, self._profile.max_pages
        while start < end:
            found = bisect_left(hits, start + low)
            cut = min(hits[found] if found < len(hits) else start + high, start + high)
            if cut > end:
                if not closed:
                    break
                cut = end
            chunks.append(PageRun(self._base + start, cut - start))
            start = cut
        return start


def _as_pages(block: Octets, profile: Profile) -> npt.NDArray[np.uint64]:
    if len(block) % profile.page_bytes:
        raise InvalidInput(f"a block of {len(block)} bytes is not whole pages")
    return np.frombuffer(block, dtype="<u8").reshape(-1, profile.page_bytes // 8)


def _confirm_zeros(candidates: Flags, pages: npt.NDArray[np.uint64]) -> None:
    """Clear the flag of every candidate page that holds a word which is not zero."""
    edges = np.flatnonzero(np.diff(candidates.view(np.int8), prepend=0, append=0))
    if len(edges) > 2 * _FEW_RUNS:
        candidates[candidates] = ~pages[candidates].any(axis=1)
        return
    for start, end in edges.reshape(-1, 2).tolist():
        candidates[start:end] = ~pages[start:end].any(axis=1)
