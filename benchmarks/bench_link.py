"""Pull and push over links to an S3 server, beside other clients and what the link can do.

Starts SeaweedFS and, before it, a link with latency and bandwidth (`benchmarks/slow_link.py` says
what it does as a network does, and what not), or none ("direct"). Each client is a process,
start-up included, ends with all on disk, and moves the same bytes; snapcask checks every chunk.
`of_limit` is the share of the link's bandwidth that was used: bytes over bandwidth times wall.
The last rows count the requests of a small push and pull; what goes one after the other takes a
round trip each. `aws s3 cp` takes part where it is installed. Run: `make bench BENCH=link`.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.bench_s3 import environment, snapcask
from benchmarks.bucket import bucket_server
from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import Report, Samples, Value
from benchmarks.round_trips import add_requests
from benchmarks.s3_clients import Client, Place, clients
from benchmarks.slow_link import Link, Passed, RunningLink, slow_link
from benchmarks.snapshots import make_snapshot, total_bytes
from benchmarks.timed import SNAPCASK, Run, timed
from tests.transfer.s3 import servers

DIRECT = "direct"
LINKS = (DIRECT, "20:1000", "100:1000")
OURS = "snapcask"
N_RAW = 16
"""Connections that show what the link can do."""

VERBS = ("pull", "push")


@dataclass(frozen=True, slots=True)
class Moved:
    """One process, and what it moved over the link if there is one."""

    run: Run
    passed: Passed | None


def parsed_link(text: str) -> Link | None:
    """A link as "MILLISECONDS:MBIT_PER_SECOND"; none for "direct"."""
    if text == DIRECT:
        return None
    milliseconds, mbit = map(float, text.split(":"))
    return Link(milliseconds / 1000, mbit * 1e6)


def store_url(endpoint: str, name: str) -> str:
    """A store of ours behind that endpoint."""
    return f"s3://{servers.BUCKET}/{name}?endpoint={endpoint}"


class Bench:
    """A server that has a snapshot, as a store and as plain objects, and a link before it."""

    def __init__(self, folder: Path, server: servers.Server, link: RunningLink | None) -> None:
        self.folder = folder
        self.snapshot = folder / "snapshot"
        self._server = server
        self._link = link
        self._endpoint = server.endpoint if link is None else link.endpoint
        self._n_places = 0

    def fill(self) -> None:
        """Put the snapshot on the server, not over the link."""
        store = store_url(self._server.endpoint, "pulled")
        snapcask("init", store, "--codec", "raw", "-q")
        snapcask("push", str(self.snapshot), "bench:x", "--store", store, "-q")
        client = self._server.client()
        for path in self.snapshot.iterdir():
            client.upload_file(str(path), servers.BUCKET, f"plain/{path.name}")

    def pull(self, client: Client | None) -> Moved:
        """Bring everything to a new directory."""
        target = self.folder / "target"
        shutil.rmtree(target, ignore_errors=True)
        if client is None:
            store = store_url(self._endpoint, "pulled")
            command = [*SNAPCASK, "pull", "bench:x", str(target), "--store", store, "-q"]
            return self._timed(command)
        target.mkdir()
        place = Place(self._endpoint, servers.BUCKET, "plain/", str(target))
        then_sync = ["sh", "-c", '"$@" && sync -f "$0"', str(target)]  # snapcask does by itself
        return self._timed([*then_sync, *client.get(place)])

    def push(self, client: Client | None) -> Moved:
        """Bring the snapshot to where nothing is."""
        self._n_places += 1
        name = f"pushed-{self._n_places}"
        if client is None:
            snapcask("init", store_url(self._server.endpoint, name), "--codec", "raw", "-q")
            store = store_url(self._endpoint, name)
            words = ["push", str(self.snapshot), "bench:x", "--store", store, "-q"]
            return self._timed([*SNAPCASK, *words])
        place = Place(self._endpoint, servers.BUCKET, f"{name}/", str(self.snapshot))
        return self._timed(client.put(place))

    def _timed(self, command: Sequence[str]) -> Moved:
        before = self._link.passed() if self._link else None
        run = timed(command, self.folder, environment())
        return Moved(run, self._link.passed().since(before) if self._link and before else None)


@contextlib.contextmanager
def filled(folder: Path, link: Link | None) -> Iterator[Bench]:
    """A server that has the snapshot of the folder, behind the link."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bucket_server(folder / "server"))
        port = int(server.endpoint.rpartition(":")[2])
        running = stack.enter_context(slow_link(port, link, folder)) if link else None
        bench = Bench(folder, server, running)
        bench.fill()
        yield bench


