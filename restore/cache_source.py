"""An image that is complete in the cache of this node as the source of a load: its files there.

Only what the store's security domain has is used, as by mounts: a cache never gives what the store
would refuse. Every chunk is checked; where one is damaged, the store is asked after all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, ImageError, NotFound, StoreUnavailable
from imgfmt.tree import Tree
from restore.image_source import check_verified
from restore.load_job import LoadJob
from restore.sources import DamagedChunk, DirectorySource, Source, tree_files
from transfer.cache.damage import add_damage, mark_damage
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import Lock, lock
from transfer.cache.owners import is_sound, read_object
from transfer.cache.places import files_of
from transfer.cache.usage import touch
from transfer.threads import Threads

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WarmTree:
    """A complete tree of the cache, which nobody removes before `lock` is closed.

    `files` says where each of its files is, by path in the tree.
    """

    paths: DomainPaths
    digest: Digest
    tree: Tree
    files: Mapping[str, str]
    lock: Lock


def open_cache(root: str) -> CacheRoot | None:
    """The cache at `root`; None if there is none, or it is not this user's. Makes none. Blocks."""
    try:
        return CacheRoot(root, allow_root_filesystem=True, create=False)  # who made it was asked
    except ImageError as error:
        _log.debug("nothing is loaded from the cache: %s", error)
        return None


def open_warm(cache: CacheRoot, paths: DomainPaths, digest: Digest) -> WarmTree | None:
    """A tree of the domain, if it is complete and sound. Its lock is the caller's. Blocks."""
    if not os.path.exists(paths.mark(digest)):
        return None
    held = None
    try:
        with cache.told():
            held = lock(paths.lock(digest), shared=True, wait=False)
            if held is not None and is_sound(paths, digest, cache.session):
                tree = read_object(paths, digest)
                names = files_of(paths, digest, tree).names
                files = {p: os.fsdecode(names[index]) for p, index in tree_files(tree).items()}
                touch(paths, digest)
                found, held = WarmTree(paths, digest, tree, files, held), None
                return found
    except ImageError as error:
        _log.debug("tree %s is not loaded from the cache: %s", digest.short, error)
    finally:
        if held is not None:
            held.close()
    return None


class CachedSource:
    """A member of an image, from the cache; what is damaged or gone there comes from the store.

    `stored` opens the same member in the store, or raises. `warn` is told of damage. Whoever made
    `warm` closes its lock.
    """

    def __init__(
        self,
        warm: WarmTree,
        threads: Threads,
        stored: Callable[[], Awaitable[Source]],
        warn: Callable[[str], None],
    ) -> None:
        self._warm = warm
        self._threads = threads
        self._open_stored = stored
        self._warn = warn
        self._stored: Source | None = None
        root = warm.paths.tree(warm.digest)
        self._cached = DirectorySource(root, threads, warm.tree, warm.files)
        self.files = self._cached.files

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """See `Source.read`."""
        if self._stored is None:
            try:
                return await self._cached.read(path, offset, length)
            except (CorruptData, NotFound, StoreUnavailable) as error:
                self._stored = await self._instead(error)
        return await self._stored.read(path, offset, length)

    async def load(self, job: LoadJob) -> None:
        """See `Source.load`. Tensors that were handed out from the cache are good, and stay."""
        check_verified(job)
        if self._stored is None:
            try:
                await self._cached.load(job)
            except (CorruptData, NotFound, StoreUnavailable) as error:
                self._stored = await self._instead(error)
                job.arena.reset()
            else:
                job.from_cache = True
                return
        await self._stored.load(job)

    async def _instead(self, error: ImageError) -> Source:
        """The store, after the damage was written down. Raises `error` if there is no store."""
        await self._threads.run(self._mark, error)
        try:
            stored = await self._open_stored()
        except ImageError as other:
            raise error from other
        self._warn(f"{error}; loaded from the store, `snapcask prefetch` mends the cache")
        return stored

    def _mark(self, error: ImageError) -> None:
        """Say durably which trees have a bad chunk: nobody mounts them before they are mended.

        Of what is missing or can't be read only this tree is known.
        """
        paths = self._warm.paths
        with suppress(ImageError, OSError):
            if isinstance(error, DamagedChunk):
                mark_damage(paths, np.frombuffer(error.digest.raw, np.uint8).reshape(1, -1))
            else:
                add_damage(paths, self._warm.digest, np.zeros(0, np.int64))
