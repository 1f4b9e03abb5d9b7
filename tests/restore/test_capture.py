"""Captures of live child processes: what is taken, what is not, and that the child runs on."""

from __future__ import annotations

import errno
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from imgfmt import criu
from imgfmt.errors import (
    AccessDenied,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
    StoreUnavailable,
)
from restore import capture
from restore.capture import PAGE_BYTES, CaptureStats, capture_process

N_BYTES = 64 * PAGE_BYTES
REPLICA = Path(__file__).parents[2] / "benchmarks" / "replica.py"

CHILD = """
import contextlib, ctypes, mmap, random, sys, threading
n_bytes, file = int(sys.argv[1]), sys.argv[2]
page = mmap.PAGESIZE
private, shared = mmap.MAP_PRIVATE, mmap.MAP_SHARED
anonymous = mmap.MAP_ANONYMOUS
def private_memory():
    mapping = mmap.mmap(-1, n_bytes, flags=private | anonymous)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)  # they would fill pages that nobody wrote
    return mapping
pattern, holes, unwritten = private_memory(), private_memory(), private_memory()
pattern[:] = random.Random(1).randbytes(n_bytes)
for number in (0, 2, 3, 7):
    holes[number * page] = 200 + number
common = mmap.mmap(-1, n_bytes, flags=shared | anonymous)
common[:] = random.Random(2).randbytes(n_bytes)
with open(file, "rb") as opened:
    clean, changed = (
        mmap.mmap(opened.fileno(), n_bytes, flags=private, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        for _ in range(2)
    )
    for mapping in (clean, changed):
        sum(mapping[::page])
changed[page] = 99
sum(unwritten[::page])
wait = threading.Event().wait
threading.Thread(target=wait, daemon=True).start()
for mapping in (pattern, holes, common, clean, changed, unwritten):
    print(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), flush=True)
for line in sys.stdin:
    print("pong", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Child:
    """A child and the addresses of its mappings, each of N_BYTES."""

    popen: subprocess.Popen[str]
    pattern: int
    holes: int
    common: int
    clean: int
    changed: int
    unwritten: int

    @property
    def pid(self) -> int:
        return self.popen.pid

    def answers(self) -> bool:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write("ping\n")
        self.popen.stdin.flush()
        return self.popen.stdout.readline() == "pong\n"


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    file = tmp_path / "mapped"
    file.write_bytes(random.Random(3).randbytes(N_BYTES))
    command = [sys.executable, "-c", CHILD, str(N_BYTES), str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as popen:
        try:
            assert popen.stdout is not None
            yield Child(popen, *(int(popen.stdout.readline()) for _ in range(6)))
        finally:
            popen.kill()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def captured(directory: Path, address: int, n_bytes: int = N_BYTES) -> dict[int, bytes]:
    """The captured pages of a mapping: number of the page in it, to bytes."""
    (path,) = directory.glob("pagemap-*.img")
    pagemap = criu.decode_pagemap(path.read_bytes(), path.name)
    found, offset = {}, 0
    with (directory / f"pages-{pagemap.pages_id}.img").open("rb") as pages:
        for entry in pagemap.entries:
            for number in range(entry.n_pages):
                place = entry.vaddr + number * PAGE_BYTES - address
                if 0 <= place < n_bytes:
                    pages.seek(offset + number * PAGE_BYTES)
                    found[place // PAGE_BYTES] = pages.read(PAGE_BYTES)
            offset += entry.n_pages * PAGE_BYTES
    return found


def stop_for_good(child: Child) -> None:
    child.popen.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


def end(child: Child) -> None:
    """The child is dead afterwards, but its id is still its own."""
    child.popen.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def whole(pages: dict[int, bytes]) -> bytes:
    return b"".join(pages[number] for number in sorted(pages))


def before_each_read(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object], *, max_bytes: int | None = None
) -> None:
    """Call `act(address)` before each read of the target's memory, and cut the reads short."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], address: int) -> int:
        act(address)
        return real(fd, [buffers[0][:max_bytes]], address)

    monkeypatch.setattr(os, "preadv", preadv)


def test_capture_copies_the_bytes_of_a_private_mapping(child: Child, tmp_path: Path) -> None:
    capture_process(child.pid, tmp_path / "dump")
    pages = captured(tmp_path / "dump", child.pattern)
    assert whole(pages) == random.Random(1).randbytes(N_BYTES)


