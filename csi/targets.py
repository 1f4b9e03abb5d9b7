"""Where volumes are mounted: looking at targets without following or touching what is there.

A target is never opened or stat'ed through: a dead network or FUSE mount would hang or fail. What
is mounted is learned from the kernel's own flags and the mount table. All of it blocks.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct
from dataclasses import dataclass
from enum import Enum

from csi.errors import Unmet
from imgfmt.errors import InvalidInput
from transfer.mounts import MountEntry, mount_table
from transfer.oserrors import printable, translate

_AT_FDCWD = -100
_FLAGS = 0x100 | 0x800 | 0x4000  # AT_SYMLINK_NOFOLLOW, AT_NO_AUTOMOUNT, AT_STATX_DONT_SYNC
_MASK = 0x1 | 0x2  # STATX_TYPE, STATX_MODE
_STATX_BYTES = 256
_ATTRIBUTES_AT, _MODE_AT, _ATTRIBUTES_MASK_AT = 8, 28, 56
_MOUNT_ROOT = 0x2000  # STATX_ATTR_MOUNT_ROOT, Linux 5.8
_DEAD = (errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EHOSTDOWN)


class TargetState(Enum):
    """What is at a target. `mounted` says nothing of by whom."""

    ABSENT = "absent"
    DIRECTORY = "directory"
    MOUNTED = "mounted"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class KubeletFolder:
    """Kubelet's folder: as it is written, and as the mount table has it."""

    given: str
    real: str

    @classmethod
    def find(cls, path: str) -> KubeletFolder:
        """Raises Unmet if it is not there."""
        if not os.path.isdir(path):
            raise Unmet(f"kubeletDir {printable(path)} is not there; mount the host's at this path")
        return cls(path, os.path.realpath(path))

    def resolve(self, target: str) -> str:
        """The target as the mount table has it. Raises InvalidInput if it is outside.

        Folders above it must not be symbolic links: they are kubelet's own.
        """
        for base in (self.given, self.real):
            if target.startswith(base + "/"):
                below = target[len(base) + 1 :]
                break
        else:
            raise InvalidInput(
                f"target_path {printable(target)} is not in kubelet's folder"
                f" {printable(self.given)}; set kubeletDir to where that is"
            )
        parts = below.split("/")
        at = self.real
        for part in parts[:-1]:
            at = os.path.join(at, part)
            try:
                found = os.lstat(at)
            except FileNotFoundError:
                break
            except OSError as error:
                raise translate(error, printable(at)) from error
            if stat.S_ISLNK(found.st_mode):
                raise InvalidInput(
                    f"target_path {printable(target)}: {printable(at)} is a symbolic link"
                )
        return os.path.join(self.real, below)

    def is_shared(self) -> bool:
        """Whether what is mounted in it reaches other mount namespaces, such as the host's."""
        best: MountEntry | None = None
        for entry in mount_table():
            inside = self.real == entry.directory or self.real.startswith(
                entry.directory.rstrip("/") + "/"
            )
            if inside and (best is None or len(entry.directory) >= len(best.directory)):
                best = entry
        return best is not None and best.shared


@functools.cache
def _libc() -> ctypes.CDLL:
    """Loaded once: each loading makes new classes."""
    return ctypes.CDLL(None, use_errno=True)


def look(path: str) -> TargetState:
    """What is at `path`, without waiting for a filesystem that may be dead."""
    libc = _libc()
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if libc.statx(_AT_FDCWD, os.fsencode(path), _FLAGS, _MASK, found) != 0:
        code = ctypes.get_errno()
        if code in (errno.ENOENT, errno.ENOTDIR):
            return TargetState.ABSENT
        if code in _DEAD:
            return TargetState.MOUNTED
        raise translate(OSError(code, os.strerror(code)), printable(path))
    (attributes,) = struct.unpack_from("<Q", found.raw, _ATTRIBUTES_AT)
    (known,) = struct.unpack_from("<Q", found.raw, _ATTRIBUTES_MASK_AT)
    (mode,) = struct.unpack_from("<H", found.raw, _MODE_AT)
    if known & _MOUNT_ROOT:
        mounted = bool(attributes & _MOUNT_ROOT)
    else:
        mounted = any(entry.directory == path for entry in mount_table())
    if mounted:
        return TargetState.MOUNTED
    return TargetState.DIRECTORY if stat.S_ISDIR(mode) else TargetState.OTHER


def make_target(path: str) -> None:
    """Make the directory to mount at, or take an empty one that is there. Raises Unmet."""
    shown = printable(path)
    match look(path):
        case TargetState.ABSENT:
            try:
                os.mkdir(path, 0o750)
            except FileNotFoundError:
                above = printable(os.path.dirname(path))
                raise Unmet(f"target {shown}: {above} is not there; kubelet makes it") from None
            except OSError as error:
                raise translate(error, f"target {shown}") from error
        case TargetState.DIRECTORY:
            if os.listdir(path):
                raise Unmet(f"target {shown} is a directory that is not empty; empty it")
        case TargetState.MOUNTED:
            raise Unmet(f"target {shown} is mounted already, by someone else; unmount it")
        case TargetState.OTHER:
            kind = "symbolic link" if os.path.islink(path) else "file"
            raise Unmet(f"target {shown} is a {kind}; remove it")


def remove_target(path: str) -> None:
    """Remove the directory of a target if it is there. Raises Unmet if it is not empty."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        return  # not made by us
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise Unmet(
                f"target {printable(path)} holds files that are not of the volume; remove them"
            ) from error
        raise translate(error, f"target {printable(path)}") from error
