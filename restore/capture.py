"""Copies the memory of a live process into CRIU's image layout, without CRIU.

A memory capture for demos, benchmarks and tests: the pages of a real process, on a machine that
has no CRIU. It is not something that CRIU can restore: no registers, files, mappings or
namespaces are in it, only pages and where they were.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from imgfmt import criu
from imgfmt.errors import AccessDenied, InvalidInput, NotFound, OutOfResources, StoreUnavailable

BLOCK_BYTES = 8 << 20
PAGE_BYTES = mmap.PAGESIZE
STOP_DEADLINE_S = 5.0

_POLL_S = 0.001
_PAGES_ID = 1
_BLOCK_PAGES = BLOCK_BYTES // PAGE_BYTES
_SHARED_REGIONS = ("/memfd:", "/dev/zero (deleted)")
_KERNEL_REGIONS = ("[vdso]", "[vvar", "[vsyscall]", "[vectors]", "[sigpage]", "[uprobes]")
_STOPPED_STATES = frozenset("TtZXx")
_UNREADABLE = (errno.EIO, errno.EFAULT)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# The word of a page in /proc/PID/pagemap: Documentation/admin-guide/mm/pagemap.rst of Linux.
_WORD_BYTES = 8
_IN_MEMORY = np.uint64(1 << 63)
_IN_MEMORY_OR_SWAP = np.uint64(1 << 63 | 1 << 62)
_OF_FILE_OR_GUARD = np.uint64(1 << 61 | 1 << 58)
_GUARD = np.uint64(1 << 58)
_FRAME = np.uint64((1 << 55) - 1)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What a capture took; `seconds` until it was on disk. Regions: mappings with pages in it."""

    pages: int
    bytes: int
    seconds: float
    regions: int


@dataclass(frozen=True, slots=True)
class _Region:
    """Addresses [start, end) of one mapping. Of shared memory: which, and where in it it begins."""

    start: int
    end: int
    shared_id: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Target:
    """Open handles to one process. They stay with it if its id is given to another process."""

    pid: int
    pid_fd: int
    proc_fd: int
    memory_fd: int
    pagemap_fd: int


def capture_process(
    pid: int, directory: Path, *, stop: bool = True, shared: bool = False
) -> CaptureStats:
    """Copy the private memory of process `pid` into `directory`, which is new or empty.

    A memory capture in CRIU's layout for demos, benchmarks and tests, not something that CRIU can
    restore. Taken are the pages that CRIU would dump: those of private mappings, in memory or
    swapped out, that are not unchanged pages of a file. Left out are shared mappings, mappings
    without read permission or of the kernel ([vdso], ...), pages that can't be read (a warning is
    logged), and the kernel's zero page if the caller may see page frames (root); otherwise it is
    kept as zeros.

    With `shared`, memory that is shared without a file of a name (memfd, or anonymous) is taken
    too, as far as this process has written or read it: CUDA keeps page-locked memory there.

    The process is stopped (SIGSTOP) while it is copied and continued afterwards whatever happens,
    unless it was stopped before. Its parent notices. If this process is killed meanwhile, the
    other stays stopped: `kill -CONT` it. With `stop=False` it runs on, and its pages may be of
    different moments.

    `directory` appears once it is complete and on disk, for its owner only: it holds every secret
    of the process. After an error nothing is left. Raises NotFound if there is no such process or
    it ends meanwhile, AccessDenied without the right to read it, InvalidInput for this process
    itself, a thread, a kernel thread or a directory that is not empty, StoreUnavailable if it
    doesn't stop within STOP_DEADLINE_S, OutOfResources if there is no room.
    """
    if pid == os.getpid():
        raise InvalidInput("a process can't capture itself: it would have to stop")
    started_s = time.monotonic()
    with _opened(pid) as target, _staged(directory.absolute()) as staging:
        with _stopped(target) if stop else nullcontext():
            process = _process(target)
            found = _regions(target, shared=shared)
            copied = [_copy(target, found.pop(0, []), _PAGES_ID, f"{pid}", staging)]
            for pages_id, (shared_id, regions) in enumerate(found.items(), _PAGES_ID + 1):
                copied.append(_copy(target, regions, pages_id, f"shmem-{shared_id}", staging))
        (staging / criu.PSTREE_FILE).write_bytes(criu.encode_pstree([process]))
        (staging / criu.INVENTORY_FILE).write_bytes(criu.encode_inventory(criu.Inventory()))
    seconds = time.monotonic() - started_s
    n_pages = sum(pages for pages, _ in copied)
    return CaptureStats(n_pages, n_pages * PAGE_BYTES, seconds, sum(n for _, n in copied))


