"""One folder with all parts of a tree, for who mounts it in a way of its own. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence

from imgfmt.errors import ImageError
from transfer.cache.durable import remove_file
from transfer.cache.layout import CacheRoot
from transfer.cache.locks import Lock, lock
from transfer.mounts import mount_layers, unmount

_SOURCE = "snapcask-merged"
_LOCK = ".lock"


@contextlib.contextmanager
def merged(cache: CacheRoot, folders: Sequence[str]) -> Iterator[str]:
    """The folder itself if there is one, else a mount of all of them, which ends with the context.

    What is mounted on top of it stays. Needs root.
    """
    if len(folders) == 1:
        yield folders[0]
        return
    above = os.path.join(cache.path, "merged")
    os.makedirs(above, 0o700, exist_ok=True)
    for name in {name.removesuffix(_LOCK) for name in os.listdir(above)}:
        _clear(os.path.join(above, name))
    folder = os.path.join(above, secrets.token_hex(8))
    held = lock(folder + _LOCK)
    assert held is not None
    try:
        os.mkdir(folder, 0o700)
        mount_layers(folders, _SOURCE, folder)
        yield folder
    finally:
        _end(folder, held)


def _clear(folder: str) -> None:
    """Take down what a process that was killed left behind."""
    held = lock(folder + _LOCK, wait=False)
    if held is not None:
        _end(folder, held)


def _end(folder: str, held: Lock) -> None:
    with held:
        with contextlib.suppress(ImageError):
            unmount(folder, detach=True)
        with contextlib.suppress(OSError):
            os.rmdir(folder)
        remove_file(folder + _LOCK)
