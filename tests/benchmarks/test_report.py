"""The shared piece of the benchmarks: its numbers must be right before any other number is."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import (
    Machine,
    PeakMemory,
    Report,
    Samples,
    anonymous_bytes,
    cpu_seconds,
    filesystem_of,
    machine,
    repeat,
)

MACHINE = Machine(
    cpu_model="a CPU",
    n_cores=2,
    memory_bytes=2**30,
    kernel="6.1",
    filesystem="ext4 (/dev/sda)",
    python="3.11.7",
    packages={"numpy": "2.0"},
    git_commit="abc",
)
MIB = 1024 * 1024


def spin(seconds: float) -> None:
    end_s = cpu_seconds() + seconds
    while cpu_seconds() < end_s:
        pass


def test_samples_show_the_median_and_the_extremes() -> None:
    assert str(Samples((3.0, 1.0, 20.5))) == "3 [1 .. 20.5]"


def test_a_single_sample_shows_no_extremes() -> None:
    assert str(Samples((0.12345,))) == "0.123"


def test_samples_refuse_to_be_empty() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Samples(())


def test_seconds_become_rates_in_order() -> None:
    assert Samples((0.5, 2.0)).gb_s(10**9).values == (2.0, 0.5)


def test_the_table_aligns_columns_and_leaves_unknown_cells_blank() -> None:
    report = Report("r", MACHINE)
    report.add("first", wall_s=Samples((1.0, 2.0, 3.0)))
    report.add("the second", wall_s=0.25, peak_bytes=1234567)
    assert report.table().splitlines() == [
        "case            wall_s  peak_bytes",
        "first       2 [1 .. 3]",
        "the second        0.25   1,234,567",
    ]


def test_show_prints_the_machine_above_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("r", MACHINE)
    report.add("first", note="fine")
    report.show()
    printed = capsys.readouterr().out
    assert printed.startswith("r\n  cpu_model: a CPU\n")
    assert printed.endswith("\n\ncase   note\nfirst  fine\n")


def test_write_keeps_every_sample_and_the_machine(tmp_path: Path) -> None:
    report = Report("r", MACHINE)
    report.add("first", wall_s=Samples((3.0, 1.0)), n=7, note="fine")
    path = report.write(tmp_path / "new")
    assert path == tmp_path / "new" / "r.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["machine"]["packages"] == {"numpy": "2.0"}
    wall_s = {"median": 2.0, "min": 1.0, "max": 3.0, "values": [3.0, 1.0]}
    assert document["rows"] == [{"case": "first", "wall_s": wall_s, "n": 7, "note": "fine"}]


def test_the_machine_describes_this_one(tmp_path: Path) -> None:
    facts = machine(tmp_path)
    assert 1 <= facts.n_cores <= (os.cpu_count() or 1)
    assert facts.memory_bytes > 64 * MIB
    assert facts.python == ".".join(map(str, sys.version_info[:3]))
    assert facts.packages["numpy"]
    assert facts.cpu_model
    assert facts.filesystem == filesystem_of(tmp_path)


def test_the_filesystem_is_that_of_the_deepest_mount() -> None:
    assert filesystem_of(Path("/proc/self")).startswith("proc ")
    assert not filesystem_of(Path("/")).startswith("proc ")


def test_cpu_seconds_count_this_process_and_its_children() -> None:
    start_s = cpu_seconds()
    spin(0.02)
    own_s = cpu_seconds() - start_s
    code = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert 0.02 <= own_s < 0.3
    assert cpu_seconds() - start_s >= own_s + 0.3


def test_repeat_times_the_work_and_not_what_comes_before_it() -> None:
    calls: list[str] = []

    def before() -> None:
        calls.append("before")
        spin(0.05)

    def work() -> None:
        calls.append("work")
        spin(0.002)

    cost = repeat(work, 3, before=before)
    assert calls == ["before", "work"] * 3
    assert len(cost.wall_s.values) == 3
    assert all(0.002 <= seconds < 0.05 for seconds in cost.cpu_s.values)
    assert min(cost.wall_s.values) >= 0.002


def test_anonymous_bytes_see_touched_memory_and_not_reserved_memory() -> None:
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        reserved_bytes = anonymous_bytes()
        for offset in range(0, 32 * MIB, mmap.PAGESIZE):
            memory[offset] = 1
        grown_bytes = anonymous_bytes() - reserved_bytes
    assert 31.5 * MIB <= grown_bytes <= 40 * MIB


def test_anonymous_bytes_leave_out_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(32 * MIB))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        start_bytes = anonymous_bytes()
        for offset in range(0, 32 * MIB, mmap.PAGESIZE):
            assert mapped[offset] == 0
        assert anonymous_bytes() - start_bytes < 8 * MIB


def test_peak_memory_outlasts_what_was_freed_inside_the_block() -> None:
    with PeakMemory(interval_s=0.001) as peak:
        with mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            for offset in range(0, 32 * MIB, mmap.PAGESIZE):
                memory[offset] = 1
            held_bytes = anonymous_bytes()
            while peak.peak_bytes < held_bytes - 2 * MIB:
                spin(0.001)
        freed_bytes = anonymous_bytes()
    assert peak.peak_bytes - peak.start_bytes >= 28 * MIB
    assert peak.peak_bytes - freed_bytes >= 28 * MIB
