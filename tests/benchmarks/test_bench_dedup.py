"""The dedup benchmark on tiny live processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_dedup
from benchmarks.bench_dedup import (
    FASTCDC,
    SERVERS,
    FastCdc,
    Server,
    measure,
    measure_synthetic,
)
from benchmarks.bench_peers import PEERS, Peer
from benchmarks.report import Report, machine
from transfer.dedup import BOUND, PAGE_CDC, WAYS

WEIGHTS_MB = 24


def test_weights_are_found_again_in_any_order_and_fine_tunes_add_their_layers(
    tmp_path: Path,
) -> None:
    report = Report("tiny", machine(tmp_path))
    found = measure(SERVERS[:4], tmp_path, WEIGHTS_MB, report, peers=False)
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
    assert fast.add(tmp_path / "a") == len(data)
    assert fast.add(tmp_path / "b") < 3 << 20


@pytest.mark.parametrize("window_bytes", [3 << 20, 4 << 20])
def test_fastcdc_cuts_alike_whatever_the_window(tmp_path: Path, window_bytes: int) -> None:
    pytest.importorskip("fastcdc", reason=f"{FASTCDC} is a peer that may be missing")
    data = np.random.default_rng(6).bytes(9_000_001)
    (tmp_path / "pages").write_bytes(data)
    fast = FastCdc(window_bytes=window_bytes)
    read = partial(_copy, data)
    assert fast.add(tmp_path) == len(data)
    assert FastCdc().add_content(len(data), read) == len(data)
    whole = FastCdc(window_bytes=1 << 30)
    whole._sample = fast._sample
    assert whole.add(tmp_path) == 0


def _copy(data: bytes, target: memoryview, position: int) -> None:
    target[:] = data[position : position + len(target)]


def test_synthetic_replicas_share_weights_and_differ_in_private_pages(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    size_bytes = 96 << 20
    found = measure_synthetic(SERVERS[:5], size_bytes, report)
    first, replica, reordered, tuned, second = found[BOUND.name]
    zero_mb = next(row.values["zero_mb"] for row in report.rows if "zero_mb" in row.values)
    assert isinstance(zero_mb, float)
    assert first == pytest.approx(size_bytes - zero_mb * 1e6, rel=1e-3)
    for new_bytes in (replica, reordered, second):
        assert new_bytes == pytest.approx(0.05 * size_bytes, rel=0.02)
    weights_bytes = first - 2 * 0.05 * size_bytes
    assert tuned - replica == pytest.approx(weights_bytes * 4 / 16, rel=0.02)
    ours, fixed = found[PAGE_CDC.name], found["fixed 1 MiB"]
    assert sum(ours[1:]) < sum(fixed[1:]) / 2
    assert list(tmp_path.iterdir()) == []


def test_stored_bytes_of_peers_stand_beside_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = next(peer for peer in PEERS if peer.name == "snapcask")
    gone = Peer("gone", "no-such-program", [], lambda *_: [], lambda *_: [])
    monkeypatch.setattr(bench_dedup, "PEERS", (ours, gone))
    monkeypatch.setattr(bench_dedup, "DEDUPLICATING", ("snapcask", "gone"))
    report = Report("tiny", machine(tmp_path))
    found = measure(SERVERS[:2], tmp_path, 8, report, peers=True)
    rows = {row.case: row.values for row in report.rows}
    assert rows["gone, stored"] == {"note": "not installed"}
    stored_mb = [rows[f"snapcask, stored: {s.name}"]["new_mb"] for s in SERVERS[:2]]
    for new_bytes, mb in zip(found[PAGE_CDC.name], stored_mb, strict=True):
        assert isinstance(mb, float)
        assert new_bytes / 1e6 < mb < 1.2 * new_bytes / 1e6 + 1
