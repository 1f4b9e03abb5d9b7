"""The stores that volumes come from, opened once for each set of credentials.

Whoever uses one holds it meanwhile; of those that nobody holds, the latest used stay open.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from csi.config import CsiConfig
from imgfmt.errors import AccessDenied, ImageError, InvalidInput, NotFound, StoreUnavailable
from transfer.catalog import Catalog, open_catalog
from transfer.oserrors import printable
from transfer.store.base import ClosableStore
from transfer.store.posix import PosixStore
from transfer.store.s3.config import Credentials
from transfer.store.s3.options import split_options
from transfer.store.url import open_store

MAX_IDLE = 16
_POD_OPTIONS = frozenset({"endpoint", "region", "addressing", "sign"})
_FILE_URL = re.compile(r"(?i:file)://(localhost)?/.*")
_CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")


def check_url(url: str) -> None:
    """Raise InvalidInput, or Unsupported, for what can't be the URL of a store.

    Nothing is asked or looked at: the directory of a store may be a mount that hangs.
    """
    if url.lower().startswith("file://"):
        if not _FILE_URL.fullmatch(url) or "%00" in url:
            raise InvalidInput(f"store {url}: expected file:///path")
    elif "://" in url:
        open_store(url, environment={}).close()
    elif not url.startswith("/"):
        raise InvalidInput(
            f"store {url}: expected an absolute path, a file:// or an s3://bucket/prefix URL"
        )


def check_buckets(config: CsiConfig) -> None:
    """Raise InvalidInput, naming the key, for a bucket that this process could never ask.

    Counts are the AWS variables, and the profiles and certificates that a URL names. No store is
    asked.
    """
    for name, store in config.stores.items():
        if not store.url.lower().startswith("s3://"):
            continue
        try:
            open_store(store.url).close()
            _check_files(store.url)
        except ImageError as error:
            raise type(error)(f"stores.{name}.url: {error}") from error


def _check_files(url: str) -> None:
    _, chosen = split_options(url)
    bundles = [chosen.get("ca_bundle"), *map(os.environ.get, _CA_VARIABLES)]
    bundle = next(filter(None, bundles), None)
    if chosen.get("verify_tls", True) and bundle and not os.access(bundle, os.R_OK):
        raise InvalidInput(
            f"the CA bundle {printable(bundle)} can't be read; mount it, or leave it out"
        )
    if profile := chosen.get("profile"):
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        try:
            Session(profile=profile).get_scoped_config()
        except BotoCoreError as error:
            raise InvalidInput(f"profile {profile}: {error}") from error


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store, and what it is read with: None for the driver's own identity."""

    url: str
    credentials: Credentials | None = None


@dataclass(slots=True, eq=False)
class OpenStore:
    """A store in use. `catalog()` asks it for its record the first time, a directory each time."""

    store: ClosableStore
    holders: int = 0
    _catalog: Catalog | None = None
    _opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def catalog(self) -> Catalog:
        """Typed reading from it. Raises StoreUnavailable, also where there is no store.

        The configuration says that there is one, so what lacks is a mount, or time.
        """
        async with self._opening:
            if self._catalog is None or isinstance(self.store, PosixStore):
                try:
                    self._catalog = await open_catalog(self.store)
                except NotFound as error:
                    raise StoreUnavailable(str(error)) from error
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
