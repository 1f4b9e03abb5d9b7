"""Named, frozen cases: all benchmarks in one run, quick (in small) or full.

Quick is meant for two quiet cores; a busy machine takes longer.

Each case is a script and its arguments, and runs in a process of its own. It prints its table; the
suite gathers the JSON of all in one file, `benchmarks/out/quick.json` or `full.json`, with the
state of each case: ok, skipped (and why) or failed. Run: `make bench`, `make bench QUICK=1`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.report import HERE, OUTPUT_FOLDER, cpu_seconds

QUICK_PROBE_MIB = 64
CASE_LIMIT_S = 3600


@dataclass(frozen=True, slots=True)
class Case:
    """One script with its arguments in each mode.

    `lacks` says what the machine has not, or "". Those that use a bucket share a server when quick.
    """

    name: str
    script: str
    quick: str
    full: str
    lacks: Callable[[], str] = str
    uses_bucket: bool = False

    def arguments(self, *, quick: bool) -> list[str]:
        """What the script is called with."""
        return shlex.split(self.quick if quick else self.full)


def _not_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _no_gpu() -> str:
    is_there = find_spec("cuda") and Path("/dev/nvidiactl").exists()
    return "" if is_there else "needs a GPU and snapcask[gpu]"


def _no_s3() -> str:
    return "" if find_spec("aiobotocore") else "needs snapcask[s3]"


def _no_mounts_and_s3() -> str:
    return _not_root() or _no_s3()


CASES = (
    Case("chunking", "bench_chunking", "--mib 48 --rounds 2", ""),
    Case("dedup", "bench_dedup", "--weights-mb 8 --servers 4", "--peers"),
    Case(
        "dedup-synthetic",
        "bench_dedup",
        "--synthetic-gib 0.04 --servers 4",
        "--synthetic-gib 1 --servers 6",
    ),
    Case("advice", "bench_advice", "--weights-mb 4 --kv-mb 8", ""),
    Case("push", "bench_push", "--gb 0.1 --rounds 2", "--gb 4 --rounds 5"),
    Case("verbs", "bench_verbs", "--gb 0.05 --rounds 1", "--gb 2 --rounds 3"),
    Case("push-1", "bench_push", "--gb 0.05 --rounds 1", "--gb 1 --rounds 3"),
    Case("scale", "bench_scale", "--tb 0.001 --rounds 1", "--tb 0.3"),
    Case("scale-tenth", "bench_scale", "--tb 0.0005 --rounds 1", "--tb 0.1"),
    Case("scale-hundredth", "bench_scale", "--tb 0.0002 --rounds 1", "--tb 0.01"),
    Case("metadata", "bench_metadata", "--mb 100", ""),
    Case("peers", "bench_peers", "--gb 0.02 --rounds 1", "--gb 1 --rounds 2"),
    Case(
        "receive",
        "bench_receive",
        "--gb 0.1 --object-gb 0.1 --rounds 1 --connections 4 --receivers zero_copy obstore",
        "--gb 2 --rounds 3",
        _no_s3,
    ),
    Case(
        "receive-processes",
        "bench_receive_processes",
        "--gb 0.1 --object-gb 0.1 --rounds 1 --connections 4 --processes 1 2 --loops",
        "--gb 2 --rounds 3",
        _no_s3,
    ),
    Case("s3", "bench_s3", "--gb 0.05 --rounds 1", "--gb 2 --rounds 3", _no_s3, True),
    Case(
        "link",
        "bench_link",
        "--gb 0.02 --rounds 1 --links 20:1000 --clients snapcask s5cmd",
        "--gb 0.25 --rounds 1",
        _no_s3,
        True,
    ),
    Case(
        "ready",
        "bench_ready",
        "--gb 0.03 --rounds 1 --ways cold disk",
        "--gb 2 --rounds 2",
        _no_mounts_and_s3,
        True,
    ),
    Case("cache", "bench_cache", "--gb 0.05 --rounds 1", "--gb 2 --rounds 3", _not_root),
    Case("csi", "bench_csi", "--pods 10 --mounts 100 --rounds 1", "", _not_root),
    Case("gpu-dedup", "bench_gpu_dedup", "--weights-mb 200", "", _no_gpu),
    Case("load", "bench_load", "--gib 1 --disk-gib 1 --rounds 2", "", _no_gpu),
)


@contextlib.contextmanager
def shared_by_cases(cases: Iterable[Case], *, quick: bool) -> Iterator[dict[str, str]]:
    """What saves quick cases time, as variables: limits measured once, one S3 server.

    Full cases share nothing: what a disk does half an hour later is no limit of what it did.
    """
    if not quick:
        yield {}
        return
    with (
        tempfile.TemporaryDirectory(prefix="bench-shared-") as made,
        contextlib.ExitStack() as ends,
    ):
        found = {"BENCH_PROBE_MIB": str(QUICK_PROBE_MIB), "BENCH_LIMITS": f"{made}/limits.json"}
        if any(case.uses_bucket and not case.lacks() for case in cases):
            from benchmarks.bucket import bucket_server
            from tests.transfer.s3 import servers

            if servers.tool("weed") is not None:
                server = ends.enter_context(bucket_server(Path(made, "server")))
                found["BENCH_S3"] = server.endpoint
        yield found


def run_case(case: Case, *, quick: bool, shared: Mapping[str, str]) -> dict[str, object]:
    """Run one case, showing what it prints. Returns its entry of the document."""
    arguments = case.arguments(quick=quick)
    line = f"python benchmarks/{case.script}.py {shlex.join(arguments)}".rstrip()
    print(f"\n== {case.name}: {line}", flush=True)
    entry: dict[str, object] = {"case": case.name, "command": line}
    if why := case.lacks():
        print(f"skipped: {why}")
        return entry | {"state": "skipped", "why": why}
    with tempfile.TemporaryDirectory(prefix="bench-suite-") as out:
        environment = {**os.environ, **shared, "BENCH_OUT": out}
        command = [sys.executable, str(HERE / f"{case.script}.py"), *arguments]
        begun_s, begun_cpu_s = time.monotonic(), cpu_seconds()
        try:
            code = subprocess.run(command, env=environment, timeout=CASE_LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            code = -1
        entry["seconds"] = round(time.monotonic() - begun_s, 1)
        entry["cpu_seconds"] = round(cpu_seconds() - begun_cpu_s, 1)
        written = sorted(Path(out).glob("*.json"))
        if code or not written:
            print(f"failed: ended with {code}")
            return entry | {"state": "failed", "why": f"ended with {code}"}
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in written]
    return entry | {"state": "ok", "reports": reports}


def run_suite(cases: Sequence[Case], *, quick: bool, folder: Path) -> tuple[Path, list[str]]:
    """Run cases one after the other; returns where the JSON is, and the names of failed ones."""
    mode = "quick" if quick else "full"
    path, load_before, entries = folder / f"{mode}.json", os.getloadavg()[0], []
    folder.mkdir(parents=True, exist_ok=True)
    with shared_by_cases(cases, quick=quick) as shared:
        for case in cases:
            entries.append(run_case(case, quick=quick, shared=shared))
            document = {
                "suite": mode,
                "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "load_before": load_before,  # processes that ran or waited, before the first case
                "cases": entries,
            }  # written after each case, so that a run that is cut short leaves what it has
            path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path, [str(entry["case"]) for entry in entries if entry["state"] == "failed"]


def said_of_time(path: Path) -> str:
    """How long the cases took together, and the longest of them."""
    entries = json.loads(path.read_text(encoding="utf-8"))["cases"]
    took = {entry["case"]: entry.get("seconds", 0.0) for entry in entries}
    longest = sorted(took, key=lambda case: -took[case])[:3]
    shown = ", ".join(f"{case} {took[case]:.0f} s" for case in longest)
    return f"took {sum(took.values()):.0f} s; the longest: {shown}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the suite, or the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names; default: all")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--list", action="store_true", help="show the cases and run none")
    parser.add_argument("--out", type=Path, default=OUTPUT_FOLDER, help="folder for the JSON")
    options = parser.parse_args(arguments)
    known = {case.name: case for case in CASES}
    if unknown := [name for name in options.cases if name not in known]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.cases or known]
    if options.list:
        for case in chosen:
            words = shlex.join(case.arguments(quick=options.quick))
            print(f"{case.name:<18} benchmarks/{case.script}.py {words}".rstrip())
        return
    path, failed = run_suite(chosen, quick=options.quick, folder=options.out)
    print(f"\n{said_of_time(path)}\nwritten: {path}; draw it with `make bench-report`")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
