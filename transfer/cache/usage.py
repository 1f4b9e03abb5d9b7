"""What keeps a tree in the cache, and what it takes: use, pins, mounts, exclusive bytes."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput
from transfer.cache.disks import MAIN, ByDisk
from transfer.cache.durable import read_file, remove_file, replace_file
from transfer.cache.layout import DomainPaths
from transfer.cache.owners import Keys, keys_of, read_mark, read_object
from transfer.cache.places import read_places
from transfer.cache.records import Pin
from transfer.mounts import namespace_id
from transfer.session import boot_id

MOUNT_PIN = "mount-"
_LAST = ".last"
_ID_BYTES = 200


def touch(paths: DomainPaths, tree: Digest) -> None:
    """The tree is used now. Later uses have later times, whatever the clock does."""
    last_path = os.path.join(paths.folder, "used", _LAST)
    last_ns = 0
    with contextlib.suppress(FileNotFoundError):
        last_ns = os.stat(last_path).st_mtime_ns
    now_ns = max(time.time_ns(), last_ns + 1)
    for path in (paths.used(tree), last_path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.utime(path, ns=(now_ns, now_ns))


def used_ns(paths: DomainPaths, tree: Digest) -> int:
    """When the tree was last used; 0 if never."""
    try:
        return os.stat(paths.used(tree)).st_mtime_ns
    except FileNotFoundError:
        return 0


def add_pin(paths: DomainPaths, tree: Digest, pin_id: str, pin: Pin, *, fsync: bool) -> None:
    """Keep a tree until `remove_pin`. Raises InvalidInput for what can't be a pin's name."""
    if not pin_id or "/" in pin_id or pin_id.startswith(".") or len(pin_id) > _ID_BYTES:
        raise InvalidInput(f"{pin_id[:80]!r} can't name a pin; use letters, digits, - and _")
    with contextlib.suppress(FileExistsError):
        os.mkdir(paths.pins(tree), 0o700)
    replace_file(os.path.join(paths.pins(tree), pin_id), [pin.encode()], fsync=fsync)


def remove_pin(paths: DomainPaths, tree: Digest, pin_id: str) -> bool:
    """Says whether there was such a pin."""
    removed = remove_file(os.path.join(paths.pins(tree), pin_id))
    with contextlib.suppress(OSError):
        os.rmdir(paths.pins(tree))
    return removed


def remove_mount_pin(paths: DomainPaths, tree: Digest, volume: str) -> None:
    """The mount `volume` was undone here; its pin stays if it was made in another mount namespace.

    There it may stand still: this one may be a copy.
    """
    raw = read_file(os.path.join(paths.pins(tree), MOUNT_PIN + volume))
    with contextlib.suppress(ImageError):
        if raw is not None:
            pin = Pin.decode(raw, f"pin of volume {volume}")
            if pin.boot == boot_id() and pin.namespace != namespace_id():
                return
    remove_pin(paths, tree, MOUNT_PIN + volume)


def new_pin(reason: str, *, directory: str = "") -> Pin:
    """A pin made now; that of a mount at `directory` if there is one."""
    if not directory:
        return Pin(reason, max(0, time.time_ns()))
    return Pin(reason, max(0, time.time_ns()), directory, boot_id(), namespace_id())


def pins_of(paths: DomainPaths, tree: Digest, mounted: Iterable[tuple[str, str]]) -> list[str]:
    """Names of the pins that hold a tree; stale ones of mounts are removed.

    `mounted` are volume and tree of the mounts of this namespace.
    """
    try:
        names = sorted(os.listdir(paths.pins(tree)))
    except FileNotFoundError:
        return []
    here = set(mounted)
    return [name for name in names if name[0] != "." and not _stale(paths, tree, name, here)]


def _stale(paths: DomainPaths, tree: Digest, name: str, here: set[tuple[str, str]]) -> bool:
    path = os.path.join(paths.pins(tree), name)
    raw = read_file(path)
    if raw is None:
        return True
    try:
        pin = Pin.decode(raw, f"pin {name}")
    except ImageError:
        return False  # of another version: it holds
    if not name.startswith(MOUNT_PIN) or not pin.directory:
        return False
    volume = name.removeprefix(MOUNT_PIN)
    gone = pin.boot != boot_id() or (
        pin.namespace == namespace_id() and (volume, tree.hex) not in here
    )
    if gone and time.time_ns() - pin.time_ns > _MOUNTING_NS:
        return remove_file(path) or True
    return False


_MOUNTING_NS = 10 * 1_000_000_000
"""A pin comes before its mount; younger ones are not stale yet."""


def exclusive_bytes(
    paths: DomainPaths, trees: Sequence[Digest], *, shares: Mapping[bytes, bool]
) -> Mapping[Digest, ByDisk]:
    """Bytes on each disk that each of these trees alone holds; where `shares` is false, all.

    Only the disks that `shares` has are looked at; a tree has no entry where it has no bytes.
    """
    found: dict[Digest, dict[bytes, int]] = {tree: {} for tree in trees}
    for disk, held in _held(paths, trees, shares).items():
        if not shares[disk]:
            for tree, n_bytes in held.items():
                found[tree][disk] = int(n_bytes.sizes.sum(dtype=np.uint64))
            continue
        every, count = np.unique(_joined([h.keys for h in held.values()]), return_counts=True)
        for tree, own in held.items():
            alone = count[np.searchsorted(every, own.keys)] == 1
            found[tree][disk] = int(own.sizes[alone].sum(dtype=np.uint64))
    return found


def held_bytes(
    paths: DomainPaths, trees: Sequence[Digest], *, shares: Mapping[bytes, bool]
) -> ByDisk:
    """Bytes on each disk that these trees hold together."""
    found: dict[bytes, int] = {}
    for disk, held in _held(paths, trees, shares).items():
        sizes = _joined([own.sizes for own in held.values()])
        if shares[disk]:
            keys = _joined([own.keys for own in held.values()])
            sizes = sizes[np.unique(keys, return_index=True)[1]]
        found[disk] = int(sizes.sum(dtype=np.uint64))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Keys and bytes of the chunks of a tree on one disk; distinct ones where blocks are shared."""

    keys: Keys
    sizes: Keys


