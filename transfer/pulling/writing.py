"""Writing many pieces to a file, past the page cache if asked, and setting place aside for them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence

import numpy as np

DIRECT_BYTES = 256 * 1024
"""Less than this goes through the page cache, whatever is asked."""

_ALIGN_BYTES = 4096
_MAX_PIECES = 1024
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


def write_all(
    descriptor: int, pieces: Sequence[memoryview], offset: int, *, direct: bool = False
) -> None:
    """Write all of `pieces`, one after the other, from byte `offset` on.

    With `direct` those that begin and end on pages, in the file and in memory, are written with
    O_DIRECT where the filesystem has it.
    """
    if direct and sum(map(len, pieces)) >= DIRECT_BYTES:
        done = _aligned(pieces, offset)
        if done and _set_direct(descriptor, on=True):
            try:
                offset += _write(descriptor, pieces[:done], offset)
            finally:
                _set_direct(descriptor, on=False)
            pieces = pieces[done:]
    _write(descriptor, pieces, offset)


def preallocate(descriptor: int, offset: int, length_bytes: int) -> None:
    """Set place aside for bytes that will be written. Does nothing where there is no such thing."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_int64(offset), ctypes.c_int64(length_bytes)
    if libc.fallocate64(descriptor, _KEEP_SIZE, *place) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
            raise OSError(code, os.strerror(code))


def _write(descriptor: int, pieces: Sequence[memoryview], offset: int) -> int:
    """Write all of `pieces`; returns their length."""
    left, begin = list(pieces), offset
    while left:
        done = os.pwritev(descriptor, left[:_MAX_PIECES], offset)
        offset += done
        if done == sum(map(len, left)):  # as nearly always
            break
        whole = 0
        while whole < len(left) and done >= len(left[whole]):
            done -= len(left[whole])
            whole += 1
        left = left[whole:]
        if done:
            left[0] = left[0][done:]
    return offset - begin


def _aligned(pieces: Sequence[memoryview], offset: int) -> int:
    """How many of the first pieces can be written with O_DIRECT."""
    if offset % _ALIGN_BYTES:
        return 0
    for i, piece in enumerate(pieces):
        if len(piece) % _ALIGN_BYTES or _address(piece) % _ALIGN_BYTES:
            return i
    return len(pieces)


def _address(piece: memoryview) -> int:
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Switch O_DIRECT; False if the filesystem has no such thing."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
