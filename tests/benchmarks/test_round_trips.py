"""A small push and pull make few requests: each may cost a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("aiobotocore")

from benchmarks.report import Report, machine
from benchmarks.round_trips import add_requests, count_requests

MOST = {"push, new data": 29, "push, known data": 23, "pull": 8}
"""Two more than now, at most."""


@pytest.mark.s3
def test_verbs_make_no_more_requests_than_they_did(tmp_path: Path) -> None:
    found = count_requests(tmp_path)
    assert set(found) == set(MOST)
    for name, requests in found.items():
        assert requests.total <= MOST[name], requests
    assert found["pull"].by_method == {"GET": found["pull"].total}
    assert found["push, new data"].by_method["PUT"] >= 5


@pytest.mark.s3
def test_each_verb_has_a_row(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    add_requests(tmp_path / "it", report)
    assert [row.case for row in report.rows] == [f"requests: {name}, 8 MiB" for name in MOST]
    for row in report.rows:
        n_requests = row.values["n_requests"]
        assert isinstance(n_requests, int)
        assert 1 <= int(str(row.values["most_in_flight"])) <= n_requests
