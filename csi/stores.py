"""The stores that volumes come from, opened once for each set of credentials.

Whoever uses one holds it meanwhile; of those that nobody holds, the latest used stay open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from csi.config import CsiConfig
from imgfmt.errors import AccessDenied, InvalidInput, NotFound
from transfer.catalog import Catalog, open_catalog
from transfer.store.base import ClosableStore
from transfer.store.s3.config import Credentials
from transfer.store.s3.options import split_options
from transfer.store.url import open_store

MAX_IDLE = 16
_POD_OPTIONS = frozenset({"endpoint", "region", "addressing", "sign"})


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store, and what it is read with: None for the driver's own identity."""

    url: str
    credentials: Credentials | None = None


@dataclass(slots=True, eq=False)
class OpenStore:
    """A store in use. `catalog()` asks it for its record the first time."""

    store: ClosableStore
    holders: int = 0
    _catalog: Catalog | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def catalog(self) -> Catalog:
        """Typed reading from it. Raises NotFound if there is no store, StoreUnavailable."""
        async with self._opening:
            if self._catalog is None:
                self._catalog = await open_catalog(self.store)
            return self._catalog


class Stores:
    """Opens stores by the names of the configuration, or by URL where that is allowed."""

    def __init__(self, config: CsiConfig) -> None:
        self._config = config
        self._open: dict[StoreAddress, OpenStore] = {}

    def address(
        self, named: str | None, credentials: Credentials | None, *, inline: bool = True
    ) -> StoreAddress:
        """The store that a volume names. Raises InvalidInput, NotFound, AccessDenied."""
        config = self._config
        name = named or config.default_store
        if name is None:
            raise InvalidInput(
                f"the volume names no store and there is no default; it may name"
                f" {', '.join(sorted(config.stores))}"
            )
        if name in config.stores:
            url = config.stores[name].url
            if credentials is not None and not url.lower().startswith("s3://"):
                raise InvalidInput(f"store {name} takes no Secret; it is a directory")
            return StoreAddress(url, credentials)
        if "://" not in name and "/" not in name:
            raise NotFound(
                f"store {name[:80]!r} is not known here; there are"
                f" {', '.join(sorted(config.stores))}"
            )
        if not config.allow_pod_stores or not inline:
            raise AccessDenied(
                f"store {name[:80]!r} is not one of {', '.join(sorted(config.stores))}; an"
                " administrator can add it, or set allowPodStores"
            )
        return StoreAddress(_checked_url(name, credentials), credentials)

    @asynccontextmanager
    async def held(self, address: StoreAddress) -> AsyncIterator[OpenStore]:
        """The store at an address, which stays open meanwhile."""
        found = self._open.pop(address, None)
        if found is None:
            found = OpenStore(_open(address))
        self._open[address] = found  # now the latest used
        found.holders += 1
        try:
            yield found
        finally:
            found.holders -= 1
            self._close_idle(MAX_IDLE)

    def _close_idle(self, n_kept: int) -> None:
        idle = [address for address, found in self._open.items() if not found.holders]
        for address in idle[: max(0, len(idle) - n_kept)]:
            self._open.pop(address).store.close()

    def close(self) -> None:
        """Close all. Nobody may hold one."""
        self._close_idle(0)


def _open(address: StoreAddress) -> ClosableStore:
    if address.credentials is None:
        return open_store(address.url)
    return open_store(address.url, credentials=address.credentials)


def _checked_url(url: str, credentials: Credentials | None) -> str:
    """A URL from a Pod: a bucket, read with the Pod's own keys or none, never with the driver's."""
    if not url.lower().startswith("s3://"):
        raise AccessDenied(f"store {url[:80]!r}: Pods may only name s3:// stores themselves")
    _, chosen = split_options(url)
    options = {part.partition("=")[0] for part in url.partition("?")[2].split("&")} - {""}
    if options - _POD_OPTIONS:
        raise InvalidInput(
            f"store {url[:80]!r}: Pods may only give the options {', '.join(sorted(_POD_OPTIONS))}"
        )
    if credentials is None and chosen.get("sign") is not False:
        raise AccessDenied(
            f"store {url[:80]!r}: give its keys with nodePublishSecretRef, or sign=no in the URL"
            " for a public bucket; the driver's own identity is not for stores of Pods"
        )
    return url
