"""A pool of page-locked, page-aligned host memory: made once, lent out, never grown.

What it lends is cut into buffers by `Arena.allocate`, an `Allocator` of `transfer.buffers`: the
engine then receives straight into memory that devices copy from.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from imgfmt.errors import InvalidInput, OutOfResources
from restore.driver import Driver
from restore.host_driver import address_of
from restore.numa import cpus_near, on_cpus

PIECE_BYTES = 256 << 20
"""Registered at a time: large, since each registration costs, yet far from what drivers refuse."""

PAGE_BYTES = mmap.PAGESIZE
_HUGE_PAGE_BYTES = 2 << 20
_POISON = 0xDB
_TOUCHERS = 8
_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


class Arena:
    """A part of a pool, lent. Its buffers are the pool's: keep none beyond the lending.

    `shared` has descriptor, address and length of each piece if other processes may map it.
    """

    def __init__(
        self, views: list[memoryview], shared: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        self.shared = shared
        self._views = views
        self._left = list(views)
        self._lock = threading.Lock()
        self.size_bytes = sum(map(len, views))

    def reset(self) -> None:
        """Forget all buffers, which nobody may use any more."""
        with self._lock:
            self._left = list(self._views)

    def allocate(self, length_bytes: int) -> memoryview:
        """A page-aligned buffer, of the smallest piece that has room. Raises OutOfResources."""
        taken = -(-length_bytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            fits = [index for index, view in enumerate(self._left) if len(view) >= taken]
            if fits:
                index = min(fits, key=lambda index: len(self._left[index]))
                view = self._left[index]
                self._left[index] = view[taken:]
                return view[:length_bytes]
        raise OutOfResources(
            f"the pool of {self.size_bytes} page-locked bytes has no {length_bytes} left;"
            " allow more pinned memory"
        )


class PinnedPool:
    """`size_bytes` of page-locked memory, near `device` where the machine tells. To be closed.

    Memory is lent to one holder at a time; others wait. With `poison` it is overwritten at the
    return, so that who uses it later sees. `shared` memory may be mapped by other processes.
    `setup_s` is how long making it took. Raises OutOfResources where that much can't be had or
    locked.
    """

    def __init__(
        self,
        driver: Driver,
        size_bytes: int,
        *,
        device: int = 0,
        poison: bool = False,
        shared: bool = False,
    ) -> None:
        if size_bytes < PAGE_BYTES:
            raise InvalidInput(f"a pool of {size_bytes} bytes holds nothing")
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        if driver.kind != "cpu":  # which locks nothing
            check_budget(self.size_bytes)
        self._driver = driver
        self._poison = poison
        self._shared = shared
        self._descriptors: list[int] = []
        self._lent = threading.Lock()
        self._pieces: list[tuple[mmap.mmap, memoryview]] = []
        self._locked: list[int] = []
        begun_s = time.monotonic()
        try:
            self._make(cpus_near(driver.describe(device).pci_address))
        except BaseException:
            self.close()
            raise
        self.setup_s = time.monotonic() - begun_s

    def _make(self, cpus: frozenset[int]) -> None:
        left = self.size_bytes
        while left:
            length = min(left, PIECE_BYTES)
            try:
                piece = self._map(length)
            except OSError as error:
                raise OutOfResources(f"{length} bytes of host memory can't be had") from error
            self._pieces.append((piece, memoryview(piece)))
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                piece.madvise(mmap.MADV_HUGEPAGE)
            left -= length
        touched = [view for _, view in self._pieces]
        with ThreadPoolExecutor(_TOUCHERS, thread_name_prefix="snapcask-touch") as threads:
            list(threads.map(lambda view: _touch(view, cpus), _parts(touched)))
        for view in touched:
            address = address_of(view)
            self._driver.register(address, len(view))
            self._locked.append(address)

    def _map(self, length: int) -> mmap.mmap:
        if not self._shared:
            return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        descriptor = os.memfd_create("snapcask-pool", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, length)
        return mmap.mmap(descriptor, length)

    @contextlib.contextmanager
    def lend(self) -> Iterator[Arena]:
        """All of the pool's memory; waits while somebody else has it."""
        with self._lent:
            views = [view for _, view in self._pieces]
            if not views:
                raise InvalidInput("the pool was closed")
            places = zip(self._descriptors, views, strict=False)
            shared = [(fd, address_of(view), len(view)) for fd, view in places]
            try:
                yield Arena(views, shared)
            finally:
                if self._poison:
                    for view in views:
                        np.frombuffer(view, np.uint8).fill(_POISON)

    def close(self) -> None:
        """Unlock and give back all memory, which nobody may use. Does nothing the second time."""
        failed: BaseException | None = None
        while self._locked:
            try:
                self._driver.unregister(self._locked.pop())
            except Exception as error:
                failed = failed or error
        while self._pieces:
            piece, view = self._pieces.pop()
            view.release()
            with contextlib.suppress(BufferError):  # a view of it is left: it goes with the view
                piece.close()
        while self._descriptors:
            os.close(self._descriptors.pop())
        if failed is not None:
            raise failed

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_budget(size_bytes: int) -> None:
    """Raise OutOfResources if this process may not lock that much memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() and soft != resource.RLIM_INFINITY and size_bytes > soft:
        raise OutOfResources(
            f"{size_bytes} bytes are to be page-locked and `ulimit -l` allows {soft}; raise it"
        )
    for name in _CGROUP_LIMITS:
        limit = _cgroup_limit(Path(name))
        if limit is not None and size_bytes > limit // 2:
            raise OutOfResources(
                f"{size_bytes} bytes are to be page-locked, more than half of the {limit} that"
                " this container may use; allow less pinned memory"
            )


def _cgroup_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _parts(views: list[memoryview]) -> list[memoryview]:
    step = 16 * _HUGE_PAGE_BYTES
    return [view[start : start + step] for view in views for start in range(0, len(view), step)]


def _touch(view: memoryview, cpus: frozenset[int]) -> None:
    """Have the kernel give the pages, near these CPUs."""
    with on_cpus(cpus):
        np.frombuffer(view, np.uint8)[::PAGE_BYTES] = 0
