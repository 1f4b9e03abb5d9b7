"""Reading ranges of files into slots: through the page cache where it has them, else past it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from enum import StrEnum

from imgfmt.errors import CorruptData
from transfer.oserrors import translate

PAGE_BYTES = 4096
WARM_SHARE = 0.5
"""Of the pages looked at: with more in memory a file is read through the page cache."""

MAX_OPEN = 64

_WINDOWS = 64
_WINDOW_PAGES = 16
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What says that a file can't be read past the page cache."""


class Route(StrEnum):
    """How files are read."""

    AUTO = "auto"
    BUFFERED = "buffered"
    DIRECT = "direct"


class Files:
    """Files by number, for many threads. To be closed. `named` are what messages call them.

    The first `MAX_OPEN` files that are read stay open; of others each read opens its own.
    """

    def __init__(
        self, paths: Sequence[str], named: Sequence[str], route: Route = Route.AUTO
    ) -> None:
        self.paths = paths
        self.named = named
        self._route = route
        self._direct: dict[int, bool] = {}
        self._open: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self.direct_bytes = 0

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def direct(self, file: int) -> bool:
        """Whether a file is read past the page cache. Decided at its first read."""
        found = self._direct.get(file)
        if found is None:
            if self._route is Route.AUTO:
                found = resident_share(self.paths[file]) < WARM_SHARE
            else:
                found = self._route is Route.DIRECT
            self._direct[file] = found
        return found

    def refuse_direct(self, file: int) -> None:
        """From now on the file is read through the page cache."""
        self._direct[file] = False

    def open(self, file: int, *, direct: bool) -> int:
        """A descriptor of the caller's own."""
        flag = os.O_DIRECT if direct else 0
        return os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC | flag)

    def fill(self, file: int, offset: int, n_bytes: int, view: memoryview) -> None:
        """Read `n_bytes` from `offset` on to the beginning of `view`.

        `offset` is on a page boundary, and `view`, page-aligned, has room up to the next one: past
        the page cache whole pages are read. Raises CorruptData where the file ends too early.
        """
        try:
            if self.direct(file):
                try:
                    self._read(file, offset, n_bytes, view, os.O_DIRECT)
                except OSError as error:
                    if error.errno not in NO_DIRECT:
                        raise
                    self.refuse_direct(file)
                else:
                    with self._lock:
                        self.direct_bytes += n_bytes
                    return
            self._read(file, offset, n_bytes, view, 0)
        except OSError as error:
            raise translate(error, self.named[file]) from error

    @contextlib.contextmanager
    def _opened(self, file: int, flag: int) -> Iterator[int]:
        descriptor = self.open(file, direct=bool(flag))
        with self._lock:
            keep = len(self._open) < MAX_OPEN and (file, flag) not in self._open
            if keep:
                self._open[file, flag] = descriptor
        try:
            yield descriptor
        finally:
            if not keep:
                os.close(descriptor)

    def _read(self, file: int, offset: int, n_bytes: int, view: memoryview, flag: int) -> None:
        asked = -(-n_bytes // PAGE_BYTES) * PAGE_BYTES if flag else n_bytes
        known = self._open.get((file, flag))
        if known is not None:
            self._read_from(known, file, offset, n_bytes, view[:asked])
        else:
            with self._opened(file, flag) as descriptor:
                self._read_from(descriptor, file, offset, n_bytes, view[:asked])

    def _read_from(
        self, descriptor: int, file: int, offset: int, n_bytes: int, view: memoryview
    ) -> None:
        done = 0
        while done < n_bytes:
            got = os.preadv(descriptor, [view[done:]], offset + done)
            done = self.after(file, offset, n_bytes, done, got)

    def after(self, file: int, offset: int, n_bytes: int, done: int, got: int) -> int:
        """How much of a read is done when `got` more came: where to go on, on a page boundary.

        Raises CorruptData where the file ends too early.
        """
        reached = min(n_bytes, done + got)
        if reached < n_bytes:
            reached -= reached % PAGE_BYTES
            if reached <= done:
                end = offset + n_bytes
                raise CorruptData(f"{self.named[file]} is cut short: it ends before {end}")
        return reached


def resident_share(path: str) -> float:
    """Which part of a file is in memory, from a sample of its pages; 1 where that is not told."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 1.0
    try:
        size_bytes = os.fstat(descriptor).st_size
        if not size_bytes:
            return 1.0
        with mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY) as mapped:
            return _sample(mapped, -(-size_bytes // PAGE_BYTES))
    except (OSError, ValueError):
        return 1.0
    finally:
        os.close(descriptor)


def _sample(mapped: mmap.mmap, n_pages: int) -> float:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    anchor = ctypes.c_char.from_buffer(mapped)  # writable, so that ctypes takes it: a private copy
    base = ctypes.addressof(anchor)
    del anchor
    seen = resident = 0
    window = (ctypes.c_ubyte * _WINDOW_PAGES)()
    for start in sorted({i * n_pages // _WINDOWS for i in range(_WINDOWS)}):
        count = min(_WINDOW_PAGES, n_pages - start)
        if libc.mincore(base + start * PAGE_BYTES, count * PAGE_BYTES, window):
            return 1.0
        resident += sum(page & 1 for page in window[:count])
        seen += count
    return resident / seen
