"""Whether a directory can be a cache, or a further disk of one. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import stat

from imgfmt.errors import AccessDenied, InvalidInput, NotFound
from transfer.filesystems import filesystem_type, is_remote
from transfer.oserrors import printable


def make_folder(path: str, what: str, *, on_root: bool, allow: str) -> None:
    """Make the directory `path`, for its owner alone, unless it is there; check it either way.

    `what` names it in errors. `on_root` lets it lie on the root filesystem, `allow` says how to
    ask for that. Raises NotFound, InvalidInput or AccessDenied; then nothing was made.
    """
    if not _is_directory(path):
        above = os.path.dirname(path)
        if not _is_directory(above):
            raise NotFound(f"{what}: {printable(above)} does not exist; make it")
        _check_filesystem(above, what, on_root=on_root, allow=allow)
        with contextlib.suppress(FileExistsError):  # another process may have been first
            os.mkdir(path, 0o700)
    _check_filesystem(path, what, on_root=on_root, allow=allow)
    check_owner(path, what)


def _is_directory(path: str) -> bool:
    """False only where nothing is, or no directory: a broken disk raises OSError."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _check_filesystem(path: str, what: str, *, on_root: bool, allow: str) -> None:
    kind = filesystem_type(path)
    if is_remote(path):
        raise InvalidInput(
            f"{what} lies on {kind}, where locks do not end with a process; use a local disk"
        )
    if kind == "overlay":
        raise InvalidInput(
            f"{what} lies on overlayfs, which vanishes with its container; name a local disk"
        )
    check_writable(path, what)
    if not on_root and os.stat(path).st_dev == os.stat("/").st_dev:
        raise InvalidInput(
            f"{what} lies on the root filesystem, which a full cache would stop; name a"
            f" directory on another disk, or allow it with {allow}"
        )


def check_writable(path: str, what: str) -> None:
    """Raise AccessDenied if its filesystem is mounted read-only."""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise AccessDenied(f"{what}: its filesystem is mounted read-only")


def check_owner(path: str, what: str) -> None:
    """Raise AccessDenied unless it belongs to this user, and nobody else can write to it."""
    there = os.stat(path)
    if there.st_uid != os.geteuid():
        raise AccessDenied(
            f"{what} belongs to user {there.st_uid}, not to {os.geteuid()}; run as its owner"
        )
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(there.st_mode)
        raise AccessDenied(
            f"{what} has mode {mode:04o}, so others can write to it; `chmod 0700` it"
        )
