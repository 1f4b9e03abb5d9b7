"""The security domain of the cache that a store gives access to."""

from __future__ import annotations

import os

from transfer.cache.layout import CacheRoot, DomainPaths, domain_name
from transfer.catalog import Catalog
from transfer.store.base import Store


def credential_scope(store: Store) -> str:
    """What a store may be read with: stores tell it themselves; a directory, by user."""
    scope = getattr(store, "credential_scope", None)
    return scope if isinstance(scope, str) else f"user:{os.geteuid()}"


def domain_of(cache: CacheRoot, catalog: Catalog) -> DomainPaths:
    """The security domain of an opened store, made if it is new. Blocks."""
    store = catalog.store
    return cache.domain(catalog.record.uuid, credential_scope(store), store.url)


def domain_to_read(cache: CacheRoot, catalog: Catalog) -> DomainPaths:
    """The same for who only reads: it is not made."""
    name = domain_name(catalog.record.uuid, credential_scope(catalog.store))
    return DomainPaths(cache.path, name, cache.disks)


def domains_of_url(cache: CacheRoot, store: Store) -> list[DomainPaths]:
    """Domains that this store, read with these credentials, had before. No store is asked. Blocks.

    More than one where another store has taken the place of an earlier one.
    """
    known = store.url, credential_scope(store)
    return [paths for paths, record in cache.domains() if (record.url, record.scope) == known]
