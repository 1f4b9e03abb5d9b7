"""The benchmark of scale, small: memory is bounded by bytes a chunk beside the buffers."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.bench_scale import (
    PUSHES,
    Opened,
    Pushed,
    StepClock,
    add_limits,
    measure_open,
    measure_pushes,
    open_once,
    tree_of,
)
from benchmarks.limits import ProbeConfig
from benchmarks.report import Report, anonymous_bytes, machine
from benchmarks.synthetic import make_sparse_files
from tests.imgfmt.hostile import peak_bytes
from transfer.buffers import page_aligned
from transfer.catalog import open_catalog
from transfer.config import MIB, TransferConfig
from transfer.store.posix import PosixStore

CONFIG = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=6 * MIB, n_threads=1)
SIZES_BYTES = (5 * 10**8, 8 * 10**9)
PUSH_BYTES_PER_CHUNK = 300
"""What 600 MB for 1 TB leave beside the buffers is 140; kept pack tables, 60, are bounded there."""

OPEN_BYTES_PER_CHUNK = 150
"""500 MB for 1 TB, without the interpreter. About 40 are those of tree and placement."""


@dataclass(frozen=True, slots=True)
class Result:
    folder: Path
    pushes: list[Pushed]
    opened: Opened
    report: Report


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    found = []
    for size_bytes in SIZES_BYTES:
        folder = tmp_path_factory.mktemp("scale")
        report = Report("tiny", machine(folder))
        pushes = measure_pushes(folder, size_bytes, CONFIG, report)
        opened = measure_open(folder, 2, report)
        add_limits(opened, ProbeConfig(n_repeats=1, memory_bytes=MIB), report)
        found.append(Result(folder, pushes, opened, report))
    return found


def test_a_known_snapshot_stores_nothing_and_a_replica_its_share(results: list[Result]) -> None:
    for result in results:
        first, second, replica = result.pushes
        assert first.n_new == first.n_chunks == second.n_chunks == replica.n_chunks
        assert second.n_new == 0
        assert second.metadata_bytes < 2000
        assert replica.n_new / replica.n_chunks == pytest.approx(0.26, abs=0.02)


def test_chunks_have_the_length_of_real_ones(results: list[Result]) -> None:
    for size_bytes, result in zip(SIZES_BYTES, results, strict=True):
        assert 230e3 < size_bytes / result.opened.n_chunks < 360e3


def test_memory_of_a_push_grows_by_few_bytes_a_chunk(results: list[Result]) -> None:
    small, large = results
    for before, after in zip(small.pushes, large.pushes, strict=True):
        grown = after.peak_bytes - before.peak_bytes
        assert grown / (after.n_chunks - before.n_chunks) < PUSH_BYTES_PER_CHUNK


def test_memory_of_opening_is_few_bytes_a_chunk(results: list[Result]) -> None:
    async def open_it() -> None:
        store = PosixStore(str(results[-1].folder / "store"))
        catalog = await open_catalog(store)
        await open_once(catalog, await tree_of(catalog, "replica"), StepClock())
        store.close()

    opened = results[-1].opened
    assert peak_bytes(lambda: asyncio.run(open_it())) / opened.n_chunks < OPEN_BYTES_PER_CHUNK
    assert opened.start_bytes < opened.peak_bytes


def test_metadata_of_a_large_replica_is_near_the_target(results: list[Result]) -> None:
    replica = results[-1].pushes[-1]
    assert replica.metadata_bytes / replica.n_chunks < 67


def test_the_report_has_all_steps_and_limits(results: list[Result]) -> None:
    assert [row.case for row in results[0].report.rows] == [
        *(f"push, {name}" for name in PUSHES),
        "open: read, verify and check",
        "open: locate chunks",
        "open: plan reads",
        "open: all of it",
        "limit: memory copy of tree and placement",
        "limit: BLAKE3 of tree and placement",
    ]


def test_buffers_count_as_anonymous_memory() -> None:
    before_bytes = anonymous_bytes()
    buffer = page_aligned(32 * MIB)
    buffer[::4096] = bytes([1]) * (len(buffer) // 4096)
    assert anonymous_bytes() - before_bytes >= len(buffer)


def test_no_file_of_the_snapshot_takes_space(tmp_path: Path) -> None:
    make_sparse_files(tmp_path / "files", 10**12)
    used = sum(path.stat().st_blocks for path in (tmp_path / "files").iterdir()) * 512
    assert used < 1_000_000
