"""Making room: least recently used trees go, but none that somebody needs. All of it blocks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, InvalidInput
from transfer.cache.disks import MAIN, ByDisk, free_of
from transfer.cache.durable import remove_file, sync_folder
from transfer.cache.flights import OwnFlight, reserved
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.share import can_clone
from transfer.cache.trash import discard_at, domain_roots, empty_trash
from transfer.cache.unfinished import drop_partial, partial_bytes, unfinished
from transfer.cache.usage import MOUNT_PIN, exclusive_bytes, held_bytes, pins_of, used_ns
from transfer.filesystems import sync_filesystem
from transfer.mounts import Mounted, mounts
from transfer.oserrors import printable

_FREEING_S = 1.0
_UNCOUNTED_BYTES = 16 << 20
"""With an eighth: directories and the ends of many small files, which no size of a tree counts."""


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
    exclusive_bytes: ByDisk


_Lacking = Callable[[ByDisk], Collection[bytes]]
"""Is told how much was freed on each disk, and says on which more is to be freed."""


def free_bytes(cache: CacheRoot) -> tuple[int, int]:
    """Free and all bytes of the filesystems of the cache's disks, for this user."""
    found = [free_of(root) for root in cache.roots().values()]
    return sum(free for free, _ in found), sum(whole for _, whole in found)


def shares_blocks(cache: CacheRoot) -> dict[bytes, bool]:
    """On which of its disks blocks can be shared."""
    return {i: can_clone(os.path.join(root, "trash")) for i, root in cache.roots().items()}


def make_room(
    cache: CacheRoot,
    needed: ByDisk,
    *,
    keep: frozenset[Digest] = frozenset(),
    own: OwnFlight | None = None,
) -> list[Evicted]:
    """Remove trees until these bytes are free beside what flights but `own` have reserved.

    Nothing is removed where that would not do.
    """
    taken, roots = reserved(cache.path, own), cache.roots()
    short = {
        disk: n_bytes + taken.get(disk, 0) - free_of(roots[disk])[0]
        for disk, n_bytes in needed.items()
        if disk in roots
    }
    if not any(n_bytes > 0 for n_bytes in short.values()):
        return []
    if _short(short, _removable(cache, keep)):
        return []
    return _evict(cache, keep, lambda freed: _short(short, freed))


