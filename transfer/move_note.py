"""A note of what is about to be moved up into a target, so that a pull killed meanwhile can go on.

It names each entry and its inode number, which a move keeps: an entry of the same name that
somebody else made is not taken for ours. All of it blocks and belongs on a thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

NOTE = b".snapcask-partial.moving"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def write_note(names: Sequence[bytes], source: int, target: int, *, fsync: bool) -> None:
    """Note in the directory `target` that entries of the directory `source` will be moved to it."""
    lines = [
        b"%d %b" % (os.stat(name, dir_fd=source, follow_symlinks=False).st_ino, name)
        for name in names
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
    try:
        descriptor = os.open(NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
    except FileNotFoundError:
        return set()
    with open(descriptor, "rb") as file:
        *lines, _ = file.read().split(b"\0")
    return {
        name for inode, _, name in (line.partition(b" ") for line in lines)
        if _inode(name, target) == int(inode)
    }  # fmt: skip


def _inode(name: bytes, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return -1
