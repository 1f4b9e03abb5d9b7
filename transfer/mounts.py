"""Read-only mounts of trees: overlayfs with lower layers only, so read-only at the superblock.

Nobody can remount one writable, whatever rights he has. The mount's source says which volume and
tree it is, so the mount table is all the state there is. All of it blocks and needs root.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from imgfmt.errors import AccessDenied, Conflict, InvalidInput, NotFound, Unsupported
from transfer.oserrors import printable, translate

SOURCE = "snapcask:1"

_AT_FDCWD = -100
_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_ATTRIBUTES = 0x1 | 0x2 | 0x4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
_MOVE_EMPTY_PATH = 0x4
_MS_FLAGS = 0x1 | 0x2 | 0x4  # MS_RDONLY, MS_NOSUID, MS_NODEV
_MNT_DETACH, _UMOUNT_NOFOLLOW = 0x2, 0x8
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC, _AT_EMPTY_PATH = 0x1, 0o2000000, 0x1000
_FSOPEN, _FSCONFIG, _FSMOUNT, _MOVE_MOUNT = 430, 431, 432, 429  # the same on all architectures
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_NOT_THERE = (errno.ENOSYS, errno.EINVAL, errno.ENAMETOOLONG, errno.EOPNOTSUPP)
_ESCAPED = re.compile(rb"\\([0-7]{3})")
_ESCAPES = re.compile(rb"[ \t\n\\]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Mounted:
    """One of our mounts: `tree` is 64 hexadecimal digits, `directory` where it is."""

    volume: str
    tree: str
    directory: str


def source_of(volume: str, tree: str) -> str:
    """The mount source that names a volume and its tree. Raises InvalidInput."""
    if not _NAME.fullmatch(volume):
        raise InvalidInput(f"{volume[:80]!r} can't name a volume; use letters, digits, . - and _")
    return f"{SOURCE}:{volume}:{tree}"


Options = Sequence[tuple[str, str]]
"""Options of a filesystem by name and value, such as `("metacopy", "on")`."""


def mount_tree(
    tree_folder: str,
    empty_folder: str,
    volume: str,
    directory: str,
    *,
    parts: Sequence[str] = (),
) -> None:
    """Mount the tree in `tree_folder`, whose name it has, at the existing `directory`.

    `parts` are folders on other filesystems that hold the rest of its files.
    """
    source = source_of(volume, os.path.basename(tree_folder))
    mount_layers((tree_folder, *parts, empty_folder), source, directory)


def mount_layers(layers: Sequence[str], source: str, directory: str, options: Options = ()) -> None:
    """Mount an overlay of these lower layers, the uppermost first, at the existing `directory`.

    There are at least two layers, and none to write to. Raises NotFound, AccessDenied, Unsupported
    for a kernel without overlayfs, InvalidInput for options that it does not take.
    """
    if not os.path.isdir(directory):
        raise NotFound(f"{printable(directory)} is no directory; make it first")
    try:
        try:
            _mount_new(source, layers, directory, options)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
            _mount_old(source, layers, directory, options)
    except OSError as error:
        what = f"mounting at {printable(directory)}"
        if error.errno == errno.ENODEV:
            raise Unsupported(f"{what}: this kernel has no overlayfs; load it") from error
        if error.errno == errno.EPERM:
            raise AccessDenied(f"{what}: the kernel refuses it; run as root") from error
        if error.errno == errno.EINVAL and options:
            names = ", ".join(name for name, _ in options)
            raise InvalidInput(f"{what}: the kernel does not take option {names}") from error
        raise translate(error, what) from error


def bind_tree(folder: str, directory: str) -> None:
    """Bind `folder` at the existing `directory`, read-only from the start. Linux 5.12.

    No boundary: who may mount in the container that sees it can make it writable. Raises as
    `mount_layers` does.
    """
    what = f"mounting at {printable(directory)}"
    try:
        flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
        tree = _call(_OPEN_TREE, _AT_FDCWD, ctypes.c_char_p(os.fsencode(folder)), flags)
        try:
            attributes = ctypes.create_string_buffer(_ATTRIBUTES.to_bytes(8, "little"), 32)
            size = len(attributes)
            pointer = ctypes.cast(attributes, ctypes.c_char_p)
            empty = ctypes.c_char_p(b"")
            _call(_MOUNT_SETATTR, tree, empty, _AT_EMPTY_PATH, pointer, size)
            target = ctypes.c_char_p(os.fsencode(directory))
            _call(_MOVE_MOUNT, tree, empty, _AT_FDCWD, target, _MOVE_EMPTY_PATH)
        finally:
            os.close(tree)
    except OSError as error:
        if error.errno == errno.EPERM:
            raise AccessDenied(f"{what}: the kernel refuses it; run as root") from error
        if error.errno == errno.ENOSYS:
            raise Unsupported(f"{what}: this kernel is older than Linux 5.12") from error
        raise translate(error, what) from error


def _mount_new(source: str, layers: Sequence[str], directory: str, options: Options) -> None:
    """By file descriptors, Linux 6.7: no path is quoted, or too long."""
    context = _call(_FSOPEN, ctypes.c_char_p(b"overlay"), _CLOEXEC)
    try:
        _configure(context, _SET_STRING, b"source", source.encode())
        for layer in layers:
            _configure(context, _SET_STRING, b"lowerdir+", os.fsencode(layer))
        for name, value in options:
            _configure(context, _SET_STRING, name.encode(), value.encode())
        _configure(context, _SET_FLAG, b"ro", None)
        _configure(context, _CMD_CREATE, None, None)
        mount = _call(_FSMOUNT, context, _CLOEXEC, _ATTRIBUTES)
    finally:
        os.close(context)
    try:
        target = ctypes.c_char_p(os.fsencode(directory))
        _call(_MOVE_MOUNT, mount, ctypes.c_char_p(b""), _AT_FDCWD, target, _MOVE_EMPTY_PATH)
    finally:
        os.close(mount)


def _mount_old(source: str, layers: Sequence[str], directory: str, options: Options) -> None:
    lower = b":".join(re.sub(rb"([\\:,])", rb"\\\1", os.fsencode(layer)) for layer in layers)
    libc = _libc()
    place = os.fsencode(directory)
    words = [f'{name}="{value}"' if "," in value else f"{name}={value}" for name, value in options]
    text = b",".join([b"lowerdir=" + lower, *(word.encode() for word in words)])
    if libc.mount(source.encode(), place, b"overlay", ctypes.c_ulong(_MS_FLAGS), text) != 0:
        raise _last_error()


def _configure(context: int, command: int, key: bytes | None, value: bytes | None) -> None:
    _call(_FSCONFIG, context, command, ctypes.c_char_p(key), ctypes.c_char_p(value), 0)


@functools.cache
def _libc() -> ctypes.CDLL:
    """Loaded once: each loading makes new classes."""
    found = ctypes.CDLL(None, use_errno=True)
    found.syscall.restype = ctypes.c_long
    return found


def _call(number: int, *arguments: int | ctypes.c_char_p) -> int:
    libc = _libc()
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *wide))
    if result < 0:
        raise _last_error()
    return result


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def unmount(directory: str, *, detach: bool = False) -> None:
    """Undo the uppermost mount at `directory`. Raises Conflict while it is in use.

    With `detach` it goes from the mount table though it is in use, and ends with its last user.
    """
    libc = _libc()
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if detach else 0)
    if libc.umount2(os.fsencode(directory), flags) != 0:
        error = _last_error()
        shown = printable(directory)
        if error.errno == errno.EBUSY:
            raise Conflict(f"{shown} is in use; end what runs or has files open there") from error
        if error.errno == errno.EINVAL:
            raise NotFound(f"nothing is mounted at {shown}") from error
        raise translate(error, f"unmounting {shown}") from error


def mounts() -> list[Mounted]:
    """Our mounts in this mount namespace, in the order of the mount table."""
    found = []
    marker = f" - overlay {SOURCE}:".encode()
    with open("/proc/self/mountinfo", "rb") as table:
        lines = table.read().split(b"\n")
    for line in lines:
        before, ours, rest = line.partition(marker)
        if ours:
            volume, _, tree = rest.split(b" ", 1)[0].decode().partition(":")
            found.append(Mounted(volume, tree, os.fsdecode(_plain(before.split(b" ")[4]))))
    return found


@dataclass(frozen=True, slots=True)
class MountEntry:
    """A line of the mount table. `root` is what of its filesystem is seen at `directory`.

    `shared`: mounts below it are seen by others too.
    """

    directory: str
    root: str
    filesystem: str
    source: str
    shared: bool


def mount_table(below: str | None = None) -> Iterator[MountEntry]:
    """All mounts of this mount namespace, in the order of the mount table.

    With `below` only those at this directory or under it, which is cheap where there are thousands.
    """
    with open("/proc/self/mountinfo", "rb") as table:
        lines = table.read().split(b"\n")
    if below is not None:
        wanted = b" " + _ESCAPES.sub(_escape, os.fsencode(below))
        lines = [line for line in lines if wanted in line]
    for line in lines:
        before, _, after = line.partition(b" - ")
        fields = before.split(b" ")
        if not after:
            continue
        directory = os.fsdecode(_plain(fields[4]))
        if below is not None and directory != below and not directory.startswith(f"{below}/"):
            continue
        filesystem, source, _ = after.split(b" ", 2)
        yield MountEntry(
            directory=directory,
            root=os.fsdecode(_plain(fields[3])),
            filesystem=filesystem.decode(),
            source=os.fsdecode(_plain(source)),
            shared=any(field.startswith(b"shared:") for field in fields[6:]),
        )


def _escape(found: re.Match[bytes]) -> bytes:
    """As the mount table writes characters that would break its lines."""
    return b"\\%03o" % found[0][0]


def _plain(path: bytes) -> bytes:
    """A path of the mount table, whose blanks and backslashes are written in octal."""
    return _ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), path)


def namespace_id() -> int:
    """The mount namespace of this process."""
    return os.stat("/proc/self/ns/mnt").st_ino
