"""What is found again among live processes: replicas, another order, a fine-tune, other models.

Real inference-like processes (`benchmarks/replica.py`) are started and captured one after the
other, as dumps of CRIU are laid out, and compared in that order: page-CDC at three averages, fixed
sizes, FastCDC (PyPI, at byte offsets: its chunks lie on no page boundaries, so they can be neither
shared by reflink nor read with O_DIRECT), and single pages, the bound of all that cut at pages.
With `--peers`, also what restic, borg and casync store of the same captures, and snapcask with all
its metadata. With `--synthetic-gib N`, snapshots of N GiB with the statistics of those of GPU
servers (`benchmarks/gpu_like.py`) instead: no disk holds them, and memory does not grow with them.
Directories of your own: `snapcask bench DIR...`. Run: `make bench BENCH=dedup`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.bench_advice import replica
from benchmarks.bench_peers import PEERS, measure_peer
from benchmarks.frame import options_of, reporting
from benchmarks.gpu_like import GpuLike, Kind
from benchmarks.report import HERE, Report
from restore.capture import capture_process
from transfer.dedup import PAGE, DirectoryFound, ReadInto, Sample, Study, regular_files

FASTCDC = "FastCDC, 256 KiB"
FASTCDC_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024)
"""Least, average and most of a chunk: those of page-CDC."""

DEDUPLICATING = ("snapcask", "restic", "borg", "casync")
"""Of the peers that `bench_peers` knows."""


@dataclass(frozen=True, slots=True)
class Server:
    """A process to capture. `size` multiplies its weights; of 16 layers, some are fine-tuned."""

    name: str
    model: int = 1
    order: int = 0
    changed_layers: int = 0
    size: float = 1.0


SERVERS = (
    Server("first"),
    Server("replica"),
    Server("other order", order=1),
    Server("fine-tune, 4 of 16 layers", changed_layers=4),
    Server("replica 2", order=2),
    Server("replica 3", order=3),
    Server("twice the size", model=3, size=2.0),
    Server("its replica", model=3, size=2.0, order=1),
    Server("another model", model=2),
    Server("its replica, too", model=2, order=1),
)


class FastCdc:
    """New bytes by FastCDC, snapshot after snapshot, a window at a time.

    Digests are counted as in `transfer.dedup`: from half a million on as an estimate.
    """

    def __init__(self, window_bytes: int = 64 << 20) -> None:
        self._sample = Sample()
        self._window_bytes = window_bytes

    def add(self, directory: Path) -> int:
        """New bytes; pieces that are all zero count as none, as everywhere here."""
        new_bytes = 0
        for path in regular_files(directory):
            with path.open("rb") as file:
                size_bytes = path.stat().st_size
                new_bytes += self.add_content(size_bytes, partial(_read_at, file.fileno()))
        return new_bytes

    def add_content(self, size_bytes: int, read_into: ReadInto) -> int:
        """New bytes of one file. The last chunk in a window may go on, so the next begins there."""
        from fastcdc import fastcdc

        new_bytes = start = 0
        while start < size_bytes:
            page_start = start - start % PAGE
            buffer = memoryview(bytearray(min(self._window_bytes, size_bytes - page_start)))
            read_into(buffer, page_start)
            window = buffer[start - page_start :]
            cuts = list(fastcdc(window, *FASTCDC_BYTES))
            if start + len(window) < size_bytes:
                cuts.pop()
            for cut in cuts:
                chunk = window[cut.offset : cut.offset + cut.length]
                if any_data(chunk):
                    new_bytes += self._sample.weight(blake3(chunk).digest()) * len(chunk)
            start += cuts[-1].offset + cuts[-1].length
        return new_bytes


def any_data(chunk: memoryview) -> bool:
    """Whether a byte of it is not zero."""
    return bool(np.frombuffer(chunk, np.uint8).any())


def _read_at(descriptor: int, target: memoryview, position: int) -> None:
    if os.preadv(descriptor, [target], position) != len(target):
        raise OSError(f"a file became shorter than {position + len(target)} bytes")


def capture(server: Server, folder: Path, weights_mb: float) -> Path:
    """Start a server, capture it once it is ready, end it."""
    name = server.name.replace(" ", "-").replace(",", "")
    ready, target = folder / f"{name}.ready", folder / name
    command = [sys.executable, str(HERE / "replica.py"), "--model-seed", str(server.model)]
    command += ["--order-seed", str(server.order), "--weights-mb", str(weights_mb * server.size)]
    command += ["--changed-layers", str(server.changed_layers), "--ready-file", str(ready)]
    with replica(command, ready, hash_seed=False) as pid:
        capture_process(pid, target)
    return target


class Additions:
    """What snapshots add one after the other, by way of cutting."""

    def __init__(self, report: Report) -> None:
        self.new_bytes: dict[str, list[int]] = {}
        self._servers: list[Server] = []
        self._study, self._fast = Study(), FastCdc() if find_spec("fastcdc") else None
        self._report = report

    def add_captured(self, server: Server, directory: Path) -> None:
        """A directory that was captured."""
        fast = self._fast.add(directory) if self._fast else None
        self._note(server, self._study.add(directory), fast)

    def add_synthetic(self, server: Server, snapshot: GpuLike) -> None:
        """One that is nowhere."""
        found = self._study.nothing_found()
        self._study.add_content(snapshot.size_bytes, snapshot.read_into, found)
        fast = self._fast
        cut = fast.add_content(snapshot.size_bytes, snapshot.read_into) if fast else None
        self._note(server, found, cut)

    def _note(self, server: Server, found: DirectoryFound, fast_bytes: int | None) -> None:
        self._servers.append(server)
        by_way = {name: of_way.new_bytes for name, of_way in found.by_way.items()}
        for name, new_bytes in (
            by_way | ({} if fast_bytes is None else {FASTCDC: fast_bytes})
        ).items():
            self.new_bytes.setdefault(name, []).append(new_bytes)
        captured_mb, zero_mb = found.logical_bytes / 1e6, found.zero_bytes / 1e6
        self._report.add(f"captured: {server.name}", captured_mb=captured_mb, zero_mb=zero_mb)

    def add_rows(self) -> None:
        """A row for each way and snapshot, and one for each way."""
        for name, by_server in self.new_bytes.items():
            for server, new_bytes in zip(self._servers, by_server, strict=True):
                self._report.add(f"{name}: {server.name}", new_mb=new_bytes / 1e6)
            self._report.add(f"{name}: all", new_mb=sum(by_server) / 1e6)
        if self._fast is None:
            self._report.add(FASTCDC, note="not installed: pip install fastcdc")


def measure(
    servers: Sequence[Server], folder: Path, weights_mb: float, report: Report, *, peers: bool
) -> dict[str, list[int]]:
    """Add what each capture adds, in order; returns new bytes by way of cutting."""
    additions, captured = Additions(report), []
    for server in servers:
        captured.append(capture(server, folder, weights_mb))
        additions.add_captured(server, captured[-1])
    additions.add_rows()
    if peers:
        add_peers(servers, captured, folder, report)
    return additions.new_bytes


def add_peers(
    servers: Sequence[Server], captured: Sequence[Path], folder: Path, report: Report
) -> None:
    """What programs that deduplicate store of the same directories, in the same order."""
    (folder / "peers").mkdir()
    for peer in (peer for peer in PEERS if peer.name in DEDUPLICATING):
        if not peer.is_installed:
            report.add(f"{peer.name}, stored", note="not installed")
            continue
        pushes = measure_peer(peer, folder / "peers", captured, rounds=1).pushes
        for server, push in zip(servers, pushes, strict=True):
            report.add(f"{peer.name}, stored: {server.name}", new_mb=push.stored_bytes / 1e6)
        total_bytes = sum(push.stored_bytes for push in pushes)
        report.add(f"{peer.name}, stored: all", new_mb=total_bytes / 1e6)


def measure_synthetic(
    servers: Sequence[Server], size_bytes: int, report: Report
) -> dict[str, list[int]]:
    """The same of snapshots that are made while they are cut."""
    additions = Additions(report)
    for number, server in enumerate(servers):
        kind = Kind(
            int(size_bytes * server.size), server.model, server.order, number,
            server.changed_layers,
        )  # fmt: skip
        additions.add_synthetic(server, GpuLike(kind))
    additions.add_rows()
    return additions.new_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = options_of(__doc__)
    parser.add_argument("--weights-mb", type=float, default=100, help="of a server, 10^6 bytes")
    parser.add_argument("--servers", type=int, default=len(SERVERS), help="only so many of them")
    parser.add_argument("--peers", action="store_true", help="what restic, borg and casync store")
    parser.add_argument(
        "--synthetic-gib", type=float, metavar="N", help="snapshots of so many 2^30 bytes instead"
    )
    options = parser.parse_args(arguments)
    servers = SERVERS[: options.servers]
    if options.synthetic_gib is not None:
        with reporting("bench_dedup_synthetic", options.folder) as (folder, report):
            measure_synthetic(servers, int(options.synthetic_gib * (1 << 30)), report)
    else:
        with reporting("bench_dedup", options.folder) as (folder, report):
            measure(servers, folder, options.weights_mb, report, peers=options.peers)


if __name__ == "__main__":
    main()
