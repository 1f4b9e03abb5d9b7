"""What is in a cache, for who looks after it. All of it blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.digest import Digest
from imgfmt.errors import ImageError
from transfer.cache.disks import MAIN, Disk, free_of
from transfer.cache.evict import shares_blocks
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import is_held
from transfer.cache.owners import is_sound, read_mark
from transfer.cache.places import missing_part
from transfer.cache.unfinished import disk_bytes
from transfer.cache.usage import exclusive_bytes, held_bytes, pins_of, used_ns
from transfer.cache.warm import local_image
from transfer.mounts import Mounted, mounts


class TreeState(StrEnum):
    """`doubtful` is complete, but not synced and of an earlier session; `missing` lacks a part."""

    COMPLETE = "complete"
    MISSING = "missing"
    DAMAGED = "damaged"
    DOUBTFUL = "doubtful"
    BUILDING = "building"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class CachedTree:
    """A tree; `exclusive_bytes` are freed where it is removed, `mounts` are directories."""

    domain: str
    tree: Digest
    state: TreeState
    logical_bytes: int
    data_bytes: int
    exclusive_bytes: int
    used_ns: int
    pins: tuple[str, ...]
    mounts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image that was asked for; `store` is where it was last."""

    domain: str
    store: str
    digest: Digest
    trees: tuple[Digest, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class CachedDisk:
    """A further disk; `problem` says why it does not count, or is empty."""

    path: str
    free_bytes: int
    size_bytes: int
    problem: str


@dataclass(frozen=True, slots=True)
class CacheListing:
    """All of a cache; `size_bytes` counts what trees share once.

    `free_bytes`, `size_bytes` and `shares` are those of the main disk.
    """

    path: str
    free_bytes: int
    size_bytes: int
    shares: bool
    disks: tuple[CachedDisk, ...]
    images: tuple[CachedImage, ...]
    trees: tuple[CachedTree, ...]


def list_cache(cache: CacheRoot) -> CacheListing:
    """Everything that is in the cache."""
    shares = shares_blocks(cache)
    mounted = mounts()
    images: list[CachedImage] = []
    trees: list[CachedTree] = []
    sizes: Counter[bytes] = Counter()
    for paths, record in cache.domains():
        complete = paths.listed("marks")
        alone = exclusive_bytes(paths, complete, shares=shares)
        sizes.update(held_bytes(paths, complete, shares=shares))
        trees += [
            _complete(cache, paths, tree, sum(alone[tree].values()), mounted) for tree in complete
        ]
        trees += [_partial(paths, tree) for tree in paths.listed("partial")]
        for image in paths.listed("images"):
            own = tuple(trees_of(paths, image))
            whole = bool(own) and set(own) <= set(complete)
            images.append(CachedImage(paths.name, record.url, image, own, whole))
    return CacheListing(
        cache.path,
        free_of(cache.path)[0],
        sizes[MAIN],
        shares[MAIN],
        tuple(_disk(disk, sizes[disk.id]) for disk in cache.disks),
        tuple(images),
        tuple(trees),
    )


def _disk(disk: Disk, size_bytes: int) -> CachedDisk:
    if not disk.is_there():
        return CachedDisk(disk.path, 0, 0, disk.problem or "it is not there any more")
    return CachedDisk(disk.path, free_of(disk.path)[0], size_bytes, "")


def trees_of(paths: DomainPaths, image: Digest) -> list[Digest]:
    """The trees of a cached image, ascending; none if its record is damaged."""
    try:
        return sorted({member.tree for member in local_image(paths, image).members})
    except ImageError:
        return []


def _complete(
    cache: CacheRoot, paths: DomainPaths, tree: Digest, alone: int, mounted: list[Mounted]
) -> CachedTree:
    mark = read_mark(paths, tree)
    here = [m for m in mounted if m.tree == tree.hex]
    state = TreeState.COMPLETE
    if mark is not None and missing_part(paths, mark):
        state = TreeState.MISSING
    elif not is_sound(paths, tree, cache.session):
        session = paths.disks.session(cache.session, mark.disks if mark else ())
        trusted = mark is None or mark.synced or mark.session == session
        state = TreeState.DAMAGED if trusted else TreeState.DOUBTFUL
    return CachedTree(
        paths.name,
        tree,
        state,
        mark.logical_bytes if mark else 0,
        mark.data_bytes if mark else 0,
        alone,
        used_ns(paths, tree),
        tuple(pins_of(paths, tree, [(m.volume, m.tree) for m in mounted])),
        tuple(m.directory for m in here),
    )


def _partial(paths: DomainPaths, tree: Digest) -> CachedTree:
    state = TreeState.BUILDING if is_held(paths.lock(tree)) else TreeState.PARTIAL
    parts = [paths, *(paths.on(disk) for disk in paths.disks.there())]
    here = sum(disk_bytes(part.partial(tree)) for part in parts)
    return CachedTree(paths.name, tree, state, 0, here, here, 0, (), ())
