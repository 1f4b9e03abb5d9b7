"""The loading benchmark runs, with the CPU as its device and next to no data."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bench_load import (
    Bench,
    StoreSource,
    from_directory,
    measure,
    memory,
    pageable_copy,
    pinned_copy,
    push,
    raw_direct,
)
from benchmarks.models import write_model
from benchmarks.report import Report, Samples, machine
from restore.host_driver import HostDriver
from restore.load_config import LoadConfig, Verify
from restore.pinned import PinnedPool

MIB = 1 << 20


def test_the_cases_give_rates(tmp_path: Path) -> None:
    n_bytes = write_model(tmp_path / "model", 8 * MIB, tensor_bytes=MIB)
    content = push(tmp_path / "model", tmp_path / "store")
    driver, config = HostDriver(), LoadConfig(2 * MIB, 40 * MIB, n_threads=2)
    report = Report("bench_load", machine(tmp_path))
    with PinnedPool(driver, config.pinned_bytes) as pool:
        bench = Bench(driver, pool, config, 2, report)
        measure(bench, "files", from_directory(tmp_path / "model", None), Verify.OFF)
        measure(bench, "files", from_directory(tmp_path / "model", content.tree), Verify.CPU)
        for wire in (False, True):
            source = StoreSource(tmp_path / "store", content, wire=wire)
            measure(bench, f"wire {wire}", source, Verify.CPU)
        memory(bench, from_directory(tmp_path / "model", None), "files", Verify.OFF)
        raw_direct(bench, tmp_path / "model")
        pinned_copy(bench, n_bytes)
        pageable_copy(bench, 64 * MIB)
    rates = [row.values["gb_s"] for row in report.rows if "gb_s" in row.values]
    assert len(rates) == 7
    assert all(isinstance(rate, Samples) and rate.median > 0 for rate in rates)