@contextmanager
def _opened(pid: int) -> Iterator[_Target]:
    with ExitStack() as stack:

        def owned(fd: int) -> int:
            stack.callback(os.close, fd)
            return fd

        with _explained(pid):
            proc_fd = owned(os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY))
            status = _read(proc_fd, "status").splitlines()
            if f"Tgid:\t{pid}" not in status:
                raise InvalidInput(f"{pid} is a thread: give the id of its process")
            if not any(line.startswith("VmSize:") for line in status):
                raise InvalidInput(f"process {pid} has no memory: a kernel thread, or it has ended")
            target = _Target(
                pid=pid,
                pid_fd=owned(os.pidfd_open(pid)),
                proc_fd=proc_fd,
                memory_fd=owned(os.open("mem", os.O_RDONLY, dir_fd=proc_fd)),
                pagemap_fd=owned(os.open("pagemap", os.O_RDONLY, dir_fd=proc_fd)),
            )
        yield target


@contextmanager
def _explained(pid: int) -> Iterator[None]:
    """Says in our errors what Linux answers about process `pid`. Only for calls about it."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"there is no process {pid}, or it ended during the capture") from error
    except PermissionError as error:
        raise AccessDenied(
            f"the memory of process {pid} can't be read: run as root, or as the user of the process"
            " where ptrace is allowed (sysctl kernel.yama.ptrace_scope)"
        ) from error


@contextmanager
def _staged(directory: Path) -> Iterator[Path]:
    """A new directory that becomes `directory` at the end, or is removed after an error."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput(f"{directory} exists and is not an empty directory: choose another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
        for path in [*staging.iterdir(), staging]:
            _sync(path)
        staging.rename(directory)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise OutOfResources(f"no room for a capture in {directory.parent}") from error
        raise
    _sync(directory.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _stopped(target: _Target) -> Iterator[None]:
    """The process stands still inside, and runs again afterwards if it ran before."""
    if _states(target) <= _STOPPED_STATES:
        yield
        return
    try:
        with _explained(target.pid):
            signal.pidfd_send_signal(target.pid_fd, signal.SIGSTOP)
        # The signal only asks: a thread stops when it leaves the kernel.
        deadline_s = time.monotonic() + STOP_DEADLINE_S
        while not _states(target) <= _STOPPED_STATES:
            if time.monotonic() > deadline_s:
                raise StoreUnavailable(
                    f"process {target.pid} has not stopped after {STOP_DEADLINE_S:g} s: a thread"
                    " hangs in a system call, try again later"
                )
            time.sleep(_POLL_S)
        yield
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(target.pid_fd, signal.SIGCONT)


def _states(target: _Target) -> set[str]:
    """The states of the threads, as letters of /proc/PID/stat."""
    states = set()
    for thread in _threads(target):
        with suppress(FileNotFoundError, ProcessLookupError):  # this thread has ended
            states.add(_stat(target, f"task/{thread}/stat")[0])
    return states


def _threads(target: _Target) -> tuple[int, ...]:
    with _explained(target.pid):
        fd = os.open("task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=target.proc_fd)
        try:
            return tuple(sorted(int(name) for name in os.listdir(fd)))
        finally:
            os.close(fd)


def _stat(target: _Target, name: str) -> list[str]:
    """State, parent, group, session, ...: what follows the program's name."""
    return _read(target.proc_fd, name).rpartition(")")[2].split()


def _read(proc_fd: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY, dir_fd=proc_fd), "rb") as file:
        return file.read().decode("utf-8", "surrogateescape")


def _process(target: _Target) -> criu.Process:
    """As in a dump of this process alone: it is the root, so no parent is named."""
    with _explained(target.pid):
        _, _, group, session, *_ = _stat(target, "stat")
    return criu.Process(target.pid, 0, int(group), int(session), _threads(target))


def _regions(target: _Target, *, shared: bool) -> dict[int, list[_Region]]:
    """The mappings that are captured, ascending: under 0 private ones, else by what they share."""
    with _explained(target.pid):
        lines = _read(target.proc_fd, "maps").splitlines()
    found: dict[int, list[_Region]] = {0: []}
    for line in lines:
        span, permissions, offset, _, inode, name = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(text, 16) for text in span.split("-"))
        if permissions[0] != "r" or name.startswith(_KERNEL_REGIONS):
            continue
        if permissions[3] == "p":
            found[0].append(_Region(start, end))
        elif shared and name.startswith(_SHARED_REGIONS):
            region = _Region(start, end, int(inode), int(offset, 16))
            found.setdefault(region.shared_id, []).append(region)
    return {of: _apart(regions) if of else regions for of, regions in found.items()}


