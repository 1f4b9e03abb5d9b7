"""A note of what is about to be moved up into a target, so that a pull killed meanwhile can go on.

It names each entry, and its inode number, time and size, which a move keeps: an entry of the same
name that somebody else made is not taken for ours, nor one that was changed since taken for good.
All of it blocks and belongs on a thread.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transfer.pulling.names import NOTE

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_N_FIELDS = 4


@dataclass(frozen=True, slots=True)
class _Noted:
    """One entry, as it was before it was moved."""

    name: bytes
    inode: int
    mtime_ns: int
    size_bytes: int

    def line(self) -> bytes:
        """What stands in the note, without the NUL."""
        return b"%d %d %d %b" % (self.inode, self.mtime_ns, self.size_bytes, self.name)


def write_note(names: Sequence[bytes], source: int, target: int, *, fsync: bool) -> None:
    """Note in the directory `target` that entries of the directory `source` will be moved to it."""
    lines = [
        _noted(name, os.stat(name, dir_fd=source, follow_symlinks=False)).line() for name in names
    ]
    descriptor = os.open(NOTE, _NEW_FILE, 0o600, dir_fd=target)
    with open(descriptor, "wb") as file:
        file.write(b"\0".join([*lines, b""]))
        file.flush()
        if fsync:
            os.fsync(descriptor)
            os.fsync(target)


def moved_entries(target: int) -> set[bytes]:
    """Names of the entries of `target` that were moved there as a note says."""
    noted, _ = _read_note(target)
    return {item.name for item in noted if _is_there(item, target)}


def is_untouched(hidden: str, target: int) -> bool:
    """Whether all that a note names is in `target` as it was moved, or in `hidden` still.

    What lies deeper was changed before the note was written, and not after it.
    """
    noted, written_ns = _read_note(target)
    if not noted:
        return os.path.isdir(hidden)  # killed before it had written the note
    moved = {item.inode for item in noted}  # their change times are those of their moves
    try:
        for item in noted:
            folder = b"/proc/self/fd/%d" % target
            if not _is_there(item, target):
                folder = os.fsencode(hidden)
            path = os.path.join(folder, item.name)
            now = os.lstat(path)
            if _noted(item.name, now) != item:
                return False
            if stat.S_ISDIR(now.st_mode) and any(
                below.st_ctime_ns > written_ns and below.st_ino not in moved
                for below in _all_below(path)
            ):
                return False
    except OSError:  # gone, or closed to us
        return False
    return True


def _noted(name: bytes, there: os.stat_result) -> _Noted:
    return _Noted(name, there.st_ino, there.st_mtime_ns, there.st_size)


def _read_note(target: int) -> tuple[list[_Noted], int]:
    """What a note names, and when it was written; nothing if there is none."""
    try:
        descriptor = os.open(NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
    except FileNotFoundError:
        return [], 0
    with open(descriptor, "rb") as file:
        *lines, _ = file.read().split(b"\0")
        written_ns = os.fstat(descriptor).st_ctime_ns
    found = []
    for fields in (line.split(b" ", _N_FIELDS - 1) for line in lines):
        if len(fields) == _N_FIELDS:
            inode, mtime_ns, size_bytes = map(int, fields[:-1])
            found.append(_Noted(fields[-1], inode, mtime_ns, size_bytes))
    return found, written_ns


def _all_below(top: bytes) -> Iterator[os.stat_result]:
    for path, directories, files in os.walk(top, onerror=_raise):
        for below in directories + files:
            yield os.lstat(os.path.join(path, below))


def _raise(error: OSError) -> None:
    raise error


def _is_there(item: _Noted, folder: int) -> bool:
    there = _status(item.name, folder)
    return there is not None and there.st_ino == item.inode


def _status(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
