"""Snapshots with the statistics of those of GPU servers, of any size; no memory or disk holds them.

What a page holds follows from the seed and its number alone, so any part can be made at any time.
The composition:

- 25 to 41 % of the pages are zero, drawn once a model: behind tensors, as allocators leave them,
  and in holes among the pages of the process, most of them short, as in real dumps.
- `PRIVATE_BYTES` are of one replica only, half of them between tensors; `COMMON_BYTES` are the same
  in all servers (libraries, code). Both are at most 5 % of the snapshot, in runs of 97 pages on
  average.
- The rest are weights: 16 layers of nine tensors in the proportions of Llama 3 8B. They are random
  bytes; real fp16 weights compress by a few per cent at most.
- What lies between tensors differs in length from replica to replica, so that all weights are
  shifted by whole pages; another order of loading shuffles the tensors. A fine-tune has new layers.

    python -m benchmarks.gpu_like FOLDER --gib 4 --replica 1    # write one, to give it to others
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

SEED = 20_240_501
PAGE = 4096
WORDS = PAGE // 8
GB = 10**9

PRIVATE_BYTES = GB // 2
COMMON_BYTES = GB // 2
MOST_SHARE = 0.05
"""Of the snapshot: private and common pages are at most so much each."""

ZERO_SHARES = (0.25, 0.41)
HOLE_ZEROS = 0.3
"""Of the zero pages: those in holes among the pages of the process."""

RUN_PAGES = 97
SHORT_HOLE_PAGES = 16
LONG_HOLE_PAGES = 400
LONG_HOLES = 0.15
N_LAYERS = 16
TENSORS = (4096, 1024, 1024, 4096, 14336, 14336, 14336, 1, 1)
"""Sizes of the tensors of a layer, in proportion: q, k, v, o, gate, up, down and two norms."""

LEAST_BYTES = 8 << 20

U64 = npt.NDArray[np.uint64]
_ZERO = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """Which server was captured. Of N_LAYERS layers the first `changed_layers` are fine-tuned."""

    size_bytes: int
    model: int = 1
    order: int = 0
    replica: int = 0
    changed_layers: int = 0

    def __post_init__(self) -> None:
        if self.size_bytes < LEAST_BYTES:
            raise ValueError(f"a snapshot of {self.size_bytes} bytes: at least {LEAST_BYTES}")


class GpuLike:
    """One snapshot, a file of whole pages. Equal kinds give equal bytes, anywhere."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        runs = _Layout(kind).runs
        lengths = np.array([n_pages for _, n_pages in runs], np.int64)
        self._firsts = np.array([identity for identity, _ in runs], np.uint64)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self.size_bytes = int(self._ends[-1]) * PAGE
        self.zero_bytes = int(lengths[self._firsts == _ZERO].sum()) * PAGE
        self._base = np.random.default_rng(SEED).integers(0, 1 << 64, (256, WORDS), np.uint64)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill memory with the bytes from `offset` on; both are of whole pages."""
        first, n_pages = offset // PAGE, len(view) // PAGE
        pages = np.arange(first, first + n_pages)
        run = np.searchsorted(self._ends, pages, side="right")
        identities = self._firsts[run]
        is_data = identities != _ZERO
        identities = _mixed(identities + (pages - self._starts[run]).astype(np.uint64))
        words = np.frombuffer(view, np.uint64).reshape(n_pages, WORDS)
        np.take(self._base, (identities & np.uint64(255)).astype(np.intp), 0, words, "clip")
        words ^= identities[:, None]
        words[~is_data] = 0

    def write(self, path: Path, step_bytes: int = 16 << 20) -> None:
        """Write it to a file."""
        buffer = memoryview(bytearray(step_bytes))
        with path.open("wb") as file:
            for offset in range(0, self.size_bytes, step_bytes):
                block = buffer[: min(step_bytes, self.size_bytes - offset)]
                self.read_into(block, offset)
                file.write(block)


class _Layout:
    """Runs of pages, as the number of their first page and their length; _ZERO is zero pages."""

    def __init__(self, kind: Kind) -> None:
        self.runs: list[tuple[int, int]] = []
        self._kind = kind
        self._rng = np.random.default_rng((SEED, kind.model, kind.order, kind.replica))
        self._private = _Supply("private", kind.model, kind.order, kind.replica)
        n_pages = kind.size_bytes // PAGE
        share = np.random.default_rng((SEED, kind.model)).uniform(*ZERO_SHARES)
        n_zero = int(share * n_pages)
        n_private = int(min(PRIVATE_BYTES, MOST_SHARE * kind.size_bytes)) // PAGE
        n_common = int(min(COMMON_BYTES, MOST_SHARE * kind.size_bytes)) // PAGE
        n_weights = n_pages - n_private - n_common - n_zero
        n_holes, n_between = int(HOLE_ZEROS * n_zero), n_private // 2
        self._process(n_private - n_between, n_common, n_holes)
        self._weights(n_weights, n_zero - n_holes, n_between)

    def _process(self, n_private: int, n_common: int, n_holes: int) -> None:
        """Private and common runs in turn, a hole behind each while there are zero pages left."""
        common = _Supply("common")
        common_rng = np.random.default_rng(SEED)  # which cuts common pages alike in all servers
        while n_private or n_common:
            for_private = min(n_private, int(self._rng.geometric(1 / RUN_PAGES)))
            for_common = min(n_common, int(common_rng.geometric(1 / RUN_PAGES)))
            for supply, length in ((self._private, for_private), (common, for_common)):
                self._add(supply.take(length), length)
                hole = min(n_holes, self._hole())
                self._add(_ZERO, hole)
                n_holes -= hole
            n_private, n_common = n_private - for_private, n_common - for_common
        self._add(_ZERO, n_holes)

    def _hole(self) -> int:
        if self._rng.random() < LONG_HOLES:
            return int(self._rng.geometric(1 / LONG_HOLE_PAGES))
        return int(self._rng.integers(1, SHORT_HOLE_PAGES))

    def _weights(self, n_pages: int, n_zero: int, n_private: int) -> None:
        """Tensors in the order of loading; behind each zero and private pages, in either order."""
        kind = self._kind
        sizes = np.maximum(np.array(TENSORS * N_LAYERS) * n_pages // (sum(TENSORS) * N_LAYERS), 1)
        sizes[4] += n_pages - sizes.sum()  # what rounding left
        numbers = np.arange(len(sizes))
        if kind.order:
            numbers = np.random.default_rng((SEED, kind.order)).permutation(numbers)
        zeros, private = (self._shared(n, len(sizes)) for n in (n_zero, n_private))
        for place, number in enumerate(numbers.tolist()):
            tuned = number // len(TENSORS) < kind.changed_layers
            self._add(_first("weights", kind.model, tuned, number), int(sizes[number]))
            private_run = self._private.take(private[place]), private[place]
            behind = [private_run, (_ZERO, zeros[place])]
            for run in behind if self._rng.random() < 0.5 else behind[::-1]:
                self._add(*run)

    def _shared(self, total: int, n_parts: int) -> list[int]:
        """`total` in parts of random size."""
        shares = self._rng.random(n_parts)
        parts = (shares / shares.sum() * total).astype(np.int64)
        parts[-1] += total - parts.sum()
        found: list[int] = parts.tolist()
        return found

    def _add(self, first: int, n_pages: int) -> None:
        if n_pages:
            self.runs.append((first, n_pages))


class _Supply:
    """Pages of one kind, each given once."""

    def __init__(self, *words: object) -> None:
        self._next = _first(*words)

    def take(self, n_pages: int) -> int:
        """The number of the first of the next pages."""
        first, self._next = self._next, self._next + n_pages
        return first


def _first(*words: object) -> int:
    """The number of the first page of something: far from all others, and never _ZERO."""
    text = repr((SEED, *words)).encode()
    return int.from_bytes(blake3(text).digest(length=7), "little") << 7 | 1


def _mixed(words: U64) -> U64:
    """Numbers that look random (the finisher of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def main() -> None:
    """Write one snapshot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="made if it is not there")
    parser.add_argument("--gib", type=float, required=True, help="2^30 bytes")
    for name in ("model", "order", "replica", "changed-layers"):
        parser.add_argument(f"--{name}", type=int, default=1 if name == "model" else 0)
    options = parser.parse_args()
    kind = Kind(
        int(options.gib * (1 << 30)), options.model, options.order, options.replica,
        options.changed_layers,
    )  # fmt: skip
    options.folder.mkdir(parents=True, exist_ok=True)
    snapshot = GpuLike(kind)
    snapshot.write(options.folder / "pages-1.img")
    print(f"written: {options.folder}, {snapshot.zero_bytes / snapshot.size_bytes:.0%} zero")


if __name__ == "__main__":
    main()
