"""The cache's benchmark runs, on little data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_cache
from benchmarks.report import Report, machine
from tests.filesystems import skip_unless


@pytest.mark.root
def test_the_cache_benchmark_measures_every_case(tmp_path: Path) -> None:
    skip_unless("xfs")
    report = Report("bench_cache", machine(tmp_path))
    bench_cache.compare(tmp_path, 20_000_000, 1, report)
    cases = [row.case for row in report.rows]
    assert cases[0] == "cp"
    assert len([case for case in cases if case.startswith("warm")]) == 6
    assert "sharing" in cases
