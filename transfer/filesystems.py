"""Facts about the filesystem under a path, from the mount table."""

from __future__ import annotations

import ctypes
import os

_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "lustre", "9p", "afs", "beegfs")


def filesystem_type(path: str) -> str:
    """Type of the filesystem that holds `path` ("ext4"), or "" where the mount table lacks it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, rest = line.partition(" - ")
            if fields.split(" ", 3)[2] == wanted:
                return rest.split(" ", 1)[0]
    return ""


def is_remote(path: str) -> bool:
    """Whether files under `path` can vanish with a network: they are then never mapped."""
    kind = filesystem_type(path)
    return kind in _REMOTE or kind.startswith("fuse")


def sync_filesystem(path: str) -> None:
    """Write back everything of the filesystem that holds `path` (`syncfs(2)`). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
    finally:
        os.close(descriptor)
