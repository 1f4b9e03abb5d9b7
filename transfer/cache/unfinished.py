"""What cut-off builds and removals have left, and parts that are nobody's. All of it blocks."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterator

from imgfmt.digest import Digest
from transfer.cache.disks import MAIN
from transfer.cache.durable import remove_file
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark
from transfer.cache.trash import discard_at


def unfinished(cache: CacheRoot) -> Iterator[tuple[DomainPaths, Digest, set[bytes]]]:
    """Trees of which something is there that does not belong to a complete tree; on which disks."""
    for paths, _ in cache.domains():
        found: defaultdict[Digest, set[bytes]] = defaultdict(set)
        for disk_id, _, of_disk in _disks(cache, paths):
            for tree in of_disk.listed("partial"):
                found[tree].add(disk_id)
            for tree in of_disk.listed("trees"):
                if disk_id not in _marked(paths, tree):
                    found[tree].add(disk_id)
        yield from ((paths, tree, disks) for tree, disks in sorted(found.items()))


def drop_partial(cache: CacheRoot, paths: DomainPaths, tree: Digest) -> Counter[bytes] | None:
    """Remove what does not belong to a complete tree; bytes on each disk that this freed.

    None if somebody holds the lock of the tree, or there is nothing to remove.
    """
    held = lock(paths.lock(tree), wait=False)
    if held is None:
        return None
    with held:
        removed = False
        freed: Counter[bytes] = Counter()
        for disk_id, root, folder in _folders(cache, paths, tree):
            freed[disk_id] += disk_bytes(folder)
            discard_at(root, folder)
            removed = True
        removed |= remove_file(paths.journal(tree))
        if not _marked(paths, tree):
            remove_file(paths.places(tree))
    return freed if removed else None


def partial_bytes(cache: CacheRoot, paths: DomainPaths, tree: Digest) -> Counter[bytes]:
    """What `drop_partial` would free on each disk."""
    found: Counter[bytes] = Counter()
    for disk_id, _, folder in _folders(cache, paths, tree):
        found[disk_id] += disk_bytes(folder)
    return found


def _folders(
    cache: CacheRoot, paths: DomainPaths, tree: Digest
) -> Iterator[tuple[bytes, str, str]]:
    """Disk, its path, and each folder of the tree that does not belong to a complete one."""
    wanted = _marked(paths, tree)
    for disk_id, root, of_disk in _disks(cache, paths):
        folders = [of_disk.partial(tree)]
        if disk_id not in wanted:
            folders.append(of_disk.tree(tree))
        yield from ((disk_id, root, folder) for folder in folders if os.path.isdir(folder))


def _disks(cache: CacheRoot, paths: DomainPaths) -> list[tuple[bytes, str, DomainPaths]]:
    """Id and path of each disk that counts, and the domain on it."""
    further = [(disk.id, disk.path, paths.on(disk)) for disk in paths.disks.there()]
    return [(MAIN, cache.path, paths), *further]


def _marked(paths: DomainPaths, tree: Digest) -> set[bytes]:
    """The disks that a complete tree lies on; none if it is not complete."""
    mark = read_mark(paths, tree)
    return {MAIN, *mark.disks} if mark is not None else set()


def disk_bytes(folder: str) -> int:
    """Bytes that the files below a folder take, shared ones too."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    return total