def _removable(cache: CacheRoot, keep: frozenset[Digest]) -> ByDisk:
    """Bytes on each disk that go if everything goes that may, at the most."""
    found: Counter[bytes] = Counter()
    shares, mounted = shares_blocks(cache), mounts()
    for paths, _ in cache.domains():
        trees = paths.listed("marks")
        staying = [tree for tree in trees if tree in keep or _is_held(paths, tree, mounted)]
        found.update(held_bytes(paths, trees, shares=shares))
        found.subtract(held_bytes(paths, staying, shares=shares))
    for paths, tree, _ in unfinished(cache):
        if tree not in keep:
            found.update(partial_bytes(cache, paths, tree))
    return {disk: n_bytes + n_bytes // 8 + _UNCOUNTED_BYTES for disk, n_bytes in found.items()}


def apply_watermarks(
    cache: CacheRoot, marks: Watermarks, *, keep: frozenset[Digest] = frozenset()
) -> list[Evicted]:
    """Remove trees if too little is free on a disk, or the cache is too large."""
    short, total_short = {}, 0
    for disk, root in cache.roots().items():
        free, whole = free_of(root)
        if free < marks.begin_free * whole:
            short[disk] = int(marks.end_free * whole) - free
    if marks.max_bytes is not None and (own_bytes := size_bytes(cache)) > marks.max_bytes:
        total_short = own_bytes - int(marks.max_bytes * marks.low_share)

    def lacking(freed: ByDisk) -> Collection[bytes]:
        return cache.roots() if sum(freed.values()) < total_short else _short(short, freed)

    return _evict(cache, keep, lacking)


def _short(short: ByDisk, freed: ByDisk) -> Collection[bytes]:
    return [disk for disk, n_bytes in short.items() if freed.get(disk, 0) < n_bytes]


def evict_all(cache: CacheRoot) -> list[Evicted]:
    """Remove every tree that nobody needs, and every unfinished one."""
    return _evict(cache, frozenset(), lambda freed: cache.roots())


def size_bytes(cache: CacheRoot) -> int:
    """Bytes that complete trees take; where blocks are shared, each chunk counts once a domain."""
    shares = shares_blocks(cache)
    return sum(
        sum(held_bytes(paths, paths.listed("marks"), shares=shares).values())
        for paths, _ in cache.domains()
    )


def _evict(cache: CacheRoot, keep: frozenset[Digest], lacking: _Lacking) -> list[Evicted]:
    """Remove what may go, as long as something lacks on a disk."""
    if not lacking({}):
        return []
    roots = cache.roots()
    for root in roots.values():
        empty_trash(root)
    evicted: list[Evicted] = []
    shares = shares_blocks(cache)
    failed: set[tuple[str, Digest]] = set()
    freed: Counter[bytes] = Counter()
    free_before = {disk: free_of(root)[0] for disk, root in roots.items()}
    for paths, tree, disks in unfinished(cache):
        if tree in keep or disks.isdisjoint(lacking(freed)):
            continue
        if (found := drop_partial(cache, paths, tree)) is not None:
            evicted.append(Evicted(paths.name, tree, found.total(), partial=True))
            freed.update(found)
    while wanted := lacking(freed):
        candidate = _next(cache, keep, failed, shares, frozenset(wanted))
        if candidate is None:
            break
        if remove_complete(cache, candidate.paths, candidate.tree):
            n_bytes = sum(candidate.exclusive_bytes.values())
            evicted.append(Evicted(candidate.paths.name, candidate.tree, n_bytes))
            freed.update(candidate.exclusive_bytes)
        else:
            failed.add((candidate.paths.name, candidate.tree))
    if evicted:
        for disk, root in roots.items():
            sync_filesystem(root)  # Btrfs frees the space only then
            _await_free(root, free_before[disk] + freed[disk])
    return evicted


def _await_free(root: str, expected_bytes: int) -> None:
    """Wait a moment until the filesystem has the bytes; XFS frees them in the background."""
    until_s = time.monotonic() + _FREEING_S
    while free_of(root)[0] < expected_bytes * 0.99 and time.monotonic() < until_s:
        time.sleep(_FREEING_S / 100)


def _next(
    cache: CacheRoot,
    keep: frozenset[Digest],
    failed: set[tuple[str, Digest]],
    shares: Mapping[bytes, bool],
    wanted: frozenset[bytes],
) -> _Candidate | None:
    """The least recently used tree that frees something on the `wanted` disks.

    If none does, the least recently used one that has bytes on one of them.
    """
    candidates = []
    for paths, _ in cache.domains():
        trees = paths.listed("marks")
        alone = exclusive_bytes(paths, trees, shares=shares)
        for tree in trees:
            disks = frozenset(alone[tree]) or {MAIN}
            if tree not in keep and (paths.name, tree) not in failed and disks & wanted:
                candidates.append(_Candidate(paths, tree, used_ns(paths, tree), alone[tree]))
    candidates.sort(key=lambda c: c.used_ns)
    freeing = (c for c in candidates if any(c.exclusive_bytes.get(disk) for disk in wanted))
    return next(freeing, candidates[0] if candidates else None)


def is_needed(paths: DomainPaths, tree: Digest) -> bool:
    """Whether a tree is pinned, or mounted in this mount namespace."""
    return _is_held(paths, tree, mounts())


def _is_held(paths: DomainPaths, tree: Digest, mounted: Sequence[Mounted]) -> bool:
    """`is_needed`, by what is mounted in this mount namespace."""
    return any(found.tree == tree.hex for found in mounted) or bool(
        pins_of(paths, tree, [(found.volume, found.tree) for found in mounted])
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
        for root, of_disk in domain_roots(cache, paths):
            if os.path.isdir(of_disk.tree(tree)):
                discard_at(root, of_disk.tree(tree))
        for kept in (paths.damage, paths.used, paths.owners, paths.object, paths.places):
            remove_file(kept(tree))
        if not os.path.isdir(paths.partial(tree)):
            remove_file(paths.journal(tree))
            held.remove()
    return True


def remove_image(
    cache: CacheRoot, paths: DomainPaths, image: Digest, trees: frozenset[Digest]
) -> list[Evicted]:
    """Remove an image, and its `trees`, which no other image here has.

    Raises Conflict where one is pinned or mounted: without the image nobody could unpin it.
    """
    mounted = mounts()
    names = [(found.volume, found.tree) for found in mounted]
    for tree in sorted(trees):
        at = [found.directory for found in mounted if found.tree == tree.hex]
        if at:
            raise Conflict(
                f"image {image.short} is mounted at {printable(at[0])}; unmount it first"
            )
        for name in pins_of(paths, tree, names):
            if name.startswith(MOUNT_PIN):
                raise Conflict(
                    f"image {image.short} is mounted elsewhere, by pin {name}; unmount it there, or"
                    f" `snapcask cache unpin --id {name}` if that container is gone"
                )
            raise Conflict(
                f"image {image.short} is pinned by {name}; `snapcask cache unpin --id {name}` first"
            )
    remove_file(paths.image(image))
    shares = shares_blocks(cache)
    removed = []
    for tree in sorted(trees):
        alone = exclusive_bytes(paths, paths.listed("marks"), shares=shares).get(tree, {})
        if remove_complete(cache, paths, tree):
            removed.append(Evicted(paths.name, tree, sum(alone.values())))
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
