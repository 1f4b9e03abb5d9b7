"""Removing directories of a cache so that they are never half there. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import secrets

from imgfmt.digest import Digest
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.pulling.moving import remove_tree

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def take_back(cache: CacheRoot, paths: DomainPaths, digest: Digest) -> None:
    """Move what there is of a tree without a mark from `trees/` to `partial/`.

    It is there after a commit or a removal that was cut off.
    """
    for root, of_disk in domain_roots(cache, paths):
        final, partial = of_disk.tree(digest), of_disk.partial(digest)
        if os.path.isdir(final):
            if os.path.isdir(partial):
                discard_at(root, final)
            else:
                os.rename(final, partial)


def domain_roots(cache: CacheRoot, paths: DomainPaths) -> list[tuple[str, DomainPaths]]:
    """The path of each disk that counts, the main one first, and the domain on it."""
    further = [(disk.path, paths.on(disk)) for disk in paths.disks.there()]
    return [(cache.path, paths), *further]


def discard(cache: CacheRoot, path: str) -> None:
    """Remove a directory of the main disk. See `discard_at`."""
    discard_at(cache.path, path)


def discard_at(root: str, path: str) -> None:
    """Remove a directory: moved to `trash/` first, so that it is never half there.

    `root` is the path of the disk that it lies on.
    """
    name = f"{os.path.basename(path)[:80]}-{secrets.token_hex(8)}"
    os.rename(path, os.path.join(root, "trash", name))
    empty_trash(root, name)


def empty_trash(root: str, *names: str) -> None:
    """Remove what lies in `trash/` of a disk, or these names of it, as far as that is possible."""
    descriptor = os.open(os.path.join(root, "trash"), _DIRECTORY)
    try:
        for name in names or os.listdir(descriptor):
            with contextlib.suppress(OSError):
                remove_tree(os.fsencode(name), descriptor)
    finally:
        os.close(descriptor)
