"""Opening a store for one call, and how much the call may use."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from imgfmt.errors import InvalidInput
from transfer.catalog import Catalog, open_catalog
from transfer.config import MIB, TransferConfig
from transfer.store.url import open_store

StoreName = str | os.PathLike[str]
"""A store's directory, or its `file://` URL."""

_MIN_SLOTS = 3
_MIN_BLOCK_BYTES = 2 * MIB
_BLOCK_STEP_BYTES = 64 * 1024


@asynccontextmanager
async def opened(store: StoreName | None, *, write: bool = False) -> AsyncIterator[Catalog]:
    """The catalog of a store. Raises InvalidInput for None, NotFound, Unsupported."""
    if store is None:
        raise InvalidInput("no store is given: name one with store=, a directory or file:// URL")
    backend = open_store(os.fspath(store))
    try:
        yield await open_catalog(backend, write=write)
    finally:
        backend.close()


def transfer_config(
    max_memory_bytes: int | None, *, fsync: bool = True, buffered: bool = False
) -> TransferConfig:
    """The configuration with this limit to all buffers together, or the default one.

    Raises InvalidInput for less than 6 MiB, with which nothing can be moved.
    """
    if max_memory_bytes is None:
        return TransferConfig(fsync=fsync, buffered=buffered)
    least = _MIN_SLOTS * _MIN_BLOCK_BYTES
    if max_memory_bytes < least:
        raise InvalidInput(f"{max_memory_bytes} bytes of memory are too little, give {least}")
    share = max_memory_bytes // _MIN_SLOTS
    block_bytes = min(TransferConfig().block_bytes, share - share % _BLOCK_STEP_BYTES)
    return TransferConfig(
        block_bytes=block_bytes,
        max_memory_bytes=max_memory_bytes,
        fsync=fsync,
        buffered=buffered,
    )
