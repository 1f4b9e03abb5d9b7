"""Small state files that are whole or absent, whatever happens. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence

from imgfmt.digest import Octets

TEMPORARY = ".new-"
"""What the names of files begin with that are still being written."""

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: str, pieces: Sequence[Octets], *, fsync: bool) -> None:
    """Write a file whole, in place of any that is there. With `fsync` it survives a power cut."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(8)}-{name[:100]}")
    descriptor = os.open(temporary, _NEW_FILE, 0o600)
    try:
        try:
            for piece in pieces:
                write_all(descriptor, memoryview(piece).cast("B"))
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if fsync:
        sync_folder(folder)


def remove_half_written(folder: str, name: str | None = None) -> None:
    """Remove what killed writers of the file `name`, or of any, left in a folder if it is there.

    Nobody may be writing it.
    """
    ending = "" if name is None else f"-{name[:100]}"
    with contextlib.suppress(FileNotFoundError):
        for found in os.listdir(folder):
            if found.startswith(TEMPORARY) and found.endswith(ending):
                remove_file(os.path.join(folder, found))


def read_file(path: str) -> bytes | None:
    """All of a file, or None if there is none."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def write_all(descriptor: int, view: memoryview) -> None:
    """Write all of `view`."""
    while len(view):
        view = view[os.write(descriptor, view) :]


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: str) -> bool:
    """Remove a file if it is there; says whether it was."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