def _apart(regions: Sequence[_Region]) -> list[_Region]:
    """Mappings of one thing by where they begin in it, without those of what was mapped before."""
    kept: list[_Region] = []
    end = 0
    for region in sorted(regions, key=lambda region: (region.offset, -region.end)):
        if region.offset >= end:
            kept.append(region)
            end = region.offset + region.end - region.start
    return kept


def _copy(
    target: _Target, regions: Sequence[_Region], pages_id: int, name: str, folder: Path
) -> tuple[int, int]:
    """Write the pages of some mappings and what is where. Returns counts of pages and regions."""
    entries, n_regions = _copy_pages(target, regions, folder / f"pages-{pages_id}.img")
    pagemap = criu.Pagemap(pages_id, entries)
    (folder / f"pagemap-{name}.img").write_bytes(criu.encode_pagemap(pagemap))
    return pagemap.present_pages, n_regions


def _copy_pages(
    target: _Target, regions: Sequence[_Region], path: Path
) -> tuple[tuple[criu.PagemapEntry, ...], int]:
    """Write the pages file. Returns what is in it, and of how many regions."""
    zero_frame = _zero_frame()
    block = memoryview(bytearray(BLOCK_BYTES))
    filled = n_regions = 0
    runs: list[tuple[int, int]] = []
    with path.open("xb") as file:
        for region in regions:
            n_before = len(runs)
            shift = region.start - region.offset if region.shared_id else 0
            for address, n_pages in _wanted(target, region, zero_frame):
                n_bytes = n_pages * PAGE_BYTES
                if filled + n_bytes > BLOCK_BYTES:
                    file.write(block[:filled])
                    filled = 0
                if _read_memory(target, address, block[filled : filled + n_bytes]):
                    runs.append((address - shift, n_pages))
                    filled += n_bytes
            n_regions += len(runs) > n_before
        file.write(block[:filled])
    return _merged(runs), n_regions


def _wanted(target: _Target, region: _Region, zero_frame: np.uint64) -> Iterator[tuple[int, int]]:
    """Runs of pages to copy, as address and count of pages; none is larger than a block."""
    start, end = region.start, region.end
    unwanted = _GUARD if region.shared_id else _OF_FILE_OR_GUARD
    step_pages = BLOCK_BYTES // _WORD_BYTES
    for first in range(start, end, step_pages * PAGE_BYTES):
        n_pages = min(step_pages, (end - first) // PAGE_BYTES)
        place = first // PAGE_BYTES * _WORD_BYTES
        words = np.frombuffer(os.pread(target.pagemap_fd, n_pages * _WORD_BYTES, place), np.uint64)
        if len(words) < n_pages:
            raise NotFound(f"process {target.pid} ended during the capture")
        wanted = (words & _IN_MEMORY_OR_SWAP != 0) & (words & unwanted == 0)
        if zero_frame:
            wanted &= words & (_IN_MEMORY | _FRAME) != _IN_MEMORY | zero_frame
        edges = np.flatnonzero(np.diff(wanted, prepend=False, append=False))
        for begin, stop in edges.reshape(-1, 2).tolist():
            for page in range(begin, stop, _BLOCK_PAGES):
                yield first + page * PAGE_BYTES, min(_BLOCK_PAGES, stop - page)


def _zero_frame() -> np.uint64:
    """The page frame of the kernel's zero page; 0 if this process may not know it."""
    with mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as page:
        page.read(1)  # where nothing was written, reading maps the zero page
        view = np.frombuffer(page, dtype=np.uint8)
        place = view.ctypes.data // PAGE_BYTES * _WORD_BYTES
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            word = os.pread(pagemap.fileno(), _WORD_BYTES, place)
        del view  # or the mapping can't be closed
    return np.uint64(np.frombuffer(word, dtype=np.uint64)[0] & _FRAME)


def _read_memory(target: _Target, address: int, into: memoryview) -> bool:
    """Fill `into` from `address` on. False if the memory there can't be read."""
    done = 0
    while done < len(into):
        try:
            n_bytes = os.preadv(target.memory_fd, [into[done:]], address + done)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            _log.warning(
                "process %d: %d bytes at %#x can't be read", target.pid, len(into), address
            )
            return False
        if n_bytes == 0:
            raise NotFound(f"process {target.pid} ended during the capture")
        done += n_bytes
    return True


def _merged(runs: list[tuple[int, int]]) -> tuple[criu.PagemapEntry, ...]:
    """Entries of a pagemap, with runs that follow each other as one."""
    joined: list[tuple[int, int]] = []
    for address, n_pages in runs:
        if joined and joined[-1][0] + joined[-1][1] * PAGE_BYTES == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + n_pages)
        else:
            joined.append((address, n_pages))
    return tuple(criu.PagemapEntry(address, n_pages) for address, n_pages in joined)