def _held(
    paths: DomainPaths, trees: Sequence[Digest], shares: Mapping[bytes, bool]
) -> dict[bytes, dict[Digest, _Held]]:
    """What each tree has on each disk; nothing of those whose object is damaged."""
    found: dict[bytes, dict[Digest, _Held]] = {}
    for digest in trees:
        mark = read_mark(paths, digest)
        if mark is not None and not mark.disks and not shares[MAIN]:
            whole = _Held(np.zeros(1, np.uint64), np.array([mark.data_bytes], np.uint64))
            found.setdefault(MAIN, {})[digest] = whole
            continue
        with contextlib.suppress(ImageError):
            for disk, own in _held_by(paths, digest, shares):
                found.setdefault(disk, {})[digest] = own
    return found


def _held_by(
    paths: DomainPaths, digest: Digest, shares: Mapping[bytes, bool]
) -> Iterator[tuple[bytes, _Held]]:
    tree = read_object(paths, digest)
    places = read_places(paths, digest, tree)
    keys, sizes = keys_of(tree.chunk_digest), tree.chunk_bytes.astype(np.uint64)
    part = places.of[tree.chunk_entry] if places.disks else None
    for index, disk in enumerate(places.ids):
        if disk not in shares:
            continue
        here = slice(None) if part is None else part == index
        own, own_sizes = keys[here], sizes[here]
        if not len(own):
            continue
        if shares[disk]:
            own, first = np.unique(own, return_index=True)
            own_sizes = own_sizes[first]
        yield disk, _Held(own, own_sizes)


def _joined(arrays: Sequence[Keys]) -> Keys:
    return np.concatenate([np.zeros(0, np.uint64), *arrays])


def volume_id() -> str:
    """A new name for a mount that nobody named."""
    return secrets.token_hex(8)
