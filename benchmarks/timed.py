"""What one process takes: wall, CPU, peak memory, bytes from disks. Commands as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import HERE

SNAPCASK = (sys.executable, "-m", "snapcask")
SAID_BYTES = 2000
"""Of what a command says when it fails, so much is shown: the end."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one process took. `peak_bytes`: resident set, shared libraries included.

    `read_bytes` came from block devices, not from the page cache; the children's count too.
    """

    wall_s: float
    cpu_s: float
    peak_bytes: int
    read_bytes: int
    said: str


def plain_environment() -> dict[str, str]:
    """That of this process without settings of snapcask.

    Python may keep its byte code, as it does for an installed package.
    """
    left_out = ("SNAPCASK_", "PYTHONDONTWRITEBYTECODE")
    return {k: v for k, v in os.environ.items() if not k.startswith(left_out)}


def timed(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Run:
    """Run a command in `folder`. Raises RuntimeError with what it said if it fails."""
    with (
        tempfile.NamedTemporaryFile("r") as result,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        launch = [sys.executable, "-I", "-S", str(HERE / "launch.py"), result.name, *command]
        done = subprocess.run(launch, cwd=folder, env=environment, stdout=out, stderr=err)
        for file in (out, err):
            file.seek(0)
        if done.returncode:
            said = err.read().decode("utf-8", "replace").strip()[-SAID_BYTES:]
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {said}")
        wall_s, cpu_s, peak_bytes, read_bytes = result.read().split()
        said = out.read().decode("utf-8", "replace")
    return Run(float(wall_s), float(cpu_s), int(peak_bytes), int(read_bytes), said)
