"""The driver's benchmark runs, with few Pods; publishing costs about what bare mounts do."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_csi
from benchmarks.report import Report, machine
from tests.csi.driver import a_driver

SLACK = 2.0
"""Tests share the machine with others."""


@pytest.mark.root
def test_publishing_costs_no_more_than_a_few_bare_mounts(tmp_path: Path) -> None:
    report = Report("bench_csi", machine(tmp_path))
    with a_driver(tmp_path) as driver:
        ratio = bench_csi.measure(driver, 30, 200, 3, report)
    assert ratio < SLACK * bench_csi.RATIO_LIMIT
    assert [row.case for row in report.rows][-1] == "memory"
