"""Attributes of written files: owner, extended attributes, mode and times, as far as may be.

Only root gives files away: what others write stays theirs. What the system refuses is a warning.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from imgfmt.tree import Tree
from transfer.oserrors import printable

_SETUID, _SETGID = 0o4000, 0o2000
_CAPABILITY = b"security.capability"
_TRUSTED = b"trusted."
_REFUSALS = (errno.ENOTSUP, errno.EPERM, errno.EACCES, errno.E2BIG)


class WriterProfile(StrEnum):
    """What of a tree is written: all of it, or all but what lends rights to who runs a file."""

    FAITHFUL = "faithful"
    SANITISED = "sanitised"


class Warnings:
    """What could not be written as the tree has it: each kind once, with a count and an example."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[int, bytes]] = {}

    def add(self, kind: str, path: bytes) -> None:
        """One more path, for which `kind` is so. From any thread."""
        with self._lock:
            count, first = self._found.get(kind, (0, path))
            self._found[kind] = (count + 1, first)

    def lines(self) -> tuple[str, ...]:
        """One line a kind."""
        return tuple(
            f"{printable(first or b'.')}{f' and {count - 1} more' if count > 1 else ''}: {kind}"
            for kind, (count, first) in self._found.items()
        )


class Attributes:
    """Sets the attributes of a tree's entries. `paths` has the path of each entry."""

    def __init__(
        self, tree: Tree, paths: Sequence[bytes], profile: WriterProfile, warnings: Warnings
    ) -> None:
        self._tree = tree
        self._paths = paths
        self._profile = profile
        self._warnings = warnings
        self._may_give_away = os.geteuid() == 0
        self._with_xattrs = frozenset(tree.columns["xattr_entry"].tolist())

    def settle(self, index: int, descriptor: int) -> None:
        """Settle a file or directory that has its content, each thing after what would undo it."""
        self._settle_owner(index, partial(os.fchown, descriptor))
        self._settle_xattrs(index, descriptor)
        os.fchmod(descriptor, self._mode(index, descriptor))
        os.utime(descriptor, ns=self._times_ns(index))

    def settle_symlink(self, index: int, root: int) -> None:
        """Settle a link below the directory `root`, not what it points to."""
        path = self._paths[index]
        self._settle_owner(index, partial(os.chown, path, dir_fd=root, follow_symlinks=False))
        self._settle_xattrs(index, b"/proc/self/fd/%d/%b" % (root, path))
        os.utime(path, ns=self._times_ns(index), dir_fd=root, follow_symlinks=False)

    def warn(self, index: int, kind: str) -> None:
        """Take note of what is not as the tree has it."""
        self._warnings.add(kind, self._paths[index])

    def _settle_owner(self, index: int, change: Callable[[int, int], None]) -> None:
        if not self._may_give_away:
            return
        columns = self._tree.columns
        try:
            change(int(columns["uid"][index]), int(columns["gid"][index]))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EINVAL):
                raise
            self.warn(index, "the system refused to change the owner")

    def _settle_xattrs(self, index: int, target: int | bytes) -> None:
        if index not in self._with_xattrs:
            return
        for name, value in self._tree.entry(index).xattrs:
            if self._profile is WriterProfile.SANITISED and _lends_rights(name):
                continue
            try:
                os.setxattr(target, name, value, follow_symlinks=isinstance(target, int))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                reason = os.strerror(error.errno)
                self.warn(index, f"the system refused attribute {printable(name)} ({reason})")

    def _mode(self, index: int, descriptor: int) -> int:
        """The mode to set: set-id bits only where the owner is the one that they speak for."""
        columns = self._tree.columns
        mode = int(columns["mode"][index])
        if not mode & (_SETUID | _SETGID):
            return mode
        if self._profile is WriterProfile.SANITISED:
            return mode & ~(_SETUID | _SETGID)
        there, kept = os.fstat(descriptor), mode
        if there.st_uid != columns["uid"][index]:
            kept &= ~_SETUID
        if there.st_gid != columns["gid"][index]:
            kept &= ~_SETGID
        if kept != mode:
            self.warn(index, "set-id bits were left out, since it has another owner")
        return kept

    def _times_ns(self, index: int) -> tuple[int, int]:
        columns = self._tree.columns
        time_ns = int(columns["mtime_s"][index]) * 1_000_000_000 + int(columns["mtime_ns"][index])
        return time_ns, time_ns


def _lends_rights(xattr: bytes) -> bool:
    return xattr == _CAPABILITY or xattr.startswith(_TRUSTED)