def test_capture_takes_only_pages_that_were_written(child: Child, tmp_path: Path) -> None:
    capture_process(child.pid, tmp_path / "dump")
    pages = captured(tmp_path / "dump", child.holes)
    assert {number: page[0] for number, page in pages.items()} == {
        number: 200 + number for number in (0, 2, 3, 7)
    }


def test_capture_leaves_out_shared_memory_and_unchanged_pages_of_files(
    child: Child, tmp_path: Path
) -> None:
    capture_process(child.pid, tmp_path / "dump")
    assert captured(tmp_path / "dump", child.common) == {}
    assert captured(tmp_path / "dump", child.clean) == {}
    ((number, page),) = captured(tmp_path / "dump", child.changed).items()
    assert (number, page[0]) == (1, 99)
    assert page[1:] == random.Random(3).randbytes(N_BYTES)[PAGE_BYTES + 1 : 2 * PAGE_BYTES]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees page frames")
def test_capture_takes_memory_that_is_shared_without_a_file_if_asked(
    child: Child, tmp_path: Path
) -> None:
    capture_process(child.pid, tmp_path / "plain")
    stats = capture_process(child.pid, tmp_path / "dump", shared=True)
    (path,) = (tmp_path / "dump").glob("pagemap-shmem-*.img")
    pagemap = criu.decode_pagemap(path.read_bytes(), path.name)
    (entry,) = pagemap.entries
    assert (entry.vaddr, entry.n_pages) == (0, N_BYTES // PAGE_BYTES)
    pages = (tmp_path / "dump" / f"pages-{pagemap.pages_id}.img").read_bytes()
    assert pages == random.Random(2).randbytes(N_BYTES)
    sizes = [file.stat().st_size for file in (tmp_path / "dump").glob("pages-*.img")]
    assert stats.bytes == sum(sizes)
    assert len(sizes) == 2
    assert not list((tmp_path / "plain").glob("*shmem*"))


def test_capture_takes_what_is_mapped_twice_once() -> None:
    region = capture._Region
    whole, again = region(8192, 16384, 7, 0), region(20480, 28672, 7, 0)
    part, behind = region(40960, 45056, 7, 4096), region(53248, 57344, 7, 8192)
    assert capture._apart([behind, again, part, whole]) == [again, behind]


def test_capture_leaves_out_the_zero_page_of_the_kernel(child: Child, tmp_path: Path) -> None:
    capture_process(child.pid, tmp_path / "dump")
    assert captured(tmp_path / "dump", child.unwritten) == {}


def test_capture_keeps_the_zero_page_where_it_cannot_be_known(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "_zero_frame", lambda: 0)
    capture_process(child.pid, tmp_path / "dump")
    assert whole(captured(tmp_path / "dump", child.unwritten)) == bytes(N_BYTES)


def test_capture_is_read_as_a_dump_without_warnings(child: Child, tmp_path: Path) -> None:
    stats = capture_process(child.pid, tmp_path / "dump")
    files = {path.name: path for path in (tmp_path / "dump").iterdir()}
    assert files.keys() == {
        "inventory.img",
        "pstree.img",
        f"pagemap-{child.pid}.img",
        "pages-1.img",
    }
    small = {name: path.read_bytes() for name, path in files.items() if name != "pages-1.img"}
    sizes = {"pages-1.img": files["pages-1.img"].stat().st_size}
    summary = criu.summarise(small, pages_file_bytes=sizes, has_parent_link=False)
    (process,) = summary.processes
    assert (process.pid, process.ppid, len(process.threads)) == (child.pid, 0, 2)
    assert (process.pgid, process.sid) == (os.getpgid(child.pid), os.getsid(child.pid))
    assert summary.warnings == ()
    assert stats.pages == summary.present_pages > 64
    assert stats.bytes == sizes["pages-1.img"] == stats.pages * PAGE_BYTES
    assert 1 < stats.regions <= len(Path(f"/proc/{child.pid}/maps").read_text().splitlines())
    assert stats.seconds > 0


def test_capture_is_the_same_through_a_small_block(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_good(child)  # so that both captures find the same memory
    monkeypatch.setattr(capture, "BLOCK_BYTES", 3 * PAGE_BYTES)
    monkeypatch.setattr(capture, "_BLOCK_PAGES", 3)
    small = capture_process(child.pid, tmp_path / "small")
    monkeypatch.undo()
    large = capture_process(child.pid, tmp_path / "large")
    assert (small.pages, small.regions) == (large.pages, large.regions)
    for path in (tmp_path / "large").iterdir():
        assert (tmp_path / "small" / path.name).read_bytes() == path.read_bytes()


def test_capture_goes_on_after_short_reads(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each_read(monkeypatch, lambda _: None, max_bytes=5 * PAGE_BYTES)
    capture_process(child.pid, tmp_path / "dump")
    assert whole(captured(tmp_path / "dump", child.pattern)) == random.Random(1).randbytes(N_BYTES)


def test_capture_looks_at_readable_private_mappings_of_the_program_only(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_for_good(child)
    lines = [line.split() for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()]
    expected = [
        int(span.split("-")[0], 16)
        for span, permissions, _, _, _, *names in lines
        if permissions[0] + permissions[3] == "rp" and not "".join(names).startswith("[v")
    ]
    looked_at = []
    real = capture._wanted

    def wanted(target: Any, region: Any, *more: Any) -> Iterator[tuple[int, int]]:
        looked_at.append(region.start)
        return real(target, region, *more)

    monkeypatch.setattr(capture, "_wanted", wanted)
    stats = capture_process(child.pid, tmp_path / "dump")
    assert looked_at == expected
    assert child.common not in looked_at
    assert stats.regions < len(looked_at)


def test_capture_is_for_its_owner_only(child: Child, tmp_path: Path) -> None:
    capture_process(child.pid, tmp_path / "dump")
    assert (tmp_path / "dump").stat().st_mode & 0o777 == 0o700


def test_capture_fills_an_empty_directory_and_makes_missing_parents(
    child: Child, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    capture_process(child.pid, tmp_path / "empty")
    capture_process(child.pid, tmp_path / "a" / "b")
    assert (tmp_path / "empty" / "pages-1.img").exists()
    assert (tmp_path / "a" / "b" / "pages-1.img").exists()


def test_capture_stops_the_process_and_lets_it_run_on(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    before_each_read(monkeypatch, lambda _: states.append(state_of(child.pid)))
    capture_process(child.pid, tmp_path / "dump")
    assert set(states) == {"T"}
    assert child.answers()


def test_capture_without_stopping_never_stops_the_process(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    before_each_read(monkeypatch, lambda _: states.append(state_of(child.pid)))
    capture_process(child.pid, tmp_path / "dump", stop=False)
    assert states
    assert "T" not in states


def test_a_process_that_was_stopped_before_stays_stopped(child: Child, tmp_path: Path) -> None:
    stop_for_good(child)
    capture_process(child.pid, tmp_path / "dump")
    assert state_of(child.pid) == "T"
    child.popen.send_signal(signal.SIGCONT)
    assert child.answers()


def test_a_process_that_does_not_stop_is_told_and_runs_on(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "STOP_DEADLINE_S", 0.0)
    monkeypatch.setattr(capture, "_states", lambda target: {"T", "D"})
    with pytest.raises(StoreUnavailable, match="has not stopped"):
        capture_process(child.pid, tmp_path / "out" / "dump")
    assert list((tmp_path / "out").iterdir()) == []
    assert child.answers()


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), OutOfResources),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["no-room", "interrupt"],
)
def test_a_failed_capture_leaves_nothing_and_the_process_running(
    child: Child,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    expected: type[BaseException],
) -> None:
    def fail(address: int) -> None:
        raise raised

    before_each_read(monkeypatch, fail)
    with pytest.raises(expected):
        capture_process(child.pid, tmp_path / "out" / "dump")
    assert list((tmp_path / "out").iterdir()) == []
    assert child.answers()


def test_a_process_that_ends_meanwhile_leaves_nothing(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_each_read(monkeypatch, lambda _: end(child))
    with pytest.raises(NotFound, match=str(child.pid)):
        capture_process(child.pid, tmp_path / "out" / "dump")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_process_that_ends_between_mappings_leaves_nothing(
    child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zero_frame() -> int:
        end(child)
        return 0

    regions = {0: [capture._Region(child.pattern, child.pattern + N_BYTES)]}
    monkeypatch.setattr(capture, "_zero_frame", zero_frame)
    monkeypatch.setattr(capture, "_regions", lambda target, shared: regions)
    with pytest.raises(NotFound, match=str(child.pid)):
        capture_process(child.pid, tmp_path / "out" / "dump")
    assert list((tmp_path / "out").iterdir()) == []


def test_memory_that_cannot_be_read_is_left_out_with_a_warning(
    child: Child,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hole = child.holes + 2 * PAGE_BYTES

    def fail_there(address: int) -> None:
        if address == hole:
            raise OSError(errno.EIO, "not readable")

    before_each_read(monkeypatch, fail_there)
    capture_process(child.pid, tmp_path / "dump")
    pages = captured(tmp_path / "dump", child.holes)
    assert {number: page[0] for number, page in pages.items()} == {0: 200, 7: 207}
    assert whole(captured(tmp_path / "dump", child.pattern)) == random.Random(1).randbytes(N_BYTES)
    (record,) = caplog.records
    assert f"{hole:#x}" in record.getMessage()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_capture_without_the_right_to_read_says_what_to_do(child: Child, tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(AccessDenied, match="run as root"):
            capture_process(child.pid, tmp_path / "dump")
    finally:
        os.seteuid(0)
    assert child.answers()


def test_capture_refuses_itself_threads_and_what_is_no_process(
    child: Child, tmp_path: Path
) -> None:
    (thread,) = {int(name) for name in os.listdir(f"/proc/{child.pid}/task")} - {child.pid}
    cases: list[tuple[int, type[ImageError]]] = [
        (os.getpid(), InvalidInput),
        (thread, InvalidInput),
        (-1, NotFound),
        (0, NotFound),
        (1 << 30, NotFound),
    ]
    for pid, error in cases:
        with pytest.raises(error, match="itself" if pid == os.getpid() else str(pid)):
            capture_process(pid, tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_capture_refuses_a_process_that_has_ended(child: Child, tmp_path: Path) -> None:
    end(child)
    with pytest.raises(InvalidInput, match="no memory"):
        capture_process(child.pid, tmp_path / "dump")


def test_capture_refuses_a_directory_that_is_not_empty(child: Child, tmp_path: Path) -> None:
    kept = tmp_path / "dump" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(InvalidInput, match="not an empty directory"):
        capture_process(child.pid, kept.parent)
    with pytest.raises(InvalidInput, match="not an empty directory"):
        capture_process(child.pid, kept)
    assert kept.read_text() == "mine"
    assert child.answers()


def replica(tmp_path: Path, name: str, *options: str) -> CaptureStats:
    """Start a replica, capture it into a directory of this name, end it."""
    ready = tmp_path / f"{name}.ready"
    command = [sys.executable, str(REPLICA), "--model-seed=1", "--weights-mb=4"]
    with subprocess.Popen([*command, f"--ready-file={ready}", *options]) as popen:
        try:
            deadline_s = time.monotonic() + 60
            while not ready.exists():
                assert popen.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert ready.read_text() == f"{popen.pid}\n"
            return capture_process(popen.pid, tmp_path / name)
        finally:
            popen.kill()


def pages_of(directory: Path) -> set[bytes]:
    raw = (directory / "pages-1.img").read_bytes()
    return {raw[at : at + mmap.PAGESIZE] for at in range(0, len(raw), mmap.PAGESIZE)}


def test_replicas_share_their_weights_and_a_fine_tune_most_of_them(tmp_path: Path) -> None:
    weights_pages = 4_000_000 // PAGE_BYTES
    replica(tmp_path, "first", "--order-seed=1")
    replica(tmp_path, "second", "--order-seed=2")
    replica(tmp_path, "tuned", "--order-seed=2", "--changed-layers=8")
    first, second, tuned = (pages_of(tmp_path / name) for name in ("first", "second", "tuned"))
    assert len(first & second) > weights_pages
    assert len(first & tuned) < len(first & second) - weights_pages * 0.4


def test_a_replica_ends_by_itself(tmp_path: Path) -> None:
    command = [sys.executable, str(REPLICA), "--model-seed=1", "--order-seed=1", "--weights-mb=1"]
    ready = tmp_path / "ready"
    done = subprocess.run(
        [*command, f"--ready-file={ready}", "--max-seconds=0.01"], timeout=60, check=False
    )
    assert done.returncode == 0
    assert ready.exists()
