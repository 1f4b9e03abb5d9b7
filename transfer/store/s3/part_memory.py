"""How many parts of uploads are in memory at once: they are beside the buffers of a transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PARTS_BYTES = 48 * 1024 * 1024
"""With an interpreter and the SDK of 75 MB, a push stays under 150 MB beside its buffers."""


class PartMemory:
    """Counts parts, `most` at once; more only where nothing else would go on. For one event loop.

    Writes of packs come in any order, so parts may wait for bytes of writes that wait for a part.
    Whoever asks for one therefore waits only while another is being sent, which ends.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._n_sending = 0
        self._waiting: list[asyncio.Future[None]] = []
        self.n_parts = 0

    @property
    def is_tight(self) -> bool:
        """Whether the next part has to wait."""
        return self.n_parts >= self._most and self._n_sending > 0

    async def take(self) -> None:
        """Wait for the memory of one part. A cancelled wait takes none."""
        while self.is_tight:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self.n_parts += 1

    def give_back(self, n_parts: int = 1) -> None:
        """These parts are not in memory any more."""
        self.n_parts -= n_parts
        self._look_again()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A part is being sent while the block runs."""
        self._n_sending += 1
        try:
            yield
        finally:
            self._n_sending -= 1
            self._look_again()

    def _look_again(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
