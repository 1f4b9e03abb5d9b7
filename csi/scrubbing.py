"""The cache is read back now and then, and what rotted is mended, while volumes stay mounted."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from csi.config import CsiConfig
from csi.stores import Stores
from imgfmt.errors import AccessDenied, ImageError
from transfer.cache.layout import CacheRoot
from transfer.cache.scrub import ScrubReport, scrub
from transfer.catalog import Catalog
from transfer.config import TransferConfig

_log = logging.getLogger(__name__)

_LOOK_S = 300.0
_MAX_LINES = 20


class Scrubber:
    """Reads the whole cache once in `intervalHours`, at `bytesPerSecond` on average.

    The time of the last round is that of a file, so that a driver that is often replaced gets
    round too.
    """

    def __init__(self, config: CsiConfig, cache: CacheRoot, stores: Stores, folder: str) -> None:
        self._config = config
        self._cache = cache
        self._stores = stores
        self._stamp = os.path.join(folder, "scrubbed")

    async def run(self) -> None:
        """Scrub whenever it is time, for ever; cancel it at the end."""
        interval_s = self._config.cache.scrub_interval_s
        if not interval_s:
            return
        while True:
            if time.time() - await asyncio.to_thread(self._last_s) >= interval_s:
                try:
                    await self.scrub()
                except (ImageError, OSError) as error:
                    _log.warning("the cache was not scrubbed: %s", error)
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(_LOOK_S, interval_s))

    def _last_s(self) -> float:
        """When the last round ended, or the first driver began here; never in the future."""
        try:
            there = os.stat(self._stamp)
        except FileNotFoundError:
            self._note()
            return time.time()
        return min(there.st_mtime, time.time())

    def _note(self) -> None:
        with open(self._stamp, "wb"):
            os.utime(self._stamp)

    async def scrub(self) -> ScrubReport:
        """One round. What was found is logged."""
        report = await scrub(
            self._cache,
            None,
            TransferConfig(),
            open_store=self._opened,
            bytes_per_s=float(self._config.cache.scrub_bytes_per_s),
        )
        for line in report.problems[:_MAX_LINES]:
            _log.warning(line)
        for tree in report.marked:
            _log.warning("tree %s had damage", tree.short)
        _log.info(
            "scrubbed the cache: %d trees, %d bytes, %d damaged, %d mended",
            report.trees, report.n_bytes, len(report.marked), len(report.mended),
        )  # fmt: skip
        await asyncio.to_thread(self._note)
        return report

    @asynccontextmanager
    async def _opened(self, url: str) -> AsyncIterator[Catalog]:
        """A store that the administrator named, with the driver's identity; no other one."""
        for name in self._config.stores:
            async with self._stores.held(self._stores.address(name, None)) as found:
                if found.store.url == url:
                    yield await found.catalog()
                    return
        raise AccessDenied(
            f"store {url[:200]} is none of the driver's; the next Pod that mounts an image of it"
            " mends what is damaged"
        )
