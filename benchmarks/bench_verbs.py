"""What the verbs of the command take on a local disk: wall, CPU, peak memory, bytes moved.

Each verb is a process of its own, start-up included, as a user runs it: push (new and known data),
pull, verify, cp to another store, prefetch (cold and warm); beside it `cp -r` of the same bytes.
All but `cp -r` end with what they wrote on disk. Input is in the page cache and incompressible.
Run: `make bench BENCH=verbs`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ProbeConfig, Report, Samples, machine, probe_limits
from benchmarks.snapshots import make_snapshot, total_bytes

MOVED_KEYS = ("moved_bytes", "fetched_bytes", "new_bytes")
"""Of a verb's JSON: what it says that it moved, under the first of these keys that is there."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One command. `fresh` are removed before it, below the benchmark's folder."""

    name: str
    command: Sequence[str]
    fresh: Sequence[str] = ()
    init: str = ""  # a store to make before it


@dataclass(frozen=True, slots=True)
class Run:
    """What one process took. `peak_bytes`: resident set, shared libraries included."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    said: str


VERBS = (
    Verb("push, new data", ("push", "snapshot", "bench:x"), ("store",), "store"),
    Verb("push, known data", ("push", "snapshot", "bench:y")),
    Verb("pull", ("pull", "bench:x", "back"), ("back",)),
    Verb("verify", ("verify", "bench:x")),
    Verb("cp to another store", ("cp", "bench:x", "--to", "other"), ("other",), "other"),
    Verb("prefetch, cold", ("prefetch", "bench:x", "--cache", "cache"), ("cache",)),
    Verb("prefetch, warm", ("prefetch", "bench:x", "--cache", "cache")),
)
PEER = Verb("cp -r", ("cp", "-r", "--reflink=never", "snapshot", "copy"), ("copy",))


def timed(command: Sequence[str], folder: Path) -> Run:
    """Run a command in `folder`. Raises RuntimeError with what it said if it fails."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SNAPCASK_")}
    environment |= {"SNAPCASK_STORE": "store", "SNAPCASK_ALLOW_ROOT_FILESYSTEM": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun_s = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - begun_s
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {err.read().decode().strip()}")
        cpu_s = usage.ru_utime + usage.ru_stime
        return Run(wall_s, cpu_s, usage.ru_maxrss * 1024, out.read().decode())


def run_verb(verb: Verb, folder: Path) -> Run:
    """Prepare, untimed, and run one verb of snapcask, or the peer."""
    for name in verb.fresh:
        shutil.rmtree(folder / name, ignore_errors=True)
    snapcask = [sys.executable, "-m", "snapcask"]
    if verb.init:
        timed([*snapcask, "init", verb.init], folder)
    os.sync()
    if verb is PEER:
        return timed(verb.command, folder)
    return timed([*snapcask, *verb.command, "--json", "--quiet"], folder)


def moved_bytes(run: Run) -> int | None:
    """What the verb says that it moved."""
    document = json.loads(run.said) if run.said.startswith("{") else {}
    return next((document[key] for key in MOVED_KEYS if key in document), None)


def compare(folder: Path, size_bytes: int, rounds: int, report: Report) -> None:
    """Run all verbs in turn, `rounds` times, and add a row for each."""
    snapshot = make_snapshot(folder / "snapshot", size_bytes)
    size_gb = total_bytes(snapshot) / 1e9
    runs: dict[str, list[Run]] = {verb.name: [] for verb in (*VERBS, PEER)}
    for _ in range(rounds):
        for verb in (*VERBS, PEER):
            runs[verb.name].append(run_verb(verb, folder))
    for name, found in runs.items():
        moved = moved_bytes(found[-1])
        wall = Samples(tuple(run.wall_s for run in found))
        report.add(
            name,
            wall_s=wall,
            gb_s=wall.gb_s(int(size_gb * 1e9)),
            cpu_s_per_gb=Samples(tuple(run.cpu_s / size_gb for run in found)),
            peak_rss_mb=max(run.peak_bytes for run in found) / 1e6,
            **({} if moved is None else {"moved_mb": moved / 1e6}),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=4.0, help="10^9 bytes of data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-verbs-", dir=options.folder) as name:
        folder = Path(name)
        report = Report("bench_verbs", machine(folder))
        compare(folder, int(options.gb * 1e9), options.rounds, report)
        report.rows += probe_limits(folder, ProbeConfig(n_repeats=3))
        report.show()
        print(f"\nwritten: {report.write()}")


if __name__ == "__main__":
    main()
