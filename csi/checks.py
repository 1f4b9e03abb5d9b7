"""Strings of calls that are checked alike wherever they come."""

from __future__ import annotations

import os

from imgfmt.errors import InvalidInput
from transfer.oserrors import printable

MAX_ID_BYTES = 128
MAX_NAME_BYTES = 128
MAX_PATH_BYTES = 4095


def checked_id(volume_id: str) -> str:
    """A volume's id. Raises InvalidInput."""
    checked_text(volume_id, "volume_id", MAX_ID_BYTES)
    if ".." in volume_id.split("/") or volume_id.startswith("/"):
        raise InvalidInput(f"volume_id {volume_id!r} is a path that leads elsewhere")
    return volume_id


def checked_text(text: str, what: str, limit_bytes: int) -> str:
    """A string of one printable line. Raises InvalidInput."""
    if not text:
        raise InvalidInput(f"{what} is missing")
    if len(text.encode()) > limit_bytes:
        raise InvalidInput(f"{what} has more than {limit_bytes} bytes")
    if not text.isprintable():
        raise InvalidInput(f"{what} {printable(text[:80])!r} has characters that can't be printed")
    return text


def checked_path(path: str, what: str) -> str:
    """An absolute path without detours; blanks are allowed. Raises InvalidInput."""
    checked_text(path, what, MAX_PATH_BYTES)
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//"):
        raise InvalidInput(f"{what} {path[:200]!r} is not an absolute path in its shortest form")
    return path
