"""What a process takes is what it takes itself, whatever started it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from benchmarks.timed import plain_environment, timed

MIB = 1 << 20


def test_peak_memory_is_not_that_of_who_started_it(tmp_path: Path) -> None:
    with mmap.mmap(-1, 128 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for offset in range(0, len(held), mmap.PAGESIZE):
            held[offset] = 1
        small = timed(["true"], tmp_path, plain_environment())
        grown = [sys.executable, "-c", f"x = b'1' * {96 * MIB}; x.count(b'2')"]
        large = timed(grown, tmp_path, plain_environment())
    assert small.peak_bytes < 64 * MIB
    assert large.peak_bytes > 96 * MIB


def test_cpu_and_words_are_those_of_the_command(tmp_path: Path) -> None:
    code = "import time\nwhile time.process_time() < 0.2: pass\nprint('said')"
    run = timed([sys.executable, "-c", code], tmp_path, plain_environment())
    assert run.said == "said\n"
    assert run.cpu_s >= 0.2
    assert run.wall_s >= 0.2


def test_what_comes_from_a_disk_is_counted_and_what_is_cached_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(4 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    cold, warm = (timed(["sha256sum", str(path)], tmp_path, plain_environment()) for _ in range(2))
    if not cold.read_bytes:
        pytest.skip("a file system that no block device is behind")
    assert cold.read_bytes >= 4 * MIB
    assert warm.read_bytes < MIB


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with 3: no luck"):
        timed(["sh", "-c", "echo no luck >&2; exit 3"], tmp_path, plain_environment())


def test_settings_of_snapcask_do_not_reach_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPCASK_STORE", "/mine")
    assert "SNAPCASK_STORE" not in plain_environment()
    assert "PATH" in plain_environment()
