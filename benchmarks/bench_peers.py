"""The same two snapshots stored by snapcask and by its peers, each as its command does it.

Nobody compresses where that can be turned off (casync can't, and restic always encrypts); cp and
tar neither deduplicate nor sync. Data is incompressible unless it is real, and in the page cache.
Each round begins with an empty repository. Run: `make bench BENCH=peers`, after
`apt-get install restic borgbackup casync zstd`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.report import Cost, ProbeConfig, Report, Samples, machine, probe_limits, repeat
from benchmarks.snapshots import (
    files_of,
    make_half_shared,
    make_snapshot,
    total_bytes,
    unpack_replicas,
)

Command = list[str]


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that stores directories. `push` gets repository, directory and a label."""

    name: str
    program: str
    push: Callable[[str, str, str], Command]
    setup: Callable[[str], Command] | None = None

    @property
    def is_installed(self) -> bool:
        """Whether the program can be found."""
        return shutil.which(self.program) is not None


def _restic(repository: str, *rest: str) -> Command:
    return ["restic", "--repo", repository, "--no-cache", "--quiet", *rest]


def _snapcask(verb: str, *rest: str) -> Command:
    return [sys.executable, "-m", "snapcask", verb, "--quiet", *rest]


PEERS = (
    Peer(
        "snapcask",
        sys.executable,
        lambda store, folder, label: _snapcask("push", "--store", store, folder, f"peers:{label}"),
        lambda store: _snapcask("init", store),
    ),
    Peer(
        "restic",
        "restic",
        lambda store, folder, _: _restic(store, "--compression=off", "backup", folder),
        lambda store: _restic(store, "init"),
    ),
    Peer(
        "borg",
        "borg",
        lambda store, folder, label: [
            "borg", "create", "--compression=none", f"{store}::{label}", folder
        ],
        lambda store: ["borg", "init", "--encryption=none", store],
    ),
    Peer(
        "casync",
        "casync",
        lambda store, folder, label: [
            "casync", "make", "--compression=zstd", f"--store={store}/default.castr",
            f"{store}/{label}.caidx", folder,
        ],
    ),
    Peer(
        "cp",
        "cp",
        lambda store, folder, label: ["cp", "-r", "--reflink=never", folder, f"{store}/{label}"],
    ),
    Peer(
        "tar | zstd -1",
        "zstd",
        lambda store, folder, label: [
            "sh", "-c", 'tar -C "$1" -cf - . | zstd -q -1 -o "$2"', "sh", folder,
            f"{store}/{label}.tar.zst",
        ],
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Push:
    """What one push cost, and the bytes that it added to the repository."""

    cost: Cost
    stored_bytes: int


def run_command(command: Command, home: Path) -> None:
    """Run a peer, whose caches and settings live in `home`. Raises RuntimeError if it fails."""
    environment = {
        **os.environ,
        "HOME": str(home),
        "BORG_BASE_DIR": str(home),
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        "RESTIC_PASSWORD": "not secret",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr[-1000:]}")


def measure_peer(peer: Peer, folder: Path, snapshots: Sequence[Path], rounds: int) -> list[Push]:
    """Pushes of `snapshots` in order into one repository, medians of several rounds."""
    costs: list[list[Cost]] = [[] for _ in snapshots]
    stored = [0] * len(snapshots)
    for _ in range(rounds):
        home, repository = folder / "home", folder / "repository"
        for path in (home, repository):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        if peer.setup is not None:
            run_command(peer.setup(str(repository)), home)
        for number, snapshot in enumerate(snapshots):
            before = total_bytes(repository)
            command = peer.push(str(repository), str(snapshot), f"n{number}")
            costs[number].append(repeat(partial(run_command, command, home), 1, before=os.sync))
            stored[number] = total_bytes(repository) - before
    shutil.rmtree(folder / "repository")
    return [Push(_joined(cost), size) for cost, size in zip(costs, stored, strict=True)]


def _joined(costs: Sequence[Cost]) -> Cost:
    wall_s = tuple(value for cost in costs for value in cost.wall_s.values)
    return Cost(Samples(wall_s), Samples(tuple(v for cost in costs for v in cost.cpu_s.values)))


def compare(
    folder: Path, snapshots: Sequence[Path], rounds: int, report: Report
) -> dict[str, list[Push]]:
    """Add a row for every peer and snapshot; returns what was found of those installed.

    The first push of each is that of an empty directory, which tells what starting it costs.
    """
    nothing = folder / "empty directory"
    nothing.mkdir()
    snapshots = [nothing, *snapshots]
    sizes = [total_bytes(snapshot) for snapshot in snapshots]
    for snapshot in snapshots:
        sum(sum(data[::4096]) for data in files_of(snapshot))  # into the page cache
    found = {}
    for peer in PEERS:
        if not peer.is_installed:
            report.add(peer.name, note="not installed")
            continue
        found[peer.name] = measure_peer(peer, folder, snapshots, rounds)
        for number, push in enumerate(found[peer.name]):
            report.add(
                f"{peer.name}: {snapshots[number].name}",
                cpu_s=push.cost.cpu_s,
                wall_s=push.cost.wall_s,
                stored_mb=push.stored_bytes / 1e6,
                gb_per_cpu_s=sizes[number] / 1e9 / push.cost.cpu_s.median,
            )
    for number, size in list(enumerate(sizes))[1:]:
        report.add(f"limit: {snapshots[number].name} as it is", stored_mb=size / 1e6)
    return found


def make_inputs(folder: Path, size_bytes: int) -> list[Path]:
    """A synthetic snapshot, and one that shares half of it."""
    first = make_snapshot(folder / "first", size_bytes)
    return [first, make_half_shared(folder / "half shared", first)]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="snapshots to push, in this order")
    parser.add_argument("--criu", action="store_true", help="push the shared CRIU snapshots")
    parser.add_argument("--gb", type=float, default=1.0, help="10^9 bytes of a synthetic snapshot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=options.folder) as name:
        folder = Path(name)
        report = Report("bench_peers_criu" if options.criu else "bench_peers", machine(folder))
        snapshots = options.folders or (unpack_replicas(folder) if options.criu else [])
        snapshots = snapshots or make_inputs(folder, int(options.gb * 1e9))
        compare(folder, snapshots, options.rounds, report)
        report.rows += probe_limits(folder, ProbeConfig(n_repeats=3))
        report.show()
        print(f"\nwritten: {report.write()}")


if __name__ == "__main__":
    main()
