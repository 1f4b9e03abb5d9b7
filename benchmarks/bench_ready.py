"""Where the seconds go until a server's weights are loaded from a snapshot on a node.

A start is a few processes, as an operator runs them: `prefetch` into the node cache, `mount`, and
`load` of the safetensors files to a device: a GPU, or host memory where there is none. Rows differ
in what the node has: nothing, the tree on its disk, or the tree in its page cache too. Beside it:
no node cache (`load` from the bucket, which fetches while it loads), and `s5cmd cp` with the same
load, which checks nothing.

Phases sum to the total. `startup_s` is that of the processes (Python, modules); a mount's is in
`mount_s`. `fetch_s` is fetching, verifying and writing, which overlap; `memory_s` is getting and
page-locking memory. Proof of the state is what came from the bucket, and what `load` read from a
disk: a start that was not as its name says is an error.

Starts SeaweedFS on this machine; its files are in the page cache. Needs root, for mounts.
Run: `make bench BENCH=ready`; `--link 20:1000` puts a slow link before the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.bench_cache import drop
from benchmarks.bench_link import parsed_link, store_url
from benchmarks.bench_s3 import environment, snapcask
from benchmarks.bucket import bucket_server
from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.models import write_model
from benchmarks.report import Report, Samples
from benchmarks.s3_clients import Place, clients
from benchmarks.slow_link import Link, slow_link
from benchmarks.snapshots import make_process_like
from benchmarks.timed import SNAPCASK, Run, timed
from tests.transfer.s3 import servers
from transfer.mounts import unmount

WEIGHTS_SHARE = 0.75
"""Of the snapshot; the rest are pages as of a process, 41 % of them zero."""

STORE = "ready"
TENSOR_BYTES = 4 << 20
FEW = 0.05
"""Of the weights may come from disk in a start that has them in the page cache."""

PHASES = ("startup_s", "resolve_s", "fetch_s", "mount_s", "memory_s", "load_s")
OF_PREFETCH = {"resolve": "resolve_s", "wait": "fetch_s", "fill": "fetch_s", "settle": "fetch_s"}
OF_LOAD = {
    "headers": "resolve_s", "open": "resolve_s", "plan": "resolve_s", "resolve": "resolve_s",
    "load": "load_s", "verify": "load_s",
}  # fmt: skip
"""Phases that a verb tells; others of `load` (memory, page-locking) are `memory_s`."""


@dataclass(slots=True)
class Start:
    """One start as it is measured: seconds by phase, and where the bytes came from."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    fetched_bytes: int = 0  # from the bucket
    disk_bytes: int = 0  # that the load read from a disk
    loaded_bytes: int = 0

    @property
    def total_s(self) -> float:
        """Of all processes."""
        return sum(self.seconds.values())

    def add(self, run: Run, said_s: dict[str, float], phases: dict[str, str], other: str) -> None:
        """Divide a process's time by what it said; what it did not account for is start-up."""
        for name, seconds in said_s.items():
            if name != "total":
                self.seconds[phases.get(name, other)] += seconds
        told_s = sum(seconds for name, seconds in said_s.items() if name != "total")
        self.seconds["startup_s"] += run.wall_s - told_s


def device() -> str:
    """Where weights are loaded to."""
    return "cuda:0" if find_spec("cuda") and Path("/dev/nvidiactl").exists() else "cpu"


