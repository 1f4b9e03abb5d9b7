"""The dedup benchmark on tiny live processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_dedup import FASTCDC, SERVERS, FastCdc, Server, measure
from benchmarks.report import Report, machine
from transfer.dedup import BOUND, PAGE_CDC, WAYS

WEIGHTS_MB = 24


def test_weights_are_found_again_in_any_order_and_fine_tunes_add_their_layers(
    tmp_path: Path,
) -> None:
    report = Report("tiny", machine(tmp_path))
    found = measure(SERVERS[:4], tmp_path, WEIGHTS_MB, report)
    assert set(found) >= {way.name for way in WAYS}
    first, replica, reordered, tuned = found[BOUND.name]
    assert first > WEIGHTS_MB * 1e6
    assert replica < first - 0.9 * WEIGHTS_MB * 1e6
    assert reordered < first - 0.9 * WEIGHTS_MB * 1e6
    assert tuned - replica == pytest.approx(WEIGHTS_MB * 1e6 * 4 / 16, rel=0.5)
    ours = found[PAGE_CDC.name]
    assert all(bound <= new for bound, new in zip(found[BOUND.name], ours, strict=True))
    assert sum(ours) < sum(found["fixed 1 MiB"])
    assert [row.case for row in report.rows][:2] == ["captured: first", "captured: replica"]


def test_servers_are_told_apart() -> None:
    assert len({server.name for server in SERVERS}) == len(SERVERS)
    assert Server("a") != Server("a", order=1)


def test_fastcdc_finds_what_moved_by_bytes(tmp_path: Path) -> None:
    pytest.importorskip("fastcdc", reason=f"{FASTCDC} is a peer that may be missing")
    data = np.random.default_rng(5).bytes(8 << 20)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "pages").write_bytes(data)
    (tmp_path / "b" / "pages").write_bytes(b"moved" + data + bytes(4 << 20))
    fast = FastCdc()
    assert fast.add(tmp_path / "a")[0] == len(data)
    assert fast.add(tmp_path / "b")[0] < 3 << 20
