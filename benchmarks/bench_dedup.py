"""What is found again among live processes: replicas, another order, a fine-tune, other models.

Real inference-like processes (`benchmarks/replica.py`) are started and captured one after the
other, as dumps of CRIU are laid out, and compared in that order: page-CDC at three averages, fixed
sizes, FastCDC (PyPI, at byte offsets: its chunks lie on no page boundaries, so they can be neither
shared by reflink nor read with O_DIRECT), and single pages, the bound of all that cut at pages.
Directories of your own: `snapcask bench DIR...`. Run: `make bench BENCH=dedup`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from blake3 import blake3

from benchmarks.bench_advice import replica
from benchmarks.report import HERE, Report, machine
from benchmarks.snapshots import files_of
from restore.capture import capture_process
from transfer.dedup import Study

FASTCDC = "FastCDC, 256 KiB"
FASTCDC_BYTES = (64 * 1024, 256 * 1024, 1024 * 1024)
"""Least, average and most of a chunk: those of page-CDC."""


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
    """New bytes by FastCDC, directory after directory."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, directory: Path) -> tuple[int, int]:
        """New bytes and new chunks; pieces that are all zero count as none, as everywhere here."""
        from fastcdc import fastcdc

        new_bytes = n_new = 0
        for data in files_of(directory):
            for cut in fastcdc(data, *FASTCDC_BYTES):
                chunk = data[cut.offset : cut.offset + cut.length]
                digest = blake3(chunk).digest()
                if digest not in self._seen and chunk != bytes(len(chunk)):
                    self._seen.add(digest)
                    new_bytes, n_new = new_bytes + len(chunk), n_new + 1
        return new_bytes, n_new


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


def measure(
    servers: Sequence[Server], folder: Path, weights_mb: float, report: Report
) -> dict[str, list[int]]:
    """Add what each capture adds, in order; returns new bytes by way of cutting."""
    study, fast = Study(), FastCdc() if find_spec("fastcdc") else None
    found: dict[str, list[int]] = {way.name: [] for way in study.ways}
    for server in servers:
        target = capture(server, folder, weights_mb)
        added = study.add(target)
        for name, of_way in added.by_way.items():
            found[name].append(of_way.new_bytes)
        if fast is not None:
            found.setdefault(FASTCDC, []).append(fast.add(target)[0])
        zero_mb, captured_mb = added.zero_bytes / 1e6, added.logical_bytes / 1e6
        report.add(f"captured: {server.name}", captured_mb=captured_mb, zero_mb=zero_mb)
    for name, by_server in found.items():
        for server, new_bytes in zip(servers, by_server, strict=True):
            report.add(f"{name}: {server.name}", new_mb=new_bytes / 1e6)
        report.add(f"{name}: all", new_mb=sum(by_server) / 1e6)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights-mb", type=float, default=100, help="of a server, 10^6 bytes")
    parser.add_argument("--servers", type=int, default=len(SERVERS), help="only so many of them")
    parser.add_argument("--folder", type=Path, default=None, help="where captures go")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-dedup-", dir=options.folder) as name:
        folder = Path(name)
        report = Report("bench_dedup", machine(folder))
        measure(SERVERS[: options.servers], folder, options.weights_mb, report)
        if not find_spec("fastcdc"):
            report.add(FASTCDC, note="not installed: pip install fastcdc")
        report.show()
        print(f"\nwritten: {report.write()}")


if __name__ == "__main__":
    main()
