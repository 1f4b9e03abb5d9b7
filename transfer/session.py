"""Which boot of the machine, and which mount of the filesystem, something was written in.

Within one session, what a process wrote can be read back though it was killed. In another one, only
what had been synced is sure.
"""

from __future__ import annotations

import ctypes
import os
import struct

SESSION_BYTES = 16

_MOUNT_ID_UNIQUE = 0x4000  # STATX_MNT_ID_UNIQUE, Linux 6.8: never used again, unlike the plain one
_EMPTY_PATH = 0x1000  # AT_EMPTY_PATH
_STATX_BYTES = 256
_MASK_AT, _MOUNT_ID_AT = 0, 144


def boot_id() -> bytes:
    """16 bytes that are others after each boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return bytes.fromhex(file.read().strip().replace("-", ""))


def start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since boot; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def mount_id(path: str) -> int | None:
    """The mount that holds `path`, by a number that no other mount of this boot has, if known."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        return None
    found = ctypes.create_string_buffer(_STATX_BYTES)
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if libc.statx(descriptor, b"", _EMPTY_PATH, _MOUNT_ID_UNIQUE, found) != 0:
            return None
    finally:
        os.close(descriptor)
    (mask,) = struct.unpack_from("<I", found.raw, _MASK_AT)
    if not mask & _MOUNT_ID_UNIQUE:
        return None
    (number,) = struct.unpack_from("<Q", found.raw, _MOUNT_ID_AT)
    return int(number)


def session_of(path: str) -> bytes:
    """The session of the filesystem that holds `path`; one that never returns where unknown."""
    mount = mount_id(path)
    if mount is None:
        return os.urandom(SESSION_BYTES)
    mixed = int.from_bytes(boot_id(), "little") ^ mount
    return mixed.to_bytes(SESSION_BYTES, "little")
