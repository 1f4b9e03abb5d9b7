"""The comparison with peers at a tiny size."""

from pathlib import Path

import pytest

from benchmarks.bench_peers import PEERS, compare, make_inputs, run_command
from benchmarks.report import Report, machine
from benchmarks.snapshots import total_bytes

SIZE_BYTES = 16 * 1024 * 1024


def test_every_installed_peer_stores_both_snapshots(tmp_path: Path) -> None:
    snapshots = make_inputs(tmp_path, SIZE_BYTES)
    report = Report("tiny", machine(tmp_path))
    found = compare(tmp_path, snapshots, 1, report)
    assert set(found) == {peer.name for peer in PEERS if peer.is_installed}
    assert {"snapcask", "cp"} <= set(found)
    for nothing, first, second in found.values():
        assert all(min(push.cost.cpu_s.values) > 0 for push in (nothing, first, second))
        assert nothing.stored_bytes < 200_000
        assert first.stored_bytes >= SIZE_BYTES
    assert found["snapcask"][2].stored_bytes < 0.75 * SIZE_BYTES
    assert found["cp"][2].stored_bytes == total_bytes(snapshots[1])
    limits = [row.values["stored_mb"] for row in report.rows[-2:]]
    assert limits == [total_bytes(snapshot) / 1e6 for snapshot in snapshots]
    assert not (tmp_path / "repository").exists()


def test_a_peer_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = make_inputs(tmp_path, 1024 * 1024)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("benchmarks.bench_peers.PEERS", PEERS[1:])
    report = Report("tiny", machine(tmp_path))
    assert compare(tmp_path, snapshots, 1, report) == {}
    missing = {row.case for row in report.rows if row.values.get("note") == "not installed"}
    assert missing == {peer.name for peer in PEERS[1:]}


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3: no luck"):
        run_command(["sh", "-c", "echo no luck >&2; exit 3"], tmp_path)
