"""Opening a store for one call, and how much the call may use."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from imgfmt.errors import InvalidInput
from transfer.catalog import Catalog, open_catalog
from transfer.config import transfer_config as transfer_config
from transfer.store.url import open_store

StoreName = str | os.PathLike[str]
"""A store's directory, or its `file://` URL."""


@asynccontextmanager
async def opened(store: StoreName | None, *, write: bool = False) -> AsyncIterator[Catalog]:
    """The catalog of a store. Raises InvalidInput for None, NotFound, Unsupported."""
    if store is None:
        raise InvalidInput(
            "no store is given: name one with --store or SNAPCASK_STORE, in Python with store="
        )
    backend = open_store(os.fspath(store))
    try:
        yield await open_catalog(backend, write=write)
    finally:
        backend.close()
