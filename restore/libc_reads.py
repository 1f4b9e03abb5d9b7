"""Reads that threads of the C library make (POSIX `aio_read`): Python's lock plays no part in them.

Requests for one descriptor are served one after the other by glibc, so each needs a descriptor of
its own to be served beside others. `N_THREADS` are served at a time; with some more that wait, no
thread sleeps between two.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from functools import lru_cache

N_THREADS = max(2, min(12, (os.cpu_count() or 1) * 3 // 4))
"""More take CPUs from the thread that sends what was read, and the bandwidth of memory from the
device: 12 of 16 CPUs did best (`make bench BENCH=load`)."""

_SIGEV_NONE = 1
_N_REQUESTS = 64  # that glibc makes room for at first
_IDLE_S = 1
_TRIAL = b"snapcask reads by the C library"


class Request(ctypes.Structure):
    """`struct aiocb` of 64-bit Linux, the same in glibc and musl."""

    _fields_ = (
        ("descriptor", ctypes.c_int),
        ("_opcode", ctypes.c_int),
        ("_priority", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("n_bytes", ctypes.c_size_t),
        ("_signal_value", ctypes.c_uint64),
        ("_signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_of_the_library", ctypes.c_ubyte * 80),
        ("offset", ctypes.c_int64),
        ("_reserved", ctypes.c_ubyte * 32),
    )


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class LibcReads:
    """Up to `n` reads at a time, known by numbers below `n`. For one thread. To be closed.

    Raises OSError where the C library has no such reads.
    """

    def __init__(self, n: int) -> None:
        quick, patient = _libraries()
        self._read, self._error, self._return = quick.aio_read, quick.aio_error, quick.aio_return
        self._cancel, self._suspend = patient.aio_cancel, patient.aio_suspend
        self._requests = (Request * n)()
        self._places = [ctypes.addressof(request) for request in self._requests]
        self._under_way = (ctypes.c_uint64 * n)()  # addresses of requests, 0 where there is none
        for request in self._requests:
            request.notify = _SIGEV_NONE

    def begin(self, number: int, descriptor: int, offset: int, address: int, n_bytes: int) -> None:
        """Have `n_bytes` from `offset` on read to memory. Raises OSError."""
        request = self._requests[number]
        request.descriptor, request.offset = descriptor, offset
        request.address, request.n_bytes = address, n_bytes
        if self._read(self._places[number]):
            code = ctypes.get_errno() or errno.EAGAIN
            raise OSError(code, os.strerror(code))
        self._under_way[number] = self._places[number]

    def result(self, number: int) -> int | None:
        """How many bytes a read brought; None while it is under way. Raises OSError."""
        code = self._error(self._places[number])
        if code == errno.EINPROGRESS:
            return None
        self._under_way[number] = 0
        found: int = self._return(self._places[number])
        if code:
            raise OSError(code, os.strerror(code))
        return found

    def wait(self, timeout_s: float) -> None:
        """Sleep until one that was under way has ended, if there is one, or for that long."""
        limit = _Time(0, int(timeout_s * 1e9))
        self._suspend(self._under_way, len(self._under_way), ctypes.byref(limit))

    def close(self) -> None:
        """End all reads: nobody writes to their memory afterwards."""
        for number, place in enumerate(self._under_way):
            if place:
                self._cancel(self._requests[number].descriptor, place)
        while any(self._under_way):
            for number, place in enumerate(self._under_way):
                if place and self._error(place) != errno.EINPROGRESS:
                    self._under_way[number] = 0
                    self._return(place)
            self.wait(0.1)


@lru_cache(maxsize=1)
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """The functions, for calls that return at once, and for those that may take a while."""
    for name in (None, "librt.so.1"):  # glibc before 2.34 has them there
        try:
            quick, patient = ctypes.PyDLL(name, use_errno=True), ctypes.CDLL(name, use_errno=True)
            quick.aio_read.argtypes = quick.aio_error.argtypes = [ctypes.c_uint64]
            quick.aio_return.argtypes, quick.aio_return.restype = (
                [ctypes.c_uint64],
                ctypes.c_ssize_t,
            )
            patient.aio_cancel.argtypes = [ctypes.c_int, ctypes.c_uint64]
            patient.aio_suspend.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        except (OSError, AttributeError):
            continue
        with suppress(AttributeError):  # musl has a thread for each request
            # struct aioinit; without effect where another library made such reads before
            settings = (ctypes.c_int * 8)(N_THREADS, _N_REQUESTS, 0, 0, 0, 0, _IDLE_S, 0)
            patient.aio_init(settings)
        return quick, patient
    raise OSError(errno.ENOSYS, "the C library has no aio_read")


@lru_cache(maxsize=1)
def can_read() -> bool:
    """Whether such a read brings the right bytes here: tried once."""
    try:
        reads, found = LibcReads(1), bytearray(len(_TRIAL))
        descriptor = os.memfd_create("snapcask-trial", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, b"-" + _TRIAL)
            address = ctypes.addressof(ctypes.c_char.from_buffer(found))
            reads.begin(0, descriptor, 1, address, len(found))
            while (n_bytes := reads.result(0)) is None:
                reads.wait(0.01)
            return n_bytes == len(_TRIAL) and found == _TRIAL
        finally:
            os.close(descriptor)
    except OSError:
        return False
