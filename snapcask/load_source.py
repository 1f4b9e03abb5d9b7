"""What the source of a load means: a directory, or an image of a store that the cache may have."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from imgfmt.compat import Use
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound, StoreUnavailable
from imgfmt.image import Image, Member, Rule
from imgfmt.reference import parse_reference
from restore.cache_source import CachedSource, WarmTree, open_cache, open_warm
from restore.compat import OnMismatch, enforce, pick_image
from restore.host_facts import MachineFacts
from restore.image_source import ImageSource
from restore.sources import DirectorySource, Source
from snapcask.caches import without_store
from snapcask.stores import StoreName, opened
from transfer.cache.domains import domain_to_read
from transfer.cache.layout import CacheRoot
from transfer.cache.warm import local_image
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.pull import choose_members
from transfer.threads import Threads

_IO_THREADS = 4

SourceName = str | os.PathLike[str]
"""A directory, or a reference to an image in the store."""

CacheName = str | os.PathLike[str]
"""The directory of this node's cache, which need not exist."""


class Fit:
    """How an image must fit this machine, and warnings about one that does not."""

    def __init__(
        self, facts: Mapping[str, str] | None, on_mismatch: OnMismatch, override: Sequence[str]
    ) -> None:
        self._facts = MachineFacts(facts)
        self._on_mismatch = on_mismatch
        self._override = override
        self.warnings: list[str] = []

    async def member(
        self, catalog: Catalog, reference: str, member: str | None, threads: Threads
    ) -> Member:
        """The one member that a reference means here. Raises DoesNotFit, InvalidInput, NotFound."""
        picked = await pick_image(
            catalog, await catalog.resolve(parse_reference(reference)), self._facts,
            override=self._override, on_mismatch=self._on_mismatch, use=Use.TENSORS,
        )  # fmt: skip
        return await threads.run(
            self.only, picked.digest, picked.image, member, what=reference, when=picked.when
        )

    def only(
        self,
        digest: Digest,
        image: Image,
        member: str | None,
        *,
        what: str,
        when: Sequence[Rule] = (),
    ) -> Member:
        """The one member of an image, which must fit. Raises as `member` does. Blocks."""
        members = choose_members(image, digest, member)
        if len(members) > 1:
            shown = ", ".join(found.name for found in members)
            raise InvalidInput(f"image {digest.short} has several members, name one of {shown}")
        self.warnings += enforce(
            image, self._facts, what=what, when=when, members=members,
            override=self._override, on_mismatch=self._on_mismatch, use=Use.TENSORS,
        )  # fmt: skip
        return members[0]


@asynccontextmanager
async def opened_source(
    source: SourceName,
    *,
    store: StoreName | None,
    cache: CacheName | None,
    image: str | None,
    member: str | None,
    fit: Fit,
) -> AsyncIterator[tuple[Source, Threads]]:
    """What a name means, and threads to work with it. Raises InvalidInput, NotFound, DoesNotFit."""
    place = os.fspath(source)
    config = TransferConfig()
    with Threads("load", max(_IO_THREADS, config.n_threads)) as threads:
        if await threads.run(os.path.isdir, place):
            tree = None
            if image is not None:
                async with opened(store) as catalog:
                    found = await fit.member(catalog, image, member, threads)
                    tree = await catalog.tree(found.tree)
            elif member is not None:
                raise InvalidInput("a member is of an image: give image= to compare with it")
            yield await threads.run(DirectorySource, place, threads, tree), threads
        elif image is not None:
            raise InvalidInput(f"{place} is no directory that could be compared with {image}")
        else:
            known = await threads.run(open_cache, os.fspath(cache)) if cache is not None else None
            async with AsyncExitStack() as stack:
                yield await _image(place, store, known, member, fit, threads, stack), threads


async def _image(
    reference: str,
    store: StoreName | None,
    cache: CacheRoot | None,
    member: str | None,
    fit: Fit,
    threads: Threads,
    stack: AsyncExitStack,
) -> Source:
    """An image: from the cache if it is complete there, else from the store."""
    try:
        catalog = await stack.enter_async_context(opened(store))
        found = await fit.member(catalog, reference, member, threads)
    except (NotFound, StoreUnavailable) as error:
        if cache is None or store is None:
            raise
        return await _offline(reference, store, cache, member, fit, threads, stack, error)

    async def stored() -> Source:
        content = await catalog.content(found.tree)
        return ImageSource(catalog, content, threads, TransferConfig())

    if cache is not None:
        paths = domain_to_read(cache, catalog)
        warm = await threads.run(open_warm, cache, paths, found.tree)
        if warm is not None:
            return _cached(warm, fit, threads, stack, stored)
    return await stored()


async def _offline(
    reference: str,
    store: StoreName,
    cache: CacheRoot,
    member: str | None,
    fit: Fit,
    threads: Threads,
    stack: AsyncExitStack,
    error: ImageError,
) -> Source:
    """An image, named by its digest, that the cache has; else raises the store's `error`."""
    parsed = parse_reference(reference)
    if not parsed.by_digest:
        raise error
    paths, digest = await threads.run(without_store, cache, parsed, os.fspath(store), error)
    image = await threads.run(local_image, paths, digest)
    found = await threads.run(fit.only, digest, image, member, what=reference)
    warm = await threads.run(open_warm, cache, paths, found.tree)
    if warm is None:
        raise error

    async def stored() -> Source:
        raise error

    return _cached(warm, fit, threads, stack, stored)


def _cached(
    warm: WarmTree,
    fit: Fit,
    threads: Threads,
    stack: AsyncExitStack,
    stored: Callable[[], Awaitable[Source]],
) -> Source:
    stack.callback(warm.lock.close)
    return CachedSource(warm, threads, stored, fit.warnings.append)
