"""Where one core limits reception: one process, several event loops in it, several processes.

All read ranges of one object from one server on this machine, over HTTP and TLS, with 16
connections together; the server is that of `bench_receive`. `cores` is the CPU time of the
receivers over the wall time: where it stays at 1 and the rate too, more processes are what helps.
The server needs cores as well: on a machine with few, it is the limit next.
Run: `make bench BENCH=receive_processes`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.bench_receive import GB, endpoints, receiver_environment
from benchmarks.frame import options_of, reporting
from benchmarks.receivers import RANGE_BYTES, Facts, Taken, zero_copy
from benchmarks.report import Report, Samples, cpu_seconds


def receive_in_threads(facts: Facts, n_loops: int) -> Taken:
    """Read with several event loops, a thread each, which share the connections."""
    own = replace(
        facts,
        n_connections=max(1, facts.n_connections // n_loops),
        read_bytes=facts.read_bytes // n_loops,
    )
    if n_loops == 1:
        return zero_copy(own)
    threads = [threading.Thread(target=zero_copy, args=(own,)) for _ in range(n_loops)]
    zero_copy(replace(own, read_bytes=own.n_connections * RANGE_BYTES))  # imports are not counted
    begun_s, cpu_s = time.perf_counter(), cpu_seconds()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Taken(time.perf_counter() - begun_s, cpu_seconds() - cpu_s)


def receive_in_processes(facts: Facts, n_processes: int, n_loops: int) -> Taken:
    """The longest wall time of processes that read their shares at once, and all their CPU."""
    own = replace(
        facts,
        n_connections=max(1, facts.n_connections // n_processes),
        read_bytes=facts.read_bytes // n_processes,
    )
    command = [sys.executable, "-m", "benchmarks.bench_receive_processes", "--be", str(n_loops)]
    environment = receiver_environment()
    line = [*command, json.dumps(asdict(own))]
    processes = [
        subprocess.Popen(line, stdout=subprocess.PIPE, env=environment) for _ in range(n_processes)
    ]
    said = [process.communicate()[0] for process in processes]
    taken = [Taken(**json.loads(one)) for one in said]
    return Taken(max(one.wall_s for one in taken), sum(one.cpu_s for one in taken))


def compare(folder: Path, options: argparse.Namespace, report: Report) -> None:
    """Measure all cases in turn."""
    cases = [(n, 1) for n in options.processes] + [(1, n) for n in options.loops]
    with endpoints(folder, options) as found:
        for scheme, facts in found.items():
            _measure(scheme, facts, cases, options.rounds, report)


def _measure(
    scheme: str, facts: Facts, cases: Sequence[tuple[int, int]], rounds: int, report: Report
) -> None:
    taken: dict[tuple[int, int], list[Taken]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, found in taken.items():
            found.append(receive_in_processes(facts, *case))
    for (n_processes, n_loops), found in taken.items():
        rate = Samples(tuple(facts.read_bytes / GB / one.wall_s for one in found))
        cores = Samples(tuple(one.cpu_s / one.wall_s for one in found))
        cost = Samples(tuple(facts.read_bytes / GB / one.cpu_s for one in found))
        name = f"{scheme}, {n_processes} processes, {n_loops} loops each"
        report.add(name, gb_s=rate, cores=cores, gb_per_cpu_s=cost)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report; or be a receiver."""
    parser = options_of(__doc__, gb=8.0, rounds=5)
    parser.add_argument("--object-gb", type=float, default=1.0, help="size of the object")
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--loops", type=int, nargs="*", default=[2], metavar="N")
    parser.add_argument("--be", nargs=2, metavar=("LOOPS", "FACTS"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.be:
        facts = Facts(**json.loads(options.be[1]))
        print(json.dumps(asdict(receive_in_threads(facts, int(options.be[0])))))
        return
    with reporting("bench_receive_processes", options.folder) as (folder, report):
        compare(folder, options, report)


if __name__ == "__main__":
    main()