class Node:
    """A node with a cache, and a bucket that has the snapshot."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.cache = folder / "cache"
        self.mounted = folder / "mounted"
        self.copied = folder / "copied"
        self.mounted.mkdir()
        self._environment = environment() | {
            "SNAPCASK_STORE": store_url(endpoint, STORE),
            "SNAPCASK_CACHE": str(self.cache),
            "SNAPCASK_ALLOW_ROOT_FILESYSTEM": "1",
        }

    def forget(self) -> None:
        """The node has nothing."""
        for path in (self.cache, self.copied):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()

    def keep_on_disk(self) -> None:
        """The node has the tree in its cache, and nothing of it in memory."""
        self._keep()
        drop(self.cache)

    def keep_in_memory(self) -> None:
        """The node has the tree in its cache, and all of it in the page cache."""
        self._keep()
        subprocess.run(["cat", *self._weights(self.cache)], check=True, stdout=subprocess.DEVNULL)

    def _keep(self) -> None:
        if not self.cache.exists():
            self._run("prefetch", "bench:x")

    def start(self, *prefetch: str) -> Start:
        """Prefetch, mount, load."""
        start = Start()
        run, said = self._run("prefetch", "bench:x", *prefetch)
        start.fetched_bytes = said["fetched_bytes"]
        start.add(run, said["seconds"], OF_PREFETCH, "fetch_s")
        run, _ = self._run("mount", said["digest"], str(self.mounted))
        try:
            start.seconds["mount_s"] = run.wall_s
            self._load(start, str(self.mounted))
        finally:
            unmount(str(self.mounted))  # without the start-up of a process
        return start

    def load_from_bucket(self) -> Start:
        """Load what the bucket has, and keep nothing."""
        start = Start()
        said = self._load(start, "bench:x", "--no-cache")
        start.fetched_bytes = said["read_bytes"]
        return start

    def copy_and_load(self) -> Start:
        """`s5cmd cp`, then the same load of the copy; no snapshot has to do with it."""
        self.copied.mkdir()
        start, s5cmd = Start(), clients()[0]
        place = Place(self.endpoint, servers.BUCKET, f"{STORE}-plain/", str(self.copied))
        command = ["sh", "-c", '"$@" && sync -f "$0"', str(self.copied), *s5cmd.get(place)]
        run = timed(command, self.folder, self._environment)
        start.seconds["fetch_s"] = run.wall_s
        start.fetched_bytes = sum(path.stat().st_size for path in self.copied.iterdir())
        self._load(start, str(self.copied))
        return start

    def _load(self, start: Start, *words: str) -> dict[str, Any]:
        run, said = self._run("load", *words, "--device", device())
        start.add(run, said["seconds"], OF_LOAD, "memory_s")
        start.disk_bytes, start.loaded_bytes = run.read_bytes, said["loaded_bytes"]
        return said

    def _run(self, *words: str) -> tuple[Run, dict[str, Any]]:
        command = [*SNAPCASK, *words, "--json", "--quiet"]
        run = timed(command, self.folder, self._environment)
        return run, json.loads(run.said)

    def _weights(self, folder: Path) -> list[str]:
        return [str(path) for path in folder.rglob("*.safetensors")]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to start: what the node has before it, and what must then be true of the start."""

    key: str
    name: str
    before: Callable[[Node], None]
    start: Callable[[Node], Start]
    fetches: bool
    reads_disk: bool | None  # None: either way


WAYS = (
    Way("cold", "nothing on the node", Node.forget, Node.start, True, True),
    Way(
        "buffered", "nothing on the node, prefetch --buffered",
        Node.forget, lambda node: node.start("--buffered"), True, False,
    ),
    Way("disk", "tree on the disk", Node.keep_on_disk, Node.start, False, True),
    Way("memory", "tree in memory", Node.keep_in_memory, Node.start, False, False),
    Way(
        "bucket", "no node cache: load from the bucket",
        Node.forget, Node.load_from_bucket, True, None,
    ),
    Way("s5cmd", "s5cmd cp, then load", Node.forget, Node.copy_and_load, True, None),
)  # fmt: skip
KEYS = tuple(way.key for way in WAYS)


