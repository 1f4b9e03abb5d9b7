"""The benchmark of pushes at a tiny size, and its bare loop."""

from __future__ import annotations

from pathlib import Path

from benchmarks import bench_push
from benchmarks.report import Report, machine
from benchmarks.snapshots import make_snapshot


def test_pushes_stand_beside_the_bare_loop(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    bench_push.compare(tmp_path, 32 << 20, 1, report)
    assert [row.case for row in report.rows] == [
        "bare loop, new", "push, new", "bare loop, known", "push, known",
        "push : bare loop, new", "push : bare loop, known",
    ]  # fmt: skip


def test_the_bare_loop_writes_every_byte(tmp_path: Path) -> None:
    make_snapshot(tmp_path / "snapshot", 32 << 20)
    (tmp_path / "out").mkdir()
    bench_push.bare_loop(tmp_path / "snapshot", tmp_path / "out")
    for path in (tmp_path / "snapshot").iterdir():
        copied = (tmp_path / "out" / path.name).read_bytes()
        assert copied[: path.stat().st_size] == path.read_bytes()


def test_a_known_push_stores_nothing(tmp_path: Path) -> None:
    make_snapshot(tmp_path / "snapshot", 32 << 20)
    new, known = (bench_push.push_once(tmp_path / "store", tmp_path / "snapshot") for _ in range(2))
    assert new.counts.new_bytes > 32_000_000
    assert known.counts.new_bytes == 0
