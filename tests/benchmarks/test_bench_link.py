"""The benchmark of slow links, small: all clients move the same bytes, and all of them arrive."""

from __future__ import annotations

import filecmp
from pathlib import Path

import pytest

pytest.importorskip("boto3")

from benchmarks import bench_link
from benchmarks.bench_link import OURS, VERBS, compare, parsed_link
from benchmarks.bench_s3 import environment
from benchmarks.report import Report, machine
from benchmarks.s3_clients import Client, Place, clients
from benchmarks.slow_link import Link, slow_link
from benchmarks.snapshots import make_snapshot
from benchmarks.timed import timed
from tests.transfer.s3 import servers

SIZE_BYTES = 20 << 20  # parts of more than one size
FAST = Link(rtt_s=0.002, bits_per_s=1e10)

pytestmark = [
    pytest.mark.s3,
    pytest.mark.slow,
    pytest.mark.skipif(servers.tool("weed") is None, reason="weed is not installed"),
]


def test_our_pull_and_push_and_the_limits_have_rows(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path / "it", FAST, SIZE_BYTES, 1, [OURS, "s5cmd"], report)
    rows = {row.case: row.values for row in report.rows}
    assert [case.partition(": ")[2] for case in rows] == [
        *(f"{verb}, {name}" for verb in VERBS for name in (OURS, "s5cmd")),
        "limit: bandwidth",
        "limit: 16 bare connections",
    ]
    size_mb = SIZE_BYTES / 1e6
    for verb, way in (("pull", "received_mb"), ("push", "sent_mb")):
        for name in (OURS, "s5cmd"):
            over_link = rows[f"{FAST}: {verb}, {name}"][way]
            assert over_link == pytest.approx(size_mb, rel=0.05)


def test_without_a_link_only_the_server_limits(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path / "it", None, 1 << 20, 1, [OURS], report)
    assert [row.case for row in report.rows] == ["direct: pull, snapcask", "direct: push, snapcask"]
    for row in report.rows:
        assert set(row.values) == {"wall_s", "gb_s", "cpu_s_per_gb", "peak_rss_mb"}


def test_a_client_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Client("gone", lambda place: [], lambda place: [], "not installed")
    monkeypatch.setattr(bench_link, "clients", lambda: (gone,))
    report = Report("tiny", machine(tmp_path))
    compare(tmp_path / "it", FAST, 1 << 20, 1, ["gone"], report)
    assert report.rows[0].case == f"{FAST}: gone"
    assert report.rows[0].values == {"note": "not installed"}


def test_every_client_brings_all_bytes_there_and_back(tmp_path: Path) -> None:
    usable = [client for client in clients() if not client.lacks]
    if not usable:
        pytest.skip("no client is installed")
    make_snapshot(tmp_path / "snapshot", SIZE_BYTES)
    names = [path.name for path in (tmp_path / "snapshot").iterdir()]
    (tmp_path / "server").mkdir()
    with (
        servers.seaweedfs(tmp_path / "server") as server,
        slow_link(int(server.endpoint.rpartition(":")[2]), FAST, tmp_path) as link,
    ):
        for number, client in enumerate(usable):
            back = tmp_path / f"back-{number}"
            back.mkdir()
            for verb, folder in ((client.put, tmp_path / "snapshot"), (client.get, back)):
                place = Place(link.endpoint, servers.BUCKET, f"{number}/", str(folder))
                timed(verb(place), tmp_path, environment())
            same, wrong, missing = filecmp.cmpfiles(
                tmp_path / "snapshot", back, names, shallow=False
            )
            assert (len(same), wrong, missing) == (len(names), [], []), client.name


def test_a_link_is_read_as_milliseconds_and_megabits() -> None:
    assert parsed_link("20:1000") == Link(rtt_s=0.02, bits_per_s=1e9)
    assert parsed_link("direct") is None
