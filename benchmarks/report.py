"""What every benchmark shares: the machine, repeated samples, CPU and memory cost, the report.

A benchmark adds what it measured to a `Report`, shows it and writes its JSON; the bare machine's
rates, to set beside a result, come from `probe_limits`. GB is 10**9 bytes.

The suite says through the environment where JSON goes (BENCH_OUT, a folder) and how large a file
the probes may write (BENCH_PROBE_MIB).
"""

import errno
import json
import mmap
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Self

import numpy as np
from blake3 import blake3

HERE = Path(__file__).parent
OUTPUT_FOLDER = Path(os.environ.get("BENCH_OUT") or HERE / "out")
PACKAGES = ("blake3", "zstandard", "msgpack", "numpy", "aiobotocore", "cuda-python", "torch")


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
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(HERE.parent) if script.is_relative_to(HERE.parent) else script.name
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


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """How much the probes move. Less memory than the CPU caches hold measures those instead."""

    n_repeats: int = 5
    memory_bytes: int = 256 * 1024 * 1024  # copied and hashed
    piece_bytes: int = 256 * 1024  # hashed at a time
    file_bytes: int = int(os.environ.get("BENCH_PROBE_MIB") or 1024) * 1024 * 1024
    block_bytes: int = 4 * 1024 * 1024  # of one read or write; O_DIRECT wants multiples of 4096


def probe_limits(folder: Path, config: ProbeConfig) -> list[Row]:
    """Rates in GB/s: memory copy and hash on one core, a file made in `folder` and removed again.

    A write ends with fsync. Where the file system has no O_DIRECT, the value is "unsupported".
    """
    n_bytes, step, n_repeats = config.memory_bytes, config.piece_bytes, config.n_repeats
    source = memoryview(np.random.default_rng(0).bytes(n_bytes))
    target = np.ones(n_bytes, np.uint8)  # each page touched before the clock runs
    copy = partial(np.copyto, target, np.frombuffer(source, np.uint8))

    def digest() -> None:
        for start in range(0, n_bytes, step):
            blake3(source[start : start + step]).digest()

    return [
        Row("memory copy", {"gb_s": repeat(copy, n_repeats).wall_s.gb_s(n_bytes)}),
        Row("BLAKE3", {"gb_s": repeat(digest, n_repeats).wall_s.gb_s(n_bytes)}),
        *(Row(case, {"gb_s": rate}) for case, rate in _file_rates(folder, config).items()),
    ]


def _file_rates(folder: Path, config: ProbeConfig) -> dict[str, Value]:
    size_bytes = config.file_bytes // config.block_bytes * config.block_bytes
    with (
        tempfile.NamedTemporaryFile(prefix="probe-", dir=folder) as file,
        mmap.mmap(-1, config.block_bytes) as block,  # aligned to a page, as O_DIRECT wants
    ):
        block.write(os.urandom(config.block_bytes))  # which no file system can compress
        empty = partial(file.truncate, 0)
        evict = partial(os.posix_fadvise, file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def rate(flags: int, before: Work) -> Value:
            work = partial(_stream, file.name, flags, block, size_bytes)
            try:
                return repeat(work, config.n_repeats, before=before).wall_s.gb_s(size_bytes)
            except OSError as error:
                if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                    return "unsupported"
                raise

        return {
            "write": rate(os.O_WRONLY, empty),
            "read, cold": rate(os.O_RDONLY, evict),
            "read, cached": rate(os.O_RDONLY, file.tell),
            "read, O_DIRECT": rate(os.O_RDONLY | os.O_DIRECT, evict),
            "write, O_DIRECT": rate(os.O_WRONLY | os.O_DIRECT, empty),
        }


def _stream(path: str, flags: int, block: mmap.mmap, size_bytes: int) -> None:
    transfer = os.writev if flags & os.O_WRONLY else os.readv
    descriptor = os.open(path, flags)
    try:
        for offset in range(0, size_bytes, len(block)):
            if transfer(descriptor, [block]) != len(block):
                raise OSError(errno.EIO, f"short transfer at offset {offset}", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
