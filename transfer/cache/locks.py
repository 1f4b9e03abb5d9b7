"""Locks between processes of one machine, by `flock(2)`: the kernel drops them with the process.

A lock is a file. It may be removed by who holds it exclusively, so whoever gets one looks whether
the file still has its name. Never used on network filesystems.
"""

from __future__ import annotations

import errno
import fcntl
import os
from types import TracebackType
from weakref import WeakSet

_held: WeakSet[Lock] = WeakSet()


class Lock:
    """A held lock. Close it, or use it as a context manager. Child processes don't inherit it."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        _held.add(self)

    def write(self, note: bytes) -> None:
        """Replace what the file says of its holder."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, note, 0)

    def share(self) -> None:
        """Turn an exclusive lock into a shared one; others may have it in between."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the file of an exclusive lock; others make a new one."""
        os.unlink(self.path)

    def close(self) -> None:
        """Let go. Does nothing the second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def lock(path: str, *, shared: bool = False, wait: bool = True) -> Lock | None:
    """Lock the file at `path`, which is made if absent. None if it is held and not waited for."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
            current = _is_at(path, descriptor)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        if current:
            return Lock(path, descriptor)
        os.close(descriptor)


def waited(path: str, *, shared: bool = False) -> Lock:
    """Wait for the lock; only for those that are held shortly."""
    found = lock(path, shared=shared)
    assert found is not None
    return found


def lock_open(path: str, descriptor: int) -> Lock:
    """Lock a file that this process has just made, and nobody else knows of, exclusively."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Lock(path, descriptor)


def is_held(path: str) -> bool:
    """Whether somebody holds the lock exclusively now. A file that is absent is not held."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return True
        raise
    finally:
        os.close(descriptor)
    return False


def _is_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _forget() -> None:
    """In a forked child: its copies of the descriptors would keep the parent's locks alive."""
    for held in list(_held):
        held.close()


os.register_at_fork(after_in_child=_forget)
