"""The frame of a benchmark: its options, a folder that goes away, the machine's limits, the report.

A benchmark's `main` is then what it measures, between these two:

    options = options_of(__doc__, gb=4.0, rounds=5).parse_args(arguments)
    with reporting("bench_push", options.folder, limits=True) as (folder, report):
        compare(folder, gigabytes(options), options.rounds, report)
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.limits import ProbeConfig, shared_limits
from benchmarks.report import Report, machine

N_PROBES = 3


def options_of(
    says: str | None, *, gb: float | None = None, rounds: int | None = None
) -> argparse.ArgumentParser:
    """A parser that has `--folder`, and `--gb` and `--rounds` where their defaults are given."""
    parser = argparse.ArgumentParser(description=says)
    if gb is not None:
        parser.add_argument("--gb", type=float, default=gb, help=f"10^9 bytes of data ({gb:g})")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of each case ({rounds})")
    parser.add_argument("--folder", type=Path, default=None, help="works here: the disk to measure")
    return parser


def gigabytes(options: argparse.Namespace) -> int:
    """What `--gb` says, in bytes."""
    return int(options.gb * 1e9)


@contextmanager
def reporting(
    name: str, folder: Path | None, *, limits: bool = False
) -> Iterator[tuple[Path, Report]]:
    """A temporary folder below `folder`, and a report that is shown and written at the end.

    With `limits` it ends with what the machine can do in that folder. Nothing is written if the
    block raises; the folder goes away in any case.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name.replace('_', '-')}-", dir=folder) as made:
        report = Report(name, machine(Path(made)))
        yield Path(made), report
        if limits:
            report.rows += shared_limits(Path(made), ProbeConfig(n_repeats=N_PROBES))
        report.show()
        print(f"\nwritten: {report.write()}")