def compare(
    folder: Path,
    link: Link | None,
    size_bytes: int,
    rounds: int,
    chosen: Sequence[str],
    report: Report,
) -> None:
    """Add a row for each client and verb over one link, and the link's own limits."""
    folder.mkdir()
    size_bytes = total_bytes(make_snapshot(folder / "snapshot", size_bytes))
    known = {OURS: None} | {client.name: client for client in clients()}
    others = {name: known[name] for name in chosen}
    usable = {n: c for n, c in others.items() if c is None or not c.lacks}
    found: dict[tuple[str, str], list[Moved]] = {(v, n): [] for v in VERBS for n in usable}
    with filled(folder, link) as bench:
        works: dict[str, Callable[[Client | None], Moved]] = {
            "pull": bench.pull, "push": bench.push,
        }  # fmt: skip
        for _ in range(rounds):
            for verb, name in found:
                found[verb, name].append(works[verb](usable[name]))
    where = DIRECT if link is None else str(link)
    for (verb, name), moved in found.items():
        add_row(f"{where}: {verb}, {name}", moved, size_bytes, link, report)
    for name, client in others.items():
        if client is not None and client.lacks:
            report.add(f"{where}: {name}", note=client.lacks)
    if link is not None:
        report.add(f"{where}: limit: bandwidth", gb_s=link.bytes_per_s / 1e9)
        rate = raw_gb_s(link, size_bytes, folder)
        report.add(f"{where}: limit: {N_RAW} bare connections", gb_s=rate)


def add_row(
    case: str, found: Sequence[Moved], size_bytes: int, link: Link | None, report: Report
) -> None:
    """Medians of one client."""
    wall = Samples(tuple(moved.run.wall_s for moved in found))
    values: dict[str, Value] = {"wall_s": wall, "gb_s": wall.gb_s(size_bytes)}
    if link is not None:
        values["of_limit"] = size_bytes / link.bytes_per_s / wall.median
    cpu = [moved.run.cpu_s * 1e9 / size_bytes for moved in found]
    values["cpu_s_per_gb"] = Samples(tuple(cpu))
    values["peak_rss_mb"] = max(moved.run.peak_bytes for moved in found) / 1e6
    if all_passed := [moved.passed for moved in found if moved.passed]:
        values["received_mb"] = max(passed.received_bytes for passed in all_passed) / 1e6
        values["sent_mb"] = max(passed.sent_bytes for passed in all_passed) / 1e6
    report.add(case, **values)


def raw_gb_s(link: Link, size_bytes: int, folder: Path) -> float:
    """Rate of bare connections that share the link: what its relay can really do here."""
    each = size_bytes // N_RAW + 1
    with _giving(each) as port, slow_link(port, link, folder) as running:
        threads = [threading.Thread(target=_take, args=(running.port,)) for _ in range(N_RAW)]
        begun_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return each * N_RAW / (time.perf_counter() - begun_s) / 1e9


def _take(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        buffer = bytearray(1 << 18)
        while connection.recv_into(buffer):
            pass


@contextlib.contextmanager
def _giving(n_bytes: int) -> Iterator[int]:
    """A server that sends so many bytes on each of N_RAW connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=N_RAW) as listener:

        def give(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.sendall(bytes(n_bytes))

        def accept() -> None:
            for _ in range(N_RAW):
                connection, _ = listener.accept()
                threading.Thread(target=partial(give, connection), daemon=True).start()

        threading.Thread(target=accept, name="giving", daemon=True).start()
        yield listener.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    names = [OURS, *(client.name for client in clients())]
    parser = options_of(__doc__, gb=0.5, rounds=3)
    parser.add_argument(
        "--links", nargs="+", default=LINKS, metavar="MS:MBIT", help=f"({' '.join(LINKS)})"
    )
    parser.add_argument("--clients", nargs="+", default=names, choices=names, metavar="NAME")
    options = parser.parse_args(arguments)
    if servers.tool("weed") is None:
        sys.exit("weed is not installed; `make venv` brings it")
    links = [parsed_link(text) for text in options.links]
    with reporting("bench_link", options.folder, limits=DIRECT in options.links) as (
        folder,
        report,
    ):
        for number, link in enumerate(links):
            place, size_bytes = folder / f"link-{number}", gigabytes(options)
            compare(place, link, size_bytes, options.rounds, options.clients, report)
            shutil.rmtree(place)
        add_requests(folder / "requests", report)


if __name__ == "__main__":
    main()
