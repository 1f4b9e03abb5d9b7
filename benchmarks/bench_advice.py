"""What how a server is started does to dedup: real processes, captured alive, pushed in order.

Each setting starts two replicas of one model (`benchmarks/replica.py`), the second with its weights
loaded in another order, captures both and says what the first and the second add to an empty
store. Settings: as they come; without ASLR (`setarch -R`); with PYTHONHASHSEED=0; both; and with a
KV cache that was used, kept as it is, zeroed or released before the capture.
Run: `make bench BENCH=advice`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import options_of, reporting
from benchmarks.report import HERE, Report
from restore.capture import capture_process
from transfer.dedup import BOUND, PAGE_CDC, Study

READY_TIMEOUT_S = 120
MODEL_SEED = 7


@dataclass(frozen=True, slots=True)
class Setting:
    """How both replicas are started. `kv` is what becomes of the used KV cache, or "" for none."""

    name: str
    no_aslr: bool = False
    hash_seed: bool = False
    kv: str = ""
    same_order: bool = False


SETTINGS = (
    Setting("as they come"),
    Setting("same order of loading", same_order=True),
    Setting("without ASLR", no_aslr=True),
    Setting("PYTHONHASHSEED=0", hash_seed=True),
    Setting("both", no_aslr=True, hash_seed=True),
    Setting("both, same order", no_aslr=True, hash_seed=True, same_order=True),
    Setting("both, same order, KV in use", True, True, "kept", True),
    Setting("both, same order, KV zeroed", True, True, "zeroed", True),
    Setting("both, same order, KV released", True, True, "released", True),
)


@dataclass(frozen=True, slots=True)
class Added:
    """What one capture holds, and what it added to those before. Bytes."""

    captured_bytes: int
    zero_bytes: int
    new_bytes: int
    bound_bytes: int


def command_of(
    setting: Setting, number: int, ready: Path, weights_mb: float, kv_mb: float
) -> list[str]:
    """The command line of a replica."""
    order = 0 if setting.same_order else number
    command = [sys.executable, str(HERE / "replica.py"), "--model-seed", str(MODEL_SEED)]
    command += ["--order-seed", str(order), "--weights-mb", str(weights_mb)]
    command += ["--ready-file", str(ready)]
    if setting.kv:
        command += ["--kv-mb", str(kv_mb), "--kv", setting.kv]
    return ["setarch", platform.machine(), "-R", *command] if setting.no_aslr else command


@contextlib.contextmanager
def replica(command: Sequence[str], ready: Path, *, hash_seed: bool) -> Iterator[int]:
    """A running process that has written `ready`; gives its id. It is killed at the end."""
    with started(command, hash_seed=hash_seed) as process:
        wait_until_ready(process, ready)
        yield process.pid  # setarch becomes the program that it starts


@contextlib.contextmanager
def started(command: Sequence[str], *, hash_seed: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is killed at the end."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if hash_seed:
        environment["PYTHONHASHSEED"] = "0"
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen[bytes], ready: Path) -> None:
    """Wait for the file. Raises RuntimeError if the process ends or takes too long."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{process.args!r} did not start")
        time.sleep(0.01)


def measure(setting: Setting, folder: Path, weights_mb: float, kv_mb: float) -> list[Added]:
    """Start both replicas at once; capture and cut them one after the other."""
    study, target, added = Study([PAGE_CDC, BOUND]), folder / "dump", []
    files = [folder / f"ready-{number}" for number in range(2)]
    with contextlib.ExitStack() as ends:
        processes = []
        for number, ready in enumerate(files):
            command = command_of(setting, number, ready, weights_mb, kv_mb)
            processes.append(ends.enter_context(started(command, hash_seed=setting.hash_seed)))
        for process, ready in zip(processes, files, strict=True):
            wait_until_ready(process, ready)
            capture_process(process.pid, target)
            found = study.add(target)
            new_bytes, bound_bytes = (found.by_way[w.name].new_bytes for w in study.ways)
            added.append(Added(found.logical_bytes, found.zero_bytes, new_bytes, bound_bytes))
            shutil.rmtree(target)
            ready.unlink()
    return added


def compare(
    settings: Sequence[Setting], folder: Path, weights_mb: float, kv_mb: float, report: Report
) -> dict[str, list[Added]]:
    """Measure all settings and add a row for each."""
    found = {}
    for setting in settings:
        if setting.no_aslr and not shutil.which("setarch"):
            report.add(setting.name, note="setarch is not installed")
            continue
        first, second = found[setting.name] = measure(setting, folder, weights_mb, kv_mb)
        report.add(
            setting.name,
            captured_mb=second.captured_bytes / 1e6,
            zero_mb=second.zero_bytes / 1e6,
            first_mb=first.new_bytes / 1e6,
            second_mb=second.new_bytes / 1e6,
            bound_mb=second.bound_bytes / 1e6,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = options_of(__doc__)
    parser.add_argument("--weights-mb", type=float, default=200, help="of each replica, 10^6 bytes")
    parser.add_argument("--kv-mb", type=float, default=200, help="a used KV cache, 10^6 bytes")
    options = parser.parse_args(arguments)
    with reporting("bench_advice", options.folder) as (folder, report):
        compare(SETTINGS, folder, options.weights_mb, options.kv_mb, report)


if __name__ == "__main__":
    main()
