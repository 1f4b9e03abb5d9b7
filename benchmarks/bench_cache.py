"""Materialising an image into the cache on XFS, beside `cp --reflink=never` of the same bytes.

Each is followed by `sync -f`, and reads what is not in the page cache. The image shares nothing,
90 % or 98 % of its bytes with one that is in the cache. Needs root: XFS lies in a file of the work
folder, on a loop device that this makes. Run: `make bench BENCH=cache`.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import Report, Samples, Work
from imgfmt.digest import Digest
from imgfmt.store_record import NewChunks, StoreRecord
from transfer.cache.evict import Watermarks, remove_complete
from transfer.cache.layout import CacheRoot
from transfer.cache.listing import trees_of
from transfer.cache.share import Sharer
from transfer.cache.warm import WarmConfig, WarmReport, warm
from transfer.catalog import init_store, open_catalog
from transfer.config import MIB, TransferConfig
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.posix import PosixStore

SHARED = (0, 90, 98)
"""Per cent of its bytes that an image has in common with the one in the cache."""

TARGETS = {0: 1.1, 90: 1 / 6, 98: 1 / 15}
PIECE_BYTES = 256 * 1024
_NEVER = Watermarks(begin_free=0.0, end_free=0.0)


def make_snapshot(folder: Path, size_bytes: int, shared: int | None) -> None:
    """Two large files of random bytes and a few small ones; every so often a MiB is the own one.

    Without `shared` it is the one that the others share with.
    """
    folder.mkdir()
    base, own = np.random.default_rng(7), np.random.default_rng(100 + (shared or 0))
    every = {None: 0, 0: 1, 90: 10, 98: 50}[shared]
    count = 0
    for number in range(2):
        with open(folder / f"pages-{number + 1}.img", "wb") as file:
            for _ in range(size_bytes // 2 // MIB):
                of_base = base.bytes(MIB)
                file.write(own.bytes(MIB) if every and count % every == 0 else of_base)
                count += 1
    for number in range(12):
        (folder / f"core-{number}.img").write_bytes(own.bytes(3000))


async def push_all(folder: Path, store_folder: Path, size_bytes: int) -> dict[str, Digest]:
    """Make snapshots and store them; the digest of each. Only what shares nothing stays."""
    store = PosixStore(str(store_folder))
    record = StoreRecord(uuid=os.urandom(16), concurrent_writers=True, codec=NewChunks.RAW)
    await init_store(store, record)
    catalog = await open_catalog(store, write=True)
    digests = {}
    for shared in (None, *SHARED):
        name = "base" if shared is None else f"shared-{shared}"
        make_snapshot(folder / name, size_bytes, shared)
        request = PushRequest([DirectorySource("main", str(folder / name))], reference=None)
        digests[name] = (await push(catalog, request, config=TransferConfig())).digest
        if shared != 0:
            shutil.rmtree(folder / name)
    store.close()
    return digests


def warm_once(
    cache_folder: Path, store_folder: Path, image: Digest, config: WarmConfig
) -> WarmReport:
    """Have an image in a cache."""

    async def run() -> WarmReport:
        store = PosixStore(str(store_folder))
        try:
            catalog = await open_catalog(store)
            cache = CacheRoot(str(cache_folder))
            paths = cache.domain(catalog.record.uuid, "bench", store.url)
            return await warm(cache, paths, catalog, image, config=config, facts={})
        finally:
            store.close()

    return asyncio.run(run())


def sync(root: Path) -> None:
    """Write everything of a filesystem back."""
    subprocess.run(["sync", "-f", root], check=True)


@contextmanager
def xfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A new XFS on a loop device."""
    image, root = folder / "disk.xfs", folder / "xfs"
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    root.mkdir()
    made = subprocess.run(
        ["losetup", "--find", "--show", "--direct-io=on", image],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    device = made.stdout.strip()
    try:
        subprocess.run(["mount", device, root], check=True)
        try:
            yield root
        finally:
            subprocess.run(["umount", root], check=True)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def drop(folder: Path) -> None:
    """Have the files below a folder out of the page cache."""
    for above, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(above, name), os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def compare(folder: Path, size_bytes: int, rounds: int, report: Report) -> None:
    """Measure all cases in turn, `rounds` times, and add them and their ratios to `report`."""
    store, source = folder / "store", folder / "shared-0"
    digests = asyncio.run(push_all(folder, store, size_bytes))
    with xfs(folder, 3 * size_bytes + 1024 * MIB) as root:
        out = root / "out"
        config = WarmConfig(watermarks=_NEVER)
        modes = {"direct": config, "buffered": replace(config, direct=False)}
        seconds: dict[str, list[float]] = {}

        def measure(name: str, work: Work) -> None:
            drop(store)
            drop(source)
            begun = time.perf_counter()
            work()
            sync(root)
            seconds.setdefault(name, []).append(time.perf_counter() - begun)

        warm_once(root / "cache", store, digests["base"], config)
        for _ in range(rounds):
            copy = ["cp", "-r", "--reflink=never", source, out]
            measure("cp", partial(subprocess.run, copy, check=True))
            shutil.rmtree(out)
            for shared in SHARED:
                for mode, using in modes.items():
                    image = digests[f"shared-{shared}"]
                    work = partial(warm_once, root / "cache", store, image, using)
                    measure(f"warm {mode}, {shared} % shared", work)
                    forget(root / "cache", image)
                    sync(root)
        _add(report, size_bytes, seconds)
        report.add("sharing", **share_pieces(root, min(size_bytes // 4, 1024 * MIB)))


def forget(cache_folder: Path, image: Digest) -> None:
    """Remove an image from a cache."""
    cache = CacheRoot(str(cache_folder))
    for paths, _ in cache.domains():
        for tree in trees_of(paths, image):
            assert remove_complete(cache, paths, tree)


def _add(report: Report, size_bytes: int, seconds: dict[str, list[float]]) -> None:
    of_cp = Samples(tuple(seconds["cp"])).median
    for name, took in seconds.items():
        wall = Samples(tuple(took))
        values: dict[str, Samples | float] = {"wall_s": wall, "gb_s": wall.gb_s(size_bytes)}
        if name != "cp":
            shared = next(s for s in SHARED if f", {s} %" in name)
            values |= {"of_cp": wall.median / of_cp, "target_of_cp": TARGETS[shared]}
        report.add(name, **values)


def share_pieces(root: Path, size_bytes: int) -> dict[str, Samples | float]:
    """Seconds to share a flushed file in shuffled pieces, none of which follows another."""
    donor, target = root / "donor", root / "target"
    size_bytes -= size_bytes % MIB
    with donor.open("wb") as file:
        for _ in range(size_bytes // MIB):
            file.write(os.urandom(MIB))
    sync(root)
    pieces = list(range(size_bytes // PIECE_BYTES))
    took = []
    for seed in range(5):
        random.Random(seed).shuffle(pieces)
        source, to = os.open(donor, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT)
        os.ftruncate(to, size_bytes)
        sharer = Sharer()
        begun = time.perf_counter()
        for at, piece in enumerate(pieces):
            sharer.take(source, piece * PIECE_BYTES, to, at * PIECE_BYTES, PIECE_BYTES)
        took.append(time.perf_counter() - begun)
        assert sharer.copied_bytes == 0
        os.close(source)
        os.close(to)
        target.unlink()
    donor.unlink()
    per_gb = Samples(tuple(t * 1e9 / size_bytes for t in took))
    return {"s_per_gb": per_gb, "us_per_piece": per_gb.median * 1e6 * PIECE_BYTES / 1e9}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = options_of(__doc__, gb=4.0, rounds=5).parse_args(arguments)
    with reporting("bench_cache", options.folder, limits=True) as (folder, report):
        compare(folder, gigabytes(options), options.rounds, report)


if __name__ == "__main__":
    main()
