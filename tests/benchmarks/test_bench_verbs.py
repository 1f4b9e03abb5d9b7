"""The benchmark of verbs at a tiny size: each does what its name says."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import bench_verbs
from benchmarks.bench_verbs import PEER, VERBS, compare, cut_off_pull
from benchmarks.report import Report, Samples, machine
from benchmarks.snapshots import make_snapshot, total_bytes

SIZE_BYTES = 48 << 20


def test_every_verb_has_its_costs_and_says_what_it_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # mounts need root: the next test
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path, SIZE_BYTES, 1, report)
    rows = {row.case: row.values for row in report.rows}
    assert list(rows) == [*(verb.name for verb in VERBS), PEER.name]
    assert rows.pop("mount, warm") == {"note": "needs root"}
    for values in rows.values():
        cpu = values["cpu_s_per_gb"]
        assert isinstance(cpu, Samples)
        assert cpu.median > 0
    moved = {case: v["moved_mb"] for case, v in rows.items() if "moved_mb" in v}
    moved_mb = {case: v.median for case, v in moved.items() if isinstance(v, Samples)}
    size_mb = SIZE_BYTES / 1e6
    for case in ("push, new data", "pull", "verify", "cp to another store", "prefetch, cold"):
        assert moved_mb[case] == pytest.approx(size_mb, rel=0.1), case
    assert moved_mb["push, known data"] == moved_mb["prefetch, warm"] == 0
    assert moved_mb["resume, after half a pull"] < moved_mb["pull"]
    from_disk = [v for values in rows.values() if isinstance(v := values["from_disk_mb"], float)]
    assert max(from_disk) < size_mb / 10
    snapshot, back = tmp_path / "snapshot", tmp_path / "back"
    for path in snapshot.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()


@pytest.mark.root
def test_a_warm_mount_has_a_time_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look(folder: Path) -> None:
        seen.append((folder / "mounted" / "pages-1.img").exists())
        bench_verbs.unmount(folder)

    by_name = {verb.name: verb for verb in VERBS}
    chosen = [by_name["push, new data"], by_name["prefetch, cold"]]
    chosen.append(replace(by_name["mount, warm"], after=look))
    monkeypatch.setattr(bench_verbs, "VERBS", chosen)
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path, 4 << 20, 1, report)
    rows = {row.case: row.values for row in report.rows}
    assert seen == [True]
    assert not os.path.ismount(tmp_path / "mounted")
    assert set(rows["mount, warm"]) == {"wall_s", "cpu_s", "peak_rss_mb", "from_disk_mb"}


def test_a_pull_that_cannot_be_cut_off_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = make_snapshot(tmp_path / "snapshot", 1 << 20)
    assert total_bytes(snapshot) > 1 << 20
    monkeypatch.setattr(bench_verbs, "SNAPCASK", ("true",))
    with pytest.raises(RuntimeError, match="over before it could be killed"):
        cut_off_pull(tmp_path)
