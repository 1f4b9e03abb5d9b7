"""The same two snapshots stored and brought back by snapcask and by its peers, each as it does it.

Nobody compresses where that can be turned off (casync can't, and restic always encrypts); cp and
tar neither deduplicate nor sync a push. Each pull is of the last snapshot and ends with a sync; cp
and tar check nothing. Data is incompressible unless it is real, and in the page cache. Each round
begins with an empty repository. Run: `make bench BENCH=peers`, after
`apt-get install restic borgbackup casync zstd`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import Report, Samples, Value
from benchmarks.snapshots import (
    files_of,
    make_half_shared,
    make_snapshot,
    total_bytes,
    unpack_replicas,
)
from benchmarks.timed import SNAPCASK, Run, plain_environment, timed

Command = list[str]


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that stores directories. `push` gets repository, directory and a label.

    `pull` gets repository, label and a directory that exists and is empty. It may write below it
    under the whole path that was pushed, as backup programs do.
    """

    name: str
    program: str
    version: Command
    push: Callable[[str, str, str], Command]
    pull: Callable[[str, str, str], Command]
    setup: Callable[[str], Command] | None = None
    syncs: bool = False  # a pull ends with all on disk

    @property
    def is_installed(self) -> bool:
        """Whether the program can be found."""
        return shutil.which(self.program) is not None


def _restic(repository: str, *rest: str) -> Command:
    return ["restic", "--repo", repository, "--no-cache", "--quiet", *rest]


def _snapcask(verb: str, *rest: str) -> Command:
    return [*SNAPCASK, verb, "--quiet", *rest]


PEERS = (
    Peer(
        "snapcask",
        sys.executable,
        [*SNAPCASK, "--version"],
        lambda store, folder, label: _snapcask("push", "--store", store, folder, f"peers:{label}"),
        lambda store, label, target: _snapcask("pull", "--store", store, f"peers:{label}", target),
        lambda store: _snapcask("init", store),
        syncs=True,
    ),
    Peer(
        "restic",
        "restic",
        ["restic", "version"],
        lambda store, folder, label: _restic(
            store, "--compression=off", "backup", "--tag", label, folder
        ),
        lambda store, label, target: _restic(
            store, "restore", "latest", "--tag", label, "--target", target
        ),
        lambda store: _restic(store, "init"),
    ),
    Peer(
        "borg",
        "borg",
        ["borg", "--version"],
        lambda store, folder, label: [
            "borg", "create", "--compression=none", f"{store}::{label}", folder
        ],
        lambda store, label, target: [
            "sh", "-c", 'cd "$1" && borg extract "$2"', "sh", target, f"{store}::{label}"
        ],
        lambda store: ["borg", "init", "--encryption=none", store],
    ),
    Peer(
        "casync",
        "casync",
        ["casync", "--version"],
        lambda store, folder, label: [
            "casync", "make", "--compression=zstd", f"--store={store}/default.castr",
            f"{store}/{label}.caidx", folder,
        ],
        lambda store, label, target: [
            "casync", "extract", f"--store={store}/default.castr", f"{store}/{label}.caidx", target
        ],
    ),
    Peer(
        "cp",
        "cp",
        ["cp", "--version"],
        lambda store, folder, label: ["cp", "-r", "--reflink=never", folder, f"{store}/{label}"],
        lambda store, label, target: ["cp", "-r", "--reflink=never", f"{store}/{label}", target],
    ),
    Peer(
        "tar | zstd -1",
        "zstd",
        ["zstd", "--version"],
        lambda store, folder, label: [
            "sh", "-c", 'tar -C "$1" -cf - . | zstd -q -1 -o "$2"', "sh", folder,
            f"{store}/{label}.tar.zst",
        ],
        lambda store, label, target: [
            "sh", "-c", 'zstd -q -dc "$2" | tar -C "$1" -xf -', "sh", target,
            f"{store}/{label}.tar.zst",
        ],
    ),
)  # fmt: skip


@dataclass(slots=True)
class Push:
    """What pushes of one directory took, and the bytes that one added to the repository."""

    runs: list[Run] = field(default_factory=list)
    stored_bytes: int = 0


