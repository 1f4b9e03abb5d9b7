"""Making room: least recently used trees go, but none that somebody needs. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput
from transfer.cache.build import discard, empty_trash
from transfer.cache.durable import remove_file, sync_folder
from transfer.cache.flights import OwnFlight, reserved
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark
from transfer.cache.share import can_clone
from transfer.cache.usage import MOUNT_PIN, exclusive_bytes, held_bytes, pins_of, used_ns
from transfer.filesystems import sync_filesystem
from transfer.mounts import mounts

_FREEING_S = 1.0


@dataclass(frozen=True, slots=True)
class Watermarks:
    """When eviction begins and where it ends.

    As shares of the filesystem that are free; kubelet itself evicts Pods at 0.10 and images at
    0.15. `max_bytes` bounds the cache's own size, down to `low_share` of it.
    """

    begin_free: float = 0.20
    end_free: float = 0.25
    max_bytes: int | None = None
    low_share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.begin_free <= self.end_free < 1 or not 0 <= self.low_share <= 1:
            raise InvalidInput("watermarks are shares of 1, and eviction ends above its begin")


@dataclass(frozen=True, slots=True)
class Evicted:
    """A tree that was removed, and the bytes that this freed; `partial` if it was unfinished."""

    domain: str
    tree: Digest
    freed_bytes: int
    partial: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    paths: DomainPaths
    tree: Digest
    used_ns: int
    exclusive_bytes: int = 0


def free_bytes(cache: CacheRoot) -> tuple[int, int]:
    """Free and all bytes of the cache's filesystem, for this user."""
    found = os.statvfs(cache.path)
    used = found.f_blocks - found.f_bfree
    return found.f_bavail * found.f_frsize, (used + found.f_bavail) * found.f_frsize


def make_room(
    cache: CacheRoot,
    needed_bytes: int,
    *,
    keep: frozenset[Digest] = frozenset(),
    own: OwnFlight | None = None,
) -> list[Evicted]:
    """Remove trees until `needed_bytes` are free beside what flights but `own` have reserved."""
    short_bytes = needed_bytes + reserved(cache.path, own) - free_bytes(cache)[0]
    return _evict(cache, keep, lambda freed_bytes: freed_bytes >= short_bytes)


def apply_watermarks(
    cache: CacheRoot, marks: Watermarks, *, keep: frozenset[Digest] = frozenset()
) -> list[Evicted]:
    """Remove trees if too little is free, or the cache is too large."""
    free, whole = free_bytes(cache)
    short_bytes = int(marks.end_free * whole) - free if free < marks.begin_free * whole else 0
    if marks.max_bytes is not None and (own_bytes := size_bytes(cache)) > marks.max_bytes:
        short_bytes = max(short_bytes, own_bytes - int(marks.max_bytes * marks.low_share))
    return _evict(cache, keep, lambda freed_bytes: freed_bytes >= short_bytes)


def evict_all(cache: CacheRoot) -> list[Evicted]:
    """Remove every tree that nobody needs, and every unfinished one."""
    return _evict(cache, frozenset(), lambda freed_bytes: False)


def size_bytes(cache: CacheRoot) -> int:
    """Bytes that complete trees take; where blocks are shared, each chunk counts once a domain."""
    shares = can_clone(cache.trash)
    return sum(
        held_bytes(paths, paths.listed("marks"), shares=shares) for paths, _ in cache.domains()
    )


def _evict(
    cache: CacheRoot, keep: frozenset[Digest], enough: Callable[[int], bool]
) -> list[Evicted]:
    """Remove what may go, until `enough` says so of the bytes that were freed."""
    if enough(0):
        return []
    empty_trash(cache)
    evicted: list[Evicted] = []
    shares = can_clone(cache.trash)
    failed: set[tuple[str, Digest]] = set()
    freed, free_before = 0, free_bytes(cache)[0]
    for paths, tree in _unfinished(cache):
        if tree not in keep and not enough(freed) and _drop_partial(cache, paths, tree, evicted):
            freed += evicted[-1].freed_bytes
    while not enough(freed):
        candidate = _next(cache, keep, failed, shares=shares)
        if candidate is None:
            break
        if remove_complete(cache, candidate.paths, candidate.tree):
            found = candidate.exclusive_bytes
            evicted.append(Evicted(candidate.paths.name, candidate.tree, found))
            freed += found
        else:
            failed.add((candidate.paths.name, candidate.tree))
    if evicted:
        sync_filesystem(cache.path)  # Btrfs frees the space only then
        _await_free(cache, free_before + freed)
    return evicted


