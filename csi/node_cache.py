"""The node's cache as the driver opens it: with its further disks, and by one driver at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator

from csi.config import CacheConfig
from imgfmt.errors import Conflict, InvalidInput
from transfer.cache.disks import NewDisk
from transfer.cache.layout import CacheRoot
from transfer.oserrors import printable, translate

_LOCK_S = 10.0


def open_cache(config: CacheConfig, kubelet: str) -> CacheRoot:
    """The cache, made if it is new; `kubelet` is kubelet's folder.

    Raises InvalidInput, NotFound or AccessDenied where it, or a further disk that is new to it,
    can't be used. A disk that it has and that is not there is only warned of. Blocks.
    """
    allow = config.allow_root_filesystem
    if not allow:
        _check_own_disk(f"cache {printable(config.path)}", config.path, kubelet)
    cache = CacheRoot(config.path, allow_root_filesystem=allow)
    known = {disk.path for disk in cache.disks}
    new = [path for path in config.disks if os.path.realpath(path) not in known]
    if not new:
        return cache
    if not allow:
        for path in new:
            _check_own_disk(f"disk {printable(path)} of the cache", path, kubelet)
    disks = [NewDisk(path, on_root=allow) for path in new]
    return CacheRoot(config.path, allow_root_filesystem=allow, disks=disks)


def _check_own_disk(what: str, path: str, kubelet: str) -> None:
    """Raise InvalidInput where a full cache would fill kubelet's disk.

    In a container this tells the node's root disk, for there `/` is the container's own.
    """
    there = path if os.path.isdir(path) else os.path.dirname(path)
    try:
        same = os.stat(there).st_dev == os.stat(kubelet).st_dev
    except OSError as error:
        raise translate(error, what) from error
    if same:
        raise InvalidInput(
            f"{what} lies on the disk of kubelet's folder, which a full cache"
            " would stop; name a folder on another disk, or set cache.allowRootFilesystem and"
            " cache.maxBytes"
        )


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Raise Conflict unless no other driver uses this cache; one that is ending is waited for."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise Conflict(
                        f"another driver uses {printable(os.path.dirname(path))}; end it first"
                    ) from None
            time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)
