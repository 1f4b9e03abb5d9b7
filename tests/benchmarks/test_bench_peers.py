"""The comparison with peers at a tiny size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_peers import PEERS, Peer, compare, make_inputs, measure_peer
from benchmarks.report import Report, machine
from benchmarks.snapshots import total_bytes

SIZE_BYTES = 16 * 1024 * 1024


@pytest.mark.timeout(300)  # up to thirty processes
def test_every_installed_peer_stores_both_snapshots(tmp_path: Path) -> None:
    snapshots = make_inputs(tmp_path, SIZE_BYTES)
    report = Report("tiny", machine(tmp_path))
    found = compare(tmp_path, snapshots, 1, report)
    assert set(found) == {peer.name for peer in PEERS if peer.is_installed}
    assert {"snapcask", "cp"} <= set(found)
    for measured in found.values():
        nothing, first, second = measured.pushes
        runs = [run for push in (nothing, first, second) for run in push.runs] + measured.pulls
        assert len(runs) == 4
        assert all(run.cpu_s > 0 for run in runs)
        assert nothing.stored_bytes < 200_000
        assert first.stored_bytes >= SIZE_BYTES
    assert found["snapcask"].pushes[2].stored_bytes < 0.75 * SIZE_BYTES
    assert found["cp"].pushes[2].stored_bytes == total_bytes(snapshots[1])
    limits = [row.values["stored_mb"] for row in report.rows[-2:]]
    assert limits == [total_bytes(snapshot) / 1e6 for snapshot in snapshots]
    versions = {row.case: row.values["note"] for row in report.rows if ": version" in row.case}
    assert set(versions) == {f"{name}: version" for name in found}
    assert all(versions.values())
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_what_a_peer_brings_back_is_what_was_pushed(peer: Peer, tmp_path: Path) -> None:
    if not peer.is_installed:
        pytest.skip(f"{peer.program} is not installed")
    first, second = make_inputs(tmp_path, 1024 * 1024)
    measure_peer(peer, tmp_path, [first, second], 1, pulls=True)
    back = {path.name: path for path in (tmp_path / "pulled").rglob("*.img")}
    assert set(back) == {path.name for path in second.iterdir()}
    for path in second.iterdir():
        assert back[path.name].read_bytes() == path.read_bytes()


def test_a_peer_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = make_inputs(tmp_path, 1024 * 1024)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("benchmarks.bench_peers.PEERS", PEERS[1:])
    report = Report("tiny", machine(tmp_path))
    assert compare(tmp_path, snapshots, 1, report) == {}
    missing = {row.case for row in report.rows if row.values.get("note") == "not installed"}
    assert missing == {peer.name for peer in PEERS[1:]}
