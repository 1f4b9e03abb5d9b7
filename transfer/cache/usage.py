"""What keeps a tree in the cache, and what it takes: use, pins, mounts, exclusive bytes."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput
from transfer.cache.durable import read_file, remove_file, replace_file
from transfer.cache.layout import DomainPaths
from transfer.cache.owners import Keys, keys_of, read_mark, read_object
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
    paths: DomainPaths, trees: Sequence[Digest], *, shares: bool
) -> Mapping[Digest, int]:
    """Bytes on disk that each of these trees alone holds. Without `shares`, all of its bytes."""
    if not shares:
        return {tree: _data_bytes(paths, tree) for tree in trees}
    chunks = [_distinct(paths, tree) for tree in trees]
    every, count = np.unique(_joined([keys for keys, _ in chunks]), return_counts=True)
    alone = [count[np.searchsorted(every, keys)] == 1 for keys, _ in chunks]
    return {
        tree: int(sizes[own].sum(dtype=np.uint64))
        for tree, (_, sizes), own in zip(trees, chunks, alone, strict=True)
    }


def held_bytes(paths: DomainPaths, trees: Sequence[Digest], *, shares: bool) -> int:
    """Bytes on disk that these trees hold together."""
    if not shares:
        return sum(_data_bytes(paths, tree) for tree in trees)
    chunks = [_distinct(paths, tree) for tree in trees]
    _, first = np.unique(_joined([keys for keys, _ in chunks]), return_index=True)
    return int(_joined([sizes for _, sizes in chunks])[first].sum(dtype=np.uint64))


def _distinct(paths: DomainPaths, tree: Digest) -> tuple[Keys, Keys]:
    """Keys and bytes of the distinct chunks of a tree; of none if its object is damaged."""
    try:
        found = read_object(paths, tree)
    except ImageError:
        return np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    keys, first = np.unique(keys_of(found.chunk_digest), return_index=True)
    return keys, found.chunk_bytes[first].astype(np.uint64)


def _joined(arrays: Sequence[Keys]) -> Keys:
    return np.concatenate([np.zeros(0, np.uint64), *arrays])


def _data_bytes(paths: DomainPaths, tree: Digest) -> int:
    mark = read_mark(paths, tree)
    return mark.data_bytes if mark else 0


def volume_id() -> str:
    """A new name for a mount that nobody named."""
    return secrets.token_hex(8)