def check(way: Way, start: Start) -> None:
    """Raises RuntimeError if the bytes did not come from where the way says."""
    fetched, loaded = start.fetched_bytes, start.loaded_bytes
    wrong = ""
    if not loaded:
        wrong = "loaded nothing"
    elif way.fetches and fetched < loaded:
        wrong = f"fetched {fetched} bytes for {loaded}"
    elif not way.fetches and fetched:
        wrong = f"fetched {fetched} bytes, which the node should have had"
    elif way.reads_disk and start.disk_bytes < (1 - FEW) * loaded:
        wrong = f"read {start.disk_bytes} bytes from disk for {loaded}"
    elif way.reads_disk is False and start.disk_bytes > FEW * loaded:
        wrong = f"read {start.disk_bytes} bytes from disk, which should have been in memory"
    if wrong:
        raise RuntimeError(f"{way.name}: {wrong}")


@contextlib.contextmanager
def a_node(folder: Path, size_bytes: int, link: Link | None) -> Iterator[Node]:
    """Make a snapshot, put it in a bucket, as a store and as plain objects, and give it a node."""
    snapshot = folder / "snapshot"
    weights_bytes = int(size_bytes * WEIGHTS_SHARE)
    make_process_like(snapshot, size_bytes - weights_bytes)
    write_model(snapshot, weights_bytes, tensor_bytes=TENSOR_BYTES)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(bucket_server(folder / "server"))
        store = store_url(server.endpoint, STORE)
        snapcask("init", store, "--codec", "raw", "-q")
        snapcask("push", str(snapshot), "bench:x", "--store", store, "-q")
        for path in snapshot.iterdir():
            server.client().upload_file(str(path), servers.BUCKET, f"{STORE}-plain/{path.name}")
        shutil.rmtree(snapshot)
        endpoint = server.endpoint
        if link is not None:
            port = int(endpoint.rpartition(":")[2])
            endpoint = stack.enter_context(slow_link(port, link, folder)).endpoint
        yield Node(folder, endpoint)


def compare(
    folder: Path,
    size_bytes: int,
    link: Link | None,
    rounds: int,
    report: Report,
    keys: Sequence[str] = KEYS,
) -> None:
    """Start in every way, `rounds` times, and add a row for each: the start of median length."""
    lacking = {"s5cmd": clients()[0].lacks}
    ways = [way for way in WAYS if way.key in keys and not lacking.get(way.key)]
    found: dict[str, list[Start]] = {way.name: [] for way in ways}
    with a_node(folder, size_bytes, link) as node:
        for _ in range(rounds):
            for way in ways:
                way.before(node)
                start = way.start(node)
                check(way, start)
                found[way.name].append(start)
    for name, starts in found.items():
        add_row(name, starts, report)
    for way in WAYS:
        if why := lacking.get(way.key):
            report.add(way.name, note=why)
    if link is not None:
        report.add(f"limit: link of {link}", gb_s=link.bytes_per_s / 1e9)


def add_row(name: str, starts: Sequence[Start], report: Report) -> None:
    """The start of median length, whose phases sum to its total, and the totals of all."""
    middle = sorted(starts, key=lambda start: start.total_s)[(len(starts) - 1) // 2]
    report.add(
        name,
        **middle.seconds,
        total_s=middle.total_s,
        all_totals_s=Samples(tuple(start.total_s for start in starts)),
        fetched_mb=middle.fetched_bytes / 1e6,
        from_disk_mb=middle.disk_bytes / 1e6,
        loaded_mb=middle.loaded_bytes / 1e6,
        device=device(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = options_of(__doc__, gb=2.0, rounds=3)
    parser.add_argument("--link", type=parsed_link, metavar="MS:MBIT", help="a link to the bucket")
    parser.add_argument("--ways", nargs="+", default=KEYS, choices=KEYS, help="only these starts")
    options = parser.parse_args(arguments)
    if servers.tool("weed") is None:
        sys.exit("weed is not installed; `make venv` brings it")
    with reporting("bench_ready", options.folder, limits=True) as (folder, report):
        size_bytes = gigabytes(options)
        compare(folder, size_bytes, options.link, options.rounds, report, options.ways)


if __name__ == "__main__":
    main()