def _await_free(cache: CacheRoot, expected_bytes: int) -> None:
    """Wait a moment until the filesystem has the bytes; XFS frees them in the background."""
    until_s = time.monotonic() + _FREEING_S
    while free_bytes(cache)[0] < expected_bytes * 0.99 and time.monotonic() < until_s:
        time.sleep(_FREEING_S / 100)


def _next(
    cache: CacheRoot, keep: frozenset[Digest], failed: set[tuple[str, Digest]], *, shares: bool
) -> _Candidate | None:
    """The least recently used tree that frees something; else the least recently used one."""
    candidates = []
    for paths, _ in cache.domains():
        trees = paths.listed("marks")
        alone = exclusive_bytes(paths, trees, shares=shares)
        candidates += [
            _Candidate(paths, tree, used_ns(paths, tree), alone[tree])
            for tree in trees
            if tree not in keep and (paths.name, tree) not in failed
        ]
    candidates.sort(key=lambda c: c.used_ns)
    freeing = (c for c in candidates if c.exclusive_bytes)
    return next(freeing, candidates[0] if candidates else None)


def is_needed(paths: DomainPaths, tree: Digest) -> bool:
    """Whether a tree is pinned, or mounted in this mount namespace."""
    mounted = [(found.volume, found.tree) for found in mounts()]
    return any(hex_name == tree.hex for _, hex_name in mounted) or bool(
        pins_of(paths, tree, mounted)
    )


def is_mounted(paths: DomainPaths, tree: Digest) -> bool:
    """Whether a tree is mounted, here or by its pins in another mount namespace."""
    mounted = [(found.volume, found.tree) for found in mounts()]
    pins = pins_of(paths, tree, mounted)
    return any(hex_name == tree.hex for _, hex_name in mounted) or any(
        name.startswith(MOUNT_PIN) for name in pins
    )


def remove_complete(cache: CacheRoot, paths: DomainPaths, tree: Digest) -> bool:
    """Remove a tree unless it is needed, being read or being built; says whether it was removed."""
    held = lock(paths.lock(tree), wait=False)
    if held is None:
        return False
    with held:
        if is_needed(paths, tree):
            return False
        if remove_file(paths.mark(tree)):
            sync_folder(os.path.dirname(paths.mark(tree)))
        if os.path.isdir(paths.tree(tree)):
            discard(cache, paths.tree(tree))
        for path in (paths.damage(tree), paths.used(tree), paths.owners(tree), paths.object(tree)):
            remove_file(path)
        if not os.path.isdir(paths.partial(tree)):
            held.remove()
    return True


def _unfinished(cache: CacheRoot) -> Iterator[tuple[DomainPaths, Digest]]:
    """Trees whose build was cut off, and those whose removal was."""
    for paths, _ in cache.domains():
        yield from ((paths, tree) for tree in paths.listed("partial"))
        for tree in paths.listed("trees"):
            if read_mark(paths, tree) is None:
                yield paths, tree


def _drop_partial(
    cache: CacheRoot, paths: DomainPaths, tree: Digest, evicted: list[Evicted]
) -> bool:
    held = lock(paths.lock(tree), wait=False)
    if held is None:
        return False
    with held:
        if read_mark(paths, tree) is not None:
            return False
        freed = 0
        for folder in (paths.partial(tree), paths.tree(tree)):
            if os.path.isdir(folder):
                freed += disk_bytes(folder)
                discard(cache, folder)
        remove_file(paths.journal(tree))
        evicted.append(Evicted(paths.name, tree, freed, partial=True))
    return True


def disk_bytes(folder: str) -> int:
    """Bytes that the files below a folder take, shared ones too."""
    total = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(above, name)).st_blocks * 512
    return total


def remove_image(
    cache: CacheRoot, paths: DomainPaths, image: Digest, trees: frozenset[Digest]
) -> list[Evicted]:
    """Remove an image, and those of its `trees` that nobody needs and no other image here has."""
    remove_file(paths.image(image))
    shares = can_clone(cache.trash)
    removed = []
    for tree in sorted(trees):
        alone = exclusive_bytes(paths, paths.listed("marks"), shares=shares).get(tree, 0)
        if remove_complete(cache, paths, tree):
            removed.append(Evicted(paths.name, tree, alone))
    return removed


def forget_images(cache: CacheRoot, trees_of: Callable[[DomainPaths, Digest], list[Digest]]) -> int:
    """Remove image records none of whose trees is here any more; returns how many."""
    n_removed = 0
    for paths, _ in cache.domains():
        for image in paths.listed("images"):
            trees = trees_of(paths, image)
            if not any(os.path.exists(p(t)) for t in trees for p in (paths.mark, paths.partial)):
                n_removed += remove_file(paths.image(image))
    return n_removed
