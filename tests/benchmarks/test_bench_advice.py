"""The measured advice, on tiny processes: a KV cache in use costs its size."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.bench_advice import SETTINGS, Setting, compare
from benchmarks.report import Report, machine

WEIGHTS_MB = 4
KV_MB = 8


@pytest.mark.skipif(not shutil.which("setarch"), reason="needs setarch")
def test_releasing_kv_memory_saves_what_it_takes(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    settings = [setting for setting in SETTINGS if setting.kv]
    found = compare(settings, tmp_path, WEIGHTS_MB, KV_MB, report)
    kept, zeroed, released = (found[setting.name] for setting in settings)
    for number in range(2):
        saved = kept[number].bound_bytes - zeroed[number].bound_bytes  # chunks vary more
        assert saved > 0.7 * KV_MB * 1e6
        assert kept[number].captured_bytes == pytest.approx(zeroed[number].captured_bytes, rel=0.1)
    assert kept[1].captured_bytes - released[1].captured_bytes > 0.9 * KV_MB * 1e6
    assert len(report.rows) == 3


def test_a_second_replica_shares_its_weights(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    ((first, second),) = compare([Setting("plain")], tmp_path, 20, 0, report).values()
    assert first.new_bytes > 20e6
    assert second.bound_bytes <= second.new_bytes < first.new_bytes
    assert second.bound_bytes < first.bound_bytes - 10e6
    assert not list(tmp_path.iterdir())
