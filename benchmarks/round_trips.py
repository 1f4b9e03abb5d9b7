"""How many requests verbs make of a bucket for a small snapshot, and how many of them at a time.

What goes one after the other takes a round trip each, whatever the bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import snapcask
from benchmarks.report import Report
from benchmarks.snapshots import make_snapshot
from transfer.testing.fault_server import FaultServer

SNAPSHOT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Requests:
    """Those of one verb, by method, and the most that were under way together."""

    by_method: dict[str, int]
    most_in_flight: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_method.values())


def count_requests(folder: Path) -> dict[str, Requests]:
    """Push a snapshot twice and pull it, by verb."""
    snapshot = make_snapshot(folder / "snapshot", SNAPSHOT_BYTES)
    with FaultServer() as server:
        store = f"s3://bucket/x?endpoint={server.endpoint}&region=us-east-1&sign=no"
        snapcask.init_store(store)
        verbs: dict[str, Callable[[], object]] = {
            "push, new data": lambda: snapcask.push(snapshot, "bench:x", store=store),
            "push, known data": lambda: snapcask.push(snapshot, "bench:y", store=store),
            "pull": lambda: snapcask.pull("bench:x", folder / "back", store=store),
        }
        found = {}
        for name, verb in verbs.items():
            n_before = len(server.seen)
            verb()
            seen = server.seen[n_before:]
            by_method = Counter(one.request.method for one in seen)
            found[name] = Requests(dict(by_method), max(one.in_flight for one in seen))
    return found


def add_requests(folder: Path, report: Report) -> None:
    """A row for each verb."""
    folder.mkdir()
    for name, requests in count_requests(folder).items():
        report.add(
            f"requests: {name}, {SNAPSHOT_BYTES >> 20} MiB",
            n_requests=requests.total,
            most_in_flight=requests.most_in_flight,
        )
