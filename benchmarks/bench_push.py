"""CPU cost of a push into a local store, beside a bare loop that does only the unavoidable work.

The bare loop reads, fingerprints, cuts and hashes, and for new data writes with O_DIRECT. Data is
incompressible and in the page cache for all of them. Run: `make bench BENCH=push`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from blake3 import blake3

from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import (
    Cost,
    Report,
    Samples,
    Work,
    repeat,
)
from benchmarks.snapshots import make_snapshot
from imgfmt.chunking import Cutter, Profile, page_marks
from imgfmt.store_record import NewChunks, StoreRecord
from transfer.buffers import page_aligned
from transfer.catalog import init_store, open_catalog
from transfer.config import MIB, TransferConfig
from transfer.push import DirectorySource, PushReport, PushRequest, push
from transfer.store.posix import PosixStore

PAGE = 4096
BLOCK_BYTES = 16 * MIB
LEAD_BYTES = 2 * MIB
DIRECT = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT


def bare_loop(folder: Path, out: Path | None) -> None:
    """Read, fingerprint, cut and hash every file in one thread; write each O_DIRECT below `out`."""
    buffer = page_aligned(LEAD_BYTES + BLOCK_BYTES)
    for path in sorted(folder.iterdir()):
        source = os.open(path, os.O_RDONLY)
        target = None if out is None else os.open(out / path.name, DIRECT, 0o644)
        position = 0
        for start, end in _hashed_ranges(source, path.stat().st_size, buffer):
            padded = end - start + (start - end) % PAGE
            if target is not None:
                os.pwritev(target, [buffer[start : start + padded]], position)
            position += padded
        for descriptor in (source, target):
            if descriptor is not None:
                os.close(descriptor)


def _hashed_ranges(source: int, size_bytes: int, buffer: memoryview) -> Iterator[tuple[int, int]]:
    """Ranges of `buffer` whose chunks were hashed; an open chunk moves before the next block."""
    profile, position, begin = Profile(), 0, LEAD_BYTES
    cutter = Cutter(profile, size_bytes)
    while position < size_bytes:
        got = os.preadv(source, [buffer[LEAD_BYTES:]], position)
        origin = position - LEAD_BYTES  # file offset of the buffer's first byte
        padded = LEAD_BYTES + got + -got % PAGE
        cuts = cutter.feed(page_marks(buffer[LEAD_BYTES:padded], profile)).chunks
        position += got
        if position == size_bytes:
            cuts += cutter.finish().chunks
        start = begin
        for run in cuts:
            end = min((run.start + run.pages) * PAGE - origin, LEAD_BYTES + got)
            blake3(buffer[run.start * PAGE - origin : end]).digest()
            start = end
        yield begin, start
        left = LEAD_BYTES + got - start
        begin = LEAD_BYTES - left
        buffer[begin:LEAD_BYTES] = buffer[start : start + left]


def push_once(store_folder: Path, snapshot: Path) -> PushReport:
    """One push into the store, which is made if it is not there."""

    is_new = not store_folder.exists()

    async def run() -> PushReport:
        store = PosixStore(str(store_folder))
        if is_new:
            record = StoreRecord(os.urandom(16), concurrent_writers=True, codec=NewChunks.RAW)
            await init_store(store, record)
        catalog = await open_catalog(store, write=True)
        request = PushRequest([DirectorySource("main", str(snapshot))], reference=("bench", "x"))
        try:
            return await push(catalog, request, config=TransferConfig())
        finally:
            store.close()

    return asyncio.run(run())


def compare(folder: Path, size_bytes: int, rounds: int, report: Report) -> None:
    """Measure all cases in turn, `rounds` times, and add them and their ratios to `report`."""
    snapshot, store, out = folder / "snapshot", folder / "store", folder / "out"
    make_snapshot(snapshot, size_bytes)

    def empty() -> None:
        shutil.rmtree(store, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()

    cases: dict[str, tuple[Work, Work]] = {
        "bare loop, new": (partial(bare_loop, snapshot, out), empty),
        "push, new": (partial(push_once, store, snapshot), empty),
        "bare loop, known": (partial(bare_loop, snapshot, None), os.sync),
        "push, known": (partial(push_once, store, snapshot), os.sync),
    }
    bare_loop(snapshot, None)  # so that every case finds its input in the page cache
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (work, before) in cases.items():
            costs[name].append(repeat(work, 1, before=before))
    medians = {}
    for name, found in costs.items():
        cpu = Samples(tuple(cost.cpu_s.median * 1e9 / size_bytes for cost in found))
        wall = Samples(tuple(cost.wall_s.median for cost in found))
        medians[name] = cpu.median
        rate = wall.gb_s(size_bytes)
        report.add(name, cpu_s_per_gb=cpu, gb_per_cpu_s=1 / cpu.median, wall_s=wall, gb_s=rate)
    for kind, target in (("new", 1.4), ("known", 1.35)):
        ratio = medians[f"push, {kind}"] / medians[f"bare loop, {kind}"]
        report.add(f"push : bare loop, {kind}", ratio=ratio, target=target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = options_of(__doc__, gb=4.0, rounds=5).parse_args(arguments)
    with reporting("bench_push", options.folder, limits=True) as (folder, report):
        compare(folder, gigabytes(options), options.rounds, report)


if __name__ == "__main__":
    main()