@dataclass(slots=True)
class Measured:
    """What a peer took: pushes in order, and pulls of the last of them."""

    pushes: list[Push]
    pulls: list[Run] = field(default_factory=list)


def environment(home: Path) -> dict[str, str]:
    """For peers whose caches and settings live in `home`."""
    return plain_environment() | {
        "HOME": str(home),
        "BORG_BASE_DIR": str(home),
        "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes",
        "RESTIC_PASSWORD": "not secret",
    }


def measure_peer(
    peer: Peer, folder: Path, snapshots: Sequence[Path], rounds: int, *, pulls: bool = False
) -> Measured:
    """Pushes of `snapshots` in order into one repository; with `pulls`, of the last one back."""
    found = Measured([Push() for _ in snapshots])
    for _ in range(rounds):
        home, repository, target = folder / "home", folder / "repository", folder / "pulled"
        for path in (home, repository, target):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        settings = environment(home)
        if peer.setup is not None:
            timed(peer.setup(str(repository)), home, settings)
        for number, snapshot in enumerate(snapshots):
            before = total_bytes(repository)
            command = peer.push(str(repository), str(snapshot), f"n{number}")
            os.sync()
            found.pushes[number].runs.append(timed(command, home, settings))
            found.pushes[number].stored_bytes = total_bytes(repository) - before
        if pulls:
            command = peer.pull(str(repository), f"n{len(snapshots) - 1}", str(target))
            if not peer.syncs:
                command = ["sh", "-c", '"$@" && sync -f "$0"', str(target), *command]
            os.sync()
            found.pulls.append(timed(command, home, settings))
    shutil.rmtree(folder / "repository")
    return found


def _costs(runs: Sequence[Run], n_bytes: int) -> dict[str, Value]:
    cpu = Samples(tuple(run.cpu_s for run in runs))
    return {
        "cpu_s": cpu,
        "wall_s": Samples(tuple(run.wall_s for run in runs)),
        "gb_per_cpu_s": n_bytes / 1e9 / cpu.median,
        "peak_rss_mb": max(run.peak_bytes for run in runs) / 1e6,
    }


def compare(
    folder: Path, snapshots: Sequence[Path], rounds: int, report: Report
) -> dict[str, Measured]:
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
        found[peer.name] = measured = measure_peer(peer, folder, snapshots, rounds, pulls=True)
        for snapshot, size, push in zip(snapshots, sizes, measured.pushes, strict=True):
            stored_mb = push.stored_bytes / 1e6
            costs = _costs(push.runs, size)
            report.add(f"{peer.name}: {snapshot.name}", stored_mb=stored_mb, **costs)
        report.add(f"{peer.name}: pull", **_costs(measured.pulls, sizes[-1]))
        said = subprocess.run(peer.version, capture_output=True, text=True, check=True).stdout
        report.add(f"{peer.name}: version", note=said.partition("\n")[0])
    for number, size in list(enumerate(sizes))[1:]:
        report.add(f"limit: {snapshots[number].name} as it is", stored_mb=size / 1e6)
    return found


def make_inputs(folder: Path, size_bytes: int) -> list[Path]:
    """A synthetic snapshot, and one that shares half of it."""
    first = make_snapshot(folder / "first", size_bytes)
    return [first, make_half_shared(folder / "half shared", first)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = options_of(__doc__, gb=1.0, rounds=3)
    parser.add_argument("folders", type=Path, nargs="*", help="snapshots to push, in this order")
    parser.add_argument("--criu", action="store_true", help="push the shared CRIU snapshots")
    options = parser.parse_args(arguments)
    named = "bench_peers_criu" if options.criu else "bench_peers"
    with reporting(named, options.folder, limits=True) as (folder, report):
        snapshots = options.folders or (unpack_replicas(folder) if options.criu else [])
        snapshots = snapshots or make_inputs(folder, gigabytes(options))
        compare(folder, snapshots, options.rounds, report)


if __name__ == "__main__":
    main()
