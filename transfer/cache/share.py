"""Taking chunks from one local file to another: by reflink where the filesystem can, else copied.

Chunks that follow each other in both files are one call. All of it blocks and runs on threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from imgfmt.tree import Tree
from transfer.plan import Numbers

FICLONERANGE = 0x4020940D
_RANGE = struct.Struct("<qQQQ")
_NO_CLONE = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.ENOSYS)
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Ranges to take, item by item, in order of destination: entries, offsets and lengths.

    Run `k` holds items [`first[k]`, `first[k + 1]`) of the numbers that it was made of.
    """

    source_entry: Numbers
    source_offset: Numbers
    entry: Numbers
    offset: Numbers
    length: Numbers
    first: Numbers

    def __len__(self) -> int:
        return len(self.entry)

    def by_entry(self) -> Iterator[tuple[int, int, int]]:
        """Destination entry and its runs [low, high)."""
        edges = np.flatnonzero(np.diff(self.entry, prepend=-1)).tolist()
        for low, high in zip(edges, [*edges[1:], len(self.entry)], strict=True):
            yield int(self.entry[low]), low, high


def join_runs(tree: Tree, numbers: Numbers, source: Tree, source_numbers: Numbers) -> Runs:
    """The fewest ranges that bring chunks `numbers`, which ascend, of `tree` from `source`."""
    entry = tree.chunk_entry[numbers].astype(np.int64)
    offset = tree.chunk_offset[numbers].astype(np.int64)
    length = tree.chunk_bytes[numbers].astype(np.int64)
    from_entry = source.chunk_entry[source_numbers].astype(np.int64)
    from_offset = source.chunk_offset[source_numbers].astype(np.int64)
    follows = (entry[1:] == entry[:-1]) & (from_entry[1:] == from_entry[:-1])
    follows &= offset[1:] == offset[:-1] + length[:-1]
    follows &= from_offset[1:] == from_offset[:-1] + length[:-1]
    first = np.concatenate([[0], np.flatnonzero(~follows) + 1])[: len(numbers)].astype(np.int64)
    return Runs(
        source_entry=from_entry[first],
        source_offset=from_offset[first],
        entry=entry[first],
        offset=offset[first],
        length=np.add.reduceat(length, first) if len(first) else length,
        first=np.append(first, len(numbers)),
    )


class Sharer:
    """Takes ranges from file to file, and counts the bytes.

    It remembers between which disks blocks can't be shared; `disks` are any names for the pair.
    """

    def __init__(self) -> None:
        self._apart: set[tuple[bytes, bytes]] = set()
        self.shared_bytes = 0
        self.copied_bytes = 0

    def take(
        self,
        source: int,
        source_offset: int,
        to: int,
        offset: int,
        length: int,
        *,
        disks: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        """Make `length` bytes of the file `to` those of `source`. Raises OSError.

        Raises it with EIO where the source ends before.
        """
        if disks not in self._apart:
            place = _RANGE.pack(source, source_offset, length, offset)
            try:
                fcntl.ioctl(to, FICLONERANGE, place)
            except OSError as error:
                if error.errno in _NO_CLONE:
                    self._apart.add(disks)
                elif error.errno != errno.EINVAL:  # not on its blocks
                    raise
            else:
                self.shared_bytes += length
                return
        _copy(source, source_offset, to, offset, length)
        self.copied_bytes += length


def can_clone(folder: str) -> bool:
    """Whether files of this folder's filesystem can share blocks."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    try:
        one, other = os.open(folder, flags, 0o600), os.open(folder, flags, 0o600)
    except OSError:
        return False
    try:
        os.pwrite(one, bytes(65536), 0)
        fcntl.ioctl(other, FICLONERANGE, _RANGE.pack(one, 0, 65536, 0))
    except OSError:
        return False
    finally:
        os.close(one)
        os.close(other)
    return True


def _copy(source: int, source_offset: int, to: int, offset: int, length: int) -> None:
    in_kernel = True
    while length:
        if in_kernel:
            try:
                done = os.copy_file_range(source, to, length, source_offset, offset)
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
                in_kernel = False
                continue
        else:
            piece = os.pread(source, min(length, _PIECE_BYTES), source_offset)
            done = os.pwrite(to, piece, offset) if piece else 0
        if not done:
            raise OSError(errno.EIO, "the file that is shared from ends too early")
        source_offset, offset, length = source_offset + done, offset + done, length - done
