"""The benchmark of starts, small: phases sum to the total, and bytes come from where it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("boto3")

from benchmarks.bench_ready import OF_PREFETCH, PHASES, WAYS, Start, check, compare
from benchmarks.charts_s3 import PHASES_SHOWN
from benchmarks.report import Report, Samples, filesystem_of, machine
from benchmarks.s3_clients import clients
from benchmarks.slow_link import Link
from benchmarks.timed import Run
from tests.transfer.s3 import servers

SIZE_BYTES = 40 << 20
BY_KEY = {way.key: way for way in WAYS}


@pytest.mark.root
@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(300)  # some thirty processes
@pytest.mark.skipif(servers.tool("weed") is None, reason="weed is not installed")
def test_every_start_is_as_its_name_says_and_its_phases_sum_to_its_total(tmp_path: Path) -> None:
    if filesystem_of(tmp_path).startswith("tmpfs"):
        pytest.skip("nothing of a tmpfs can be out of the page cache")
    report = Report("tiny", machine(tmp_path))
    link = Link(rtt_s=0.001, bits_per_s=1e10)
    compare(tmp_path, SIZE_BYTES, link, 1, report)
    rows = {row.case: row.values for row in report.rows}
    names = [way.name for way in WAYS]
    assert list(rows) == [*names, f"limit: link of {link}"]
    if clients()[0].lacks:
        assert rows[names.pop()] == {"note": clients()[0].lacks}
    for name in names:
        values = rows[name]
        seconds = [value for phase in PHASES if isinstance(value := values[phase], float)]
        assert len(seconds) == len(PHASES)
        assert min(seconds) >= 0
        assert sum(seconds) == pytest.approx(values["total_s"])
        totals = values["all_totals_s"]
        assert isinstance(totals, Samples)
        assert totals.values == (values["total_s"],)
    assert rows["tree on the disk"]["fetched_mb"] == 0
    assert not os.path.ismount(tmp_path / "mounted")


def test_every_phase_is_drawn() -> None:
    assert tuple(PHASES_SHOWN) == PHASES


def test_what_a_process_does_not_account_for_is_its_start_up() -> None:
    start = Start()
    run = Run(wall_s=3.0, cpu_s=1.0, peak_bytes=1, read_bytes=0, said="")
    said_s = {"resolve": 0.5, "fill": 1.0, "settle": 0.25, "total": 1.75}
    start.add(run, said_s, OF_PREFETCH, "memory_s")
    assert start.seconds["startup_s"] == 1.25
    assert start.seconds["resolve_s"] == 0.5
    assert start.seconds["fetch_s"] == 1.25
    assert start.total_s == run.wall_s


@pytest.mark.parametrize(
    ("key", "start", "why"),
    [
        ("cold", Start(fetched_bytes=10, loaded_bytes=100), "fetched 10"),
        ("disk", Start(fetched_bytes=10, loaded_bytes=100), "should have had"),
        ("disk", Start(disk_bytes=50, loaded_bytes=100), "read 50 bytes from disk"),
        ("memory", Start(disk_bytes=50, loaded_bytes=100), "been in memory"),
        ("memory", Start(), "loaded nothing"),
    ],
)
def test_a_start_that_was_not_as_it_says_is_an_error(key: str, start: Start, why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        check(BY_KEY[key], start)


def test_a_start_that_was_as_it_says_is_none() -> None:
    check(BY_KEY["memory"], Start(loaded_bytes=100))
    check(BY_KEY["disk"], Start(loaded_bytes=100, disk_bytes=100))
