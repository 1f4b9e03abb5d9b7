"""Opening the node's cache for one call, and the security domain that a store gives access to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound, StoreUnavailable
from imgfmt.reference import ImageRef, parse_reference
from snapcask.stores import opened
from transfer.cache.domains import credential_scope, domain_of
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.catalog import Catalog
from transfer.store.url import open_store


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Which cache, and whether it may fill the root filesystem."""

    directory: str
    allow_root_filesystem: bool = False

    def open(self) -> CacheRoot:
        """The cache, made if it is new."""
        allow = self.allow_root_filesystem
        return CacheRoot(self.directory, allow_root_filesystem=allow)


@asynccontextmanager
async def opened_both(
    options: CacheOptions, store: str | None
) -> AsyncIterator[tuple[CacheRoot, Catalog, DomainPaths]]:
    """The cache, a store, and its security domain."""
    cache = options.open()
    async with opened(store) as catalog:
        yield cache, catalog, domain_of(cache, catalog)


async def find_cached(
    cache: CacheRoot, reference: str, store: str | None
) -> list[tuple[DomainPaths, Digest]]:
    """Cached images that a reference means, for who looks after the cache: in any domain.

    A digest is looked up in the cache alone; a name in the store. Raises NotFound, InvalidInput.
    """
    parsed = parse_reference(reference)
    if parsed.digest is None and parsed.digest_prefix is None:
        if store is None:
            raise InvalidInput(f"{reference} is a name; give its store with --store, or a digest")
        async with opened(store) as catalog:
            found = [(domain_of(cache, catalog), await catalog.resolve(parsed))]
    else:
        found = [
            (paths, image) for paths, _ in cache.domains() for image in _fitting(paths, parsed)
        ]
    found = [(paths, image) for paths, image in found if image in paths.listed("images")]
    if not found:
        raise NotFound(f"{reference} is not in cache {cache.shown}; `snapcask cache ls` lists it")
    if len({image for _, image in found}) > 1:
        raise InvalidInput(f"{reference} is ambiguous in cache {cache.shown}; give more digits")
    return found


def _fitting(paths: DomainPaths, reference: ImageRef) -> Sequence[Digest]:
    prefix = reference.digest.hex if reference.digest else reference.digest_prefix or ""
    return [image for image in paths.listed("images") if image.hex.startswith(prefix)]


async def locate(cache: CacheRoot, reference: str, store: str | None) -> tuple[DomainPaths, Digest]:
    """The domain of a store and the image that a reference means there.

    Where the store does not answer, a digest is looked up in the domain it had. Raises NotFound.
    """
    parsed = parse_reference(reference)
    try:
        async with opened(store) as catalog:
            return domain_of(cache, catalog), await catalog.resolve(parsed)
    except (NotFound, StoreUnavailable) as error:
        if store is None or (parsed.digest is None and parsed.digest_prefix is None):
            raise
        return _without_store(cache, parsed, store, error)


def _without_store(
    cache: CacheRoot, reference: ImageRef, url: str, error: ImageError
) -> tuple[DomainPaths, Digest]:
    store = open_store(url)
    try:
        known = store.url, credential_scope(store)
    finally:
        store.close()
    for paths, record in cache.domains():
        images = _fitting(paths, reference)
        if (record.url, record.scope) == known and len(images) == 1:
            return paths, images[0]
    raise error
