"""Time, memory and metadata at the scale of 1 TB, which is listed but not there.

Three pushes into one store: all chunks new; all known; and a replica of which 26 % of the chunks
are new, here and there. Cutting, looking up, placing, packing, publishing are as in any push; see
`benchmarks.synthetic` for what is not. Then the replica's tree and placement are opened, which
means read, verified, checked and turned into a read plan. Each step runs in a process of its own
and is charged for all anonymous memory of that process. Run: `make bench BENCH=scale`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from benchmarks.frame import options_of, reporting
from benchmarks.limits import ProbeConfig, memory_limits
from benchmarks.report import Cost, PeakMemory, Report, Samples, cpu_seconds
from benchmarks.synthetic import TablesOnlyStore, make_sparse_files, synthetic_reading
from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.image import Image
from imgfmt.reference import ImageRef
from imgfmt.store_record import NewChunks, StoreRecord
from transfer.catalog import Catalog, MemberContent, init_store, open_catalog
from transfer.config import TransferConfig
from transfer.plan import ReadPlan, chunk_table, plan_reads
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.posix import PosixStore

PUSH_TARGET_MB = 600
OPEN_TARGET_MB = 500
OPEN_TARGET_S = 1.0
METADATA_TARGET_BYTES = 60
PUSHES = {"all chunks new": 0.0, "all chunks known": 0.0, "replica, 26 % new": 0.26}
REPLICA = "replica, 26 % new"
ALL_STEPS = "all of it"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one push took. `metadata_bytes` were written and are no payload."""

    n_chunks: int
    n_new: int
    wall_s: float
    cpu_s: float
    start_bytes: int
    peak_bytes: int
    metadata_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What opening a tree took by step. `object_bytes`: tree and placement, which are mapped."""

    n_chunks: int
    n_reads: int
    object_bytes: int
    steps: dict[str, Cost]
    start_bytes: int
    peak_bytes: int


def in_child(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a new process, whose memory is not that of what ran before."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        return executor.submit(work, *args, **kwargs).result()


def push_synthetic(folder: Path, tag: str, changed_share: float, config: TransferConfig) -> Pushed:
    """Push `folder/snapshot` into `folder/store`, which is made if it is not there."""

    store = TablesOnlyStore(str(folder / "store"))
    is_new = not (folder / "store").exists()

    async def run() -> Pushed:
        if is_new:
            record = StoreRecord(os.urandom(16), concurrent_writers=True, codec=NewChunks.RAW)
            await init_store(store, record)
        catalog = await open_catalog(store, write=True)
        request = PushRequest([DirectorySource("main", str(folder / "snapshot"))], (), ("it", tag))
        store.written_bytes.clear()
        begun_s, begun_cpu_s = time.perf_counter(), cpu_seconds()
        with synthetic_reading(changed_share), PeakMemory(interval_s=0.05) as memory:
            counts = (await push(catalog, request, config=config)).counts
        wall_s, cpu_s = time.perf_counter() - begun_s, cpu_seconds() - begun_cpu_s
        store.close()
        return Pushed(
            counts.chunks, counts.new_chunks, wall_s, cpu_s, memory.start_bytes,
            memory.peak_bytes, store.written_bytes.total() - counts.stored_bytes,
        )  # fmt: skip

    return asyncio.run(run())


def open_tree(folder: Path, tag: str, rounds: int) -> Opened:
    """Open the tree behind `tag` several times."""

    async def run() -> Opened:
        store = PosixStore(str(folder / "store"))
        catalog = await open_catalog(store)
        digest = await tree_of(catalog, tag)
        await open_once(catalog, digest, StepClock())  # so that the objects are in the page cache
        with PeakMemory(interval_s=0.001) as memory:
            content, plan = await open_once(catalog, digest, StepClock())
        keys = (layout.tree_key(digest), layout.placement_key(digest))
        sizes = [facts.size_bytes for key in keys if (facts := await store.facts(key))]
        n_chunks, n_reads = content.tree.n_chunks, len(plan)
        del content, plan
        clocks = []
        for _ in range(rounds):
            clocks.append(StepClock())
            await open_once(catalog, digest, clocks[-1])
        store.close()
        return Opened(
            n_chunks, n_reads, sum(sizes), _costs(clocks), memory.start_bytes, memory.peak_bytes
        )

    return asyncio.run(run())


class StepClock:
    """Wall and CPU seconds of steps that follow each other."""

    def __init__(self) -> None:
        self.steps: dict[str, tuple[float, float]] = {}
        self._wall_s, self._cpu_s = time.perf_counter(), cpu_seconds()

    def end(self, step: str) -> None:
        """What passed since the last call, or since the start, was `step`."""
        wall_s, cpu_s = time.perf_counter(), cpu_seconds()
        self.steps[step] = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s


def _costs(clocks: Sequence[StepClock]) -> dict[str, Cost]:
    """The cost of each step, a sample a clock; and of all steps together as "all of it"."""
    rounds = [list(clock.steps.values()) for clock in clocks]
    columns = dict(zip(clocks[0].steps, zip(*rounds, strict=True), strict=True))
    columns[ALL_STEPS] = tuple((sum(w for w, _ in r), sum(c for _, c in r)) for r in rounds)
    return {
        step: Cost(*(Samples(tuple(seconds)) for seconds in zip(*found, strict=True)))
        for step, found in columns.items()
    }


async def tree_of(catalog: Catalog, tag: str) -> Digest:
    """The tree that was pushed as `tag`."""
    image = await catalog.image(await catalog.resolve(ImageRef("it", tag)))
    assert isinstance(image, Image)
    return image.members[0].tree


async def open_once(
    catalog: Catalog, digest: Digest, clock: StepClock
) -> tuple[MemberContent, ReadPlan]:
    """From a digest to the reads that bring the whole tree."""
    content = await catalog.content(digest)
    clock.end("read, verify and check")
    content.tree.chunk_offset.max()
    table = chunk_table([(content.tree, content.placement)], catalog.record.page_bytes)
    clock.end("locate chunks")
    plan = plan_reads(table, None, span_bytes=TransferConfig().block_bytes)
    clock.end("plan reads")
    return content, plan


def measure_pushes(
    folder: Path, size_bytes: int, config: TransferConfig, report: Report
) -> list[Pushed]:
    """List `size_bytes` of data, push them three times and add a row for each."""
    make_sparse_files(folder / "snapshot", size_bytes)
    found = []
    for name, changed_share in PUSHES.items():
        tag = name.partition(",")[0].replace(" ", "-")
        result = in_child(push_synthetic, folder, tag, changed_share, config)
        target = {"target_b": METADATA_TARGET_BYTES} if name == REPLICA else {}
        report.add(
            f"push, {name}",
            n_chunks=result.n_chunks,
            n_new=result.n_new,
            wall_s=result.wall_s,
            cpu_us_per_chunk=result.cpu_s / result.n_chunks * 1e6,
            peak_mb=result.peak_bytes / 1e6,
            target_mb=PUSH_TARGET_MB,
            written_b_per_chunk=result.metadata_bytes / result.n_chunks,
            **target,
        )
        found.append(result)
    return found


def measure_open(folder: Path, rounds: int, report: Report) -> Opened:
    """Open the replica's tree and add rows for its parts."""
    result = in_child(open_tree, folder, "replica", rounds)
    for step, cost in result.steps.items():
        totals: dict[str, float] = {}
        if step == ALL_STEPS:
            mapped_mb = result.object_bytes / 1e6
            totals = {"target_s": OPEN_TARGET_S, "peak_mb": result.peak_bytes / 1e6 + mapped_mb}
            totals |= {"target_mb": OPEN_TARGET_MB, "of_it_mapped_mb": mapped_mb}
        report.add(f"open: {step}", wall_s=cost.wall_s, cpu_s=cost.cpu_s, **totals)
    return result


def add_limits(opened: Opened, config: ProbeConfig, report: Report) -> None:
    """What the machine needs to hash and to copy the objects that were opened."""
    for row in memory_limits(config):
        rate = row.values["gb_s"]
        assert isinstance(rate, Samples)
        limit_s = opened.object_bytes / rate.median / 1e9
        report.add(f"limit: {row.case} of tree and placement", wall_s=limit_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--tb", type=float, default=1.0, help="10^12 bytes of data")
    parser.add_argument(
        "--threads", type=int, default=16, help="of a push; 16 use all buffers that it may have"
    )
    options = parser.parse_args(arguments)
    config = TransferConfig(n_threads=options.threads)
    with reporting("bench_scale", options.folder) as (folder, report):
        measure_pushes(folder, int(options.tb * 1e12), config, report)
        opened = measure_open(folder, options.rounds, report)
        add_limits(opened, ProbeConfig(), report)


if __name__ == "__main__":
    main()
