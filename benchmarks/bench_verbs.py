"""What the verbs of the command take on a local disk: wall, CPU, peak memory, bytes moved.

Each verb is a process of its own, start-up included, as a user runs it: push (new and known data),
pull, a pull that goes on where one was killed after half of its bytes, verify, cp to another store,
prefetch (cold and warm), and as root a mount by digest of what the cache has; beside it `cp -r` of
the same bytes. All but `cp -r` end with what they wrote on disk. The snapshot is incompressible; it
and the store are read into the page cache before each verb, and `from_disk_mb` is what a verb read
from a disk all the same. Run: `make bench BENCH=verbs`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.report import Report, Samples, Value
from benchmarks.snapshots import PAGE, files_of, make_snapshot, total_bytes
from benchmarks.timed import SNAPCASK, Run, plain_environment, timed

MOVED_KEYS = ("moved_bytes", "fetched_bytes", "new_bytes")
"""Of a verb's JSON: what it says that it moved, under the first of these keys that is there."""

QUIET = ("--json", "--quiet")
PULL = ("pull", "bench:x", "back")
N_TRIES = 10


def nothing(folder: Path) -> None:
    """What most verbs need before and after them."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One command. `fresh` are removed before it, below the benchmark's folder.

    `before` and `after` are called with that folder, untimed. `DIGEST` in the command stands for
    the image's. The cost of verbs that are not `per_gb` does not grow with the data.
    """

    name: str
    command: Sequence[str]
    fresh: Sequence[str] = ()
    init: str = ""  # a store to make before it
    before: Callable[[Path], None] = nothing
    after: Callable[[Path], None] = nothing
    per_gb: bool = True
    needs_root: bool = False


def cut_off_pull(folder: Path) -> None:
    """Pull, and kill the process once it has written half. Raises RuntimeError if it is too fast.

    What it writes is counted by the kernel, whether it goes past the page cache or not.
    """
    half_bytes = total_bytes(folder / "snapshot") // 2
    for _ in range(N_TRIES):
        shutil.rmtree(folder / "back", ignore_errors=True)
        command = [*SNAPCASK, *PULL, *QUIET]
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL
        )
        try:
            while process.poll() is None and _written_bytes(process.pid) < half_bytes:
                time.sleep(0.001)
        finally:
            process.kill()
        if process.wait() == -signal.SIGKILL:
            return
    raise RuntimeError(f"a pull was over before it could be killed, {N_TRIES} times")


def _written_bytes(pid: int) -> int:
    """Bytes of all writes of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
        return int(text.partition("wchar:")[2].split(maxsplit=1)[0])
    return 0


def make_mount_point(folder: Path) -> None:
    """An empty directory to mount at."""
    (folder / "mounted").mkdir(exist_ok=True)


def unmount(folder: Path) -> None:
    """Undo a mount."""
    timed([*SNAPCASK, "umount", "mounted", "--cache", "cache"], folder, environment())


CACHE = ("--cache", "cache")
VERBS = (
    Verb("push, new data", ("push", "snapshot", "bench:x"), ("store",), "store"),
    Verb("push, known data", ("push", "snapshot", "bench:y")),
    Verb("pull", PULL, ("back",)),
    Verb("resume, after half a pull", PULL, ("back",), before=cut_off_pull),
    Verb("verify", ("verify", "bench:x")),
    Verb("cp to another store", ("cp", "bench:x", "--to", "other"), ("other",), "other"),
    Verb("prefetch, cold", ("prefetch", "bench:x", *CACHE), ("cache",)),
    Verb("prefetch, warm", ("prefetch", "bench:x", *CACHE)),
    Verb(
        "mount, warm", ("mount", "DIGEST", "mounted", *CACHE),
        before=make_mount_point, after=unmount, per_gb=False, needs_root=True,
    ),
)  # fmt: skip
PEER = Verb("cp -r", ("cp", "-r", "--reflink=never", "snapshot", "copy"), ("copy",))


def environment() -> dict[str, str]:
    """That of this process, with the benchmark's store and no other setting of snapcask."""
    return plain_environment() | {"SNAPCASK_STORE": "store", "SNAPCASK_ALLOW_ROOT_FILESYSTEM": "1"}


def run_verb(verb: Verb, folder: Path, digest: str) -> Run:
    """Prepare, untimed, and run one verb of snapcask, or the peer."""
    for name in verb.fresh:
        shutil.rmtree(folder / name, ignore_errors=True)
    if verb.init:
        timed([*SNAPCASK, "init", verb.init], folder, environment())
    verb.before(folder)
    os.sync()
    for name in ("snapshot", "store"):
        sum(sum(data[::PAGE]) for data in files_of(folder / name))  # into the page cache
    if verb is PEER:
        return timed(verb.command, folder, environment())
    words = [digest if word == "DIGEST" else word for word in verb.command]
    try:
        return timed([*SNAPCASK, *words, *QUIET], folder, environment())
    finally:
        verb.after(folder)


def moved_bytes(run: Run) -> int | None:
    """What the verb says that it moved."""
    document = json.loads(run.said) if run.said.startswith("{") else {}
    return next((document[key] for key in MOVED_KEYS if key in document), None)


def compare(folder: Path, size_bytes: int, rounds: int, report: Report) -> None:
    """Run all verbs in turn, `rounds` times, and add a row for each."""
    snapshot = make_snapshot(folder / "snapshot", size_bytes)
    whole_bytes = total_bytes(snapshot)
    is_root = os.geteuid() == 0
    verbs = [verb for verb in (*VERBS, PEER) if is_root or not verb.needs_root]
    runs: dict[str, list[Run]] = {verb.name: [] for verb in verbs}
    digest = ""
    for _ in range(rounds):
        for verb in verbs:
            run = run_verb(verb, folder, digest)
            runs[verb.name].append(run)
            digest = digest or json.loads(run.said)["digest"]  # the first verb is a push
    for verb in (*VERBS, PEER):
        if verb in verbs:
            report.add(verb.name, **_values(verb, runs[verb.name], whole_bytes))
        else:
            report.add(verb.name, note="needs root")


def _values(verb: Verb, found: Sequence[Run], whole_bytes: int) -> dict[str, Value]:
    wall = Samples(tuple(run.wall_s for run in found))
    cpu = [run.cpu_s for run in found]
    values: dict[str, Value] = {"wall_s": wall}
    if verb.per_gb:
        per_gb = Samples(tuple(cpu_s * 1e9 / whole_bytes for cpu_s in cpu))
        values |= {"gb_s": wall.gb_s(whole_bytes), "cpu_s_per_gb": per_gb}
    else:
        values["cpu_s"] = Samples(tuple(cpu))
    values["peak_rss_mb"] = max(run.peak_bytes for run in found) / 1e6
    values["from_disk_mb"] = max(run.read_bytes for run in found) / 1e6
    moved = [bytes_ for run in found if (bytes_ := moved_bytes(run)) is not None]
    if moved:
        values["moved_mb"] = Samples(tuple(n_bytes / 1e6 for n_bytes in moved))
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = options_of(__doc__, gb=4.0, rounds=3).parse_args(arguments)
    with reporting("bench_verbs", options.folder, limits=True) as (folder, report):
        compare(folder, gigabytes(options), options.rounds, report)


if __name__ == "__main__":
    main()
