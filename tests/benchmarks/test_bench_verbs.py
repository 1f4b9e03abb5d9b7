"""The benchmark of verbs at a tiny size: each does what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_verbs import PEER, VERBS, compare, timed
from benchmarks.report import Report, Samples, machine

SIZE_BYTES = 8 << 20


def test_every_verb_has_its_costs_and_says_what_it_moved(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path, SIZE_BYTES, 1, report)
    rows = {row.case: row.values for row in report.rows}
    assert list(rows) == [*(verb.name for verb in VERBS), PEER.name]
    for values in rows.values():
        cpu = values["cpu_s_per_gb"]
        assert isinstance(cpu, Samples)
        assert cpu.median > 0
    moved = {case: values["moved_mb"] for case, values in rows.items() if "moved_mb" in values}
    size_mb = SIZE_BYTES / 1e6
    for case in ("push, new data", "pull", "verify", "cp to another store", "prefetch, cold"):
        assert moved[case] == pytest.approx(size_mb, rel=0.1), case
    assert moved["push, known data"] == moved["prefetch, warm"] == 0
    snapshot, back = tmp_path / "snapshot", tmp_path / "back"
    for path in snapshot.iterdir():
        assert (back / path.name).read_bytes() == path.read_bytes()
    assert rows["pull"]["peak_rss_mb"] > 20  # type: ignore[operator]


def test_a_verb_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no luck"):
        timed(["sh", "-c", "echo no luck >&2; exit 3"], tmp_path)
