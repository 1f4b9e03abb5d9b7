"""The benchmark of receiving runs, on a little data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bench_receive, bench_receive_processes
from benchmarks.report import Report

pytest.importorskip("aiobotocore")


@pytest.mark.parametrize("nginx", [True, False])
def test_it_measures_our_transports(
    nginx: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not nginx:
        monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(Report, "write", lambda report: tmp_path)
    monkeypatch.setattr(bench_receive, "memory_limits", lambda config: [])
    arguments = ["--gb", "0.05", "--object-gb", "0.03", "--rounds", "1", "--connections", "2"]
    bench_receive.main([*arguments, "--folder", str(tmp_path), "--receivers", "zero_copy"])
    shown = capsys.readouterr().out
    assert "http, zero_copy" in shown


def test_it_measures_processes_and_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(Report, "write", lambda report: tmp_path)
    arguments = ["--gb", "0.1", "--object-gb", "0.03", "--rounds", "1", "--connections", "2"]
    more = ["--processes", "1", "2", "--loops", "2", "--folder", str(tmp_path)]
    bench_receive_processes.main([*arguments, *more])
    shown = capsys.readouterr().out
    for case in ("1 processes, 1 loops", "2 processes, 1 loops", "1 processes, 2 loops"):
        assert f"http, {case} each" in shown
