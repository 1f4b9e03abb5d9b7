"""Names that a pull gives to what it has not finished, and the marker of what it has.

A pull to a new name fills `.NAME.snapcask-partial-<8 digits>` beside it; one into an empty
directory fills PARTIAL in it, and leaves MARKER when it is done. Each has a journal of its name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable

from imgfmt.digest import Digest
from imgfmt.errors import ImageError

PARTIAL = b".snapcask-partial"
MARKER = b".snapcask-complete"
JOURNAL = b".journal"
NEW_JOURNAL = b".journal.new"
NOTE = b".snapcask-partial.moving"
IN_PLACE = frozenset({PARTIAL, PARTIAL + JOURNAL, PARTIAL + NEW_JOURNAL, NOTE})
"""What an unfinished pull may have left at the top of the directory that it was to fill."""

_NAME_BYTES = 200
_MARKER_BYTES = 256
_BESIDE = re.compile(rb"\..*\.snapcask-partial-[0-9a-f]{8}(\.journal(\.new)?)?", re.DOTALL)
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def name_beside(final_name: bytes, digest: Digest) -> bytes:
    """The name of what becomes `final_name` in the same folder."""
    return b".%b%b-%b" % (final_name[:_NAME_BYTES], PARTIAL, digest.hex[:8].encode())


def unfinished_among(names: Iterable[bytes]) -> list[bytes]:
    """Those of the names of a directory's entries that only unfinished pulls have."""
    return [
        name for name in names if PARTIAL in name and (name in IN_PLACE or _BESIDE.fullmatch(name))
    ]


def marker_of(digest: Digest) -> bytes:
    """The content of the marker of an image."""
    return f"{digest}\n".encode()


def is_marker(path: str | bytes, folder: int | None = None) -> bool:
    """Whether this is a marker that a pull wrote, and not a file of somebody else. Blocks."""
    there = os.stat(path, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISREG(there.st_mode) or there.st_size > _MARKER_BYTES:
        return False
    descriptor = os.open(path, _READ, dir_fd=folder)
    try:
        raw = os.read(descriptor, _MARKER_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        return raw == marker_of(Digest.parse(raw.decode("ascii").removesuffix("\n")))
    except (ValueError, ImageError):
        return False
