"""What lies where a new file store is to be: see `transfer.store.base.Placed`. Blocks."""

from __future__ import annotations

import os

from imgfmt import layout
from imgfmt.errors import InvalidInput
from transfer.oserrors import printable


def check_folders(root: str) -> None:
    """Raise InvalidInput where a file is in the place of the store or of one of its folders."""
    for path in (root, *(os.path.join(root, folder.rstrip("/")) for folder in layout.FOLDERS)):
        if os.path.lexists(path) and not os.path.isdir(path):
            raise InvalidInput(f"{printable(path)} is no directory, and a store needs one there")


def in_the_way(root: str) -> str | None:
    """A name in the directory. What filesystems put at their roots is in nobody's way."""
    try:
        names = sorted(os.listdir(root))
    except FileNotFoundError:
        return None
    usual = ("lost+found", layout.TMP.rstrip("/"))
    found = [name for name in names if name not in usual and not name.startswith(".")]
    return printable(found[0]) if found else None


def enclosing_store(root: str) -> str | None:
    """The store that the directory would lie in, however far below."""
    folder = os.path.realpath(root)
    while (folder := os.path.dirname(folder)) != os.path.dirname(folder):
        if os.path.isfile(os.path.join(folder, layout.STORE_KEY)):
            return printable(folder)
    return None
