"""Reads a slow range a second time, over a new connection into another buffer; the first right one
wins. So one bad connection costs a transfer little, at its end above all.

A loser never writes into a buffer that is used again: it is cancelled, and its buffer goes back to
the pool only when its read has ended. Where nothing is slow, nothing is done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, runtime_checkable

from imgfmt.errors import ImageError, StoreUnavailable
from transfer.buffers import BufferPool, Lease
from transfer.tasks import first_cause

N_HELPERS = 2
_MIN_LOOK_S, _MAX_LOOK_S = 0.01, 0.1


@runtime_checkable
class HedgeableStore(Protocol):
    """A store over a network. After either read has ended or was cancelled, nothing writes."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""

    async def read_into_anew(self, key: str, offset: int, buffer: memoryview) -> None:
        """The same over a connection of its own."""

    @property
    def throttled(self) -> bool:
        """Whether the server has just asked for fewer requests."""


@dataclass(frozen=True, slots=True)
class HedgeConfig:
    """When a range is slow, and how many may be read twice.

    While ranges are left to begin: after `slow_factor` times what 95 % take, and `floor_s` at
    least. When all have begun, and idle workers wait for the last: after `last_factor` times the
    median and `last_floor_s`. In all `most_percent` of the ranges, and `few` more.
    """

    slow_factor: float = 3.0
    floor_s: float = 1.0
    last_factor: float = 1.5
    last_floor_s: float = 0.05
    most_percent: float = 5.0
    few: int = 4
    remembered: int = 256


@dataclass(eq=False, slots=True)
class _Running:
    """A range that is being read. `winner` is the buffer of the second read, if that was first."""

    key: str
    offset: int
    size_bytes: int
    begun_s: float
    scope: asyncio.Timeout
    reading: bool = True
    second: asyncio.Timeout | None = None
    second_done: asyncio.Event = field(default_factory=asyncio.Event)
    winner: Lease | None = None
    ended: bool = False


class HedgePolicy:
    """Decides which range is read twice. Pure, with the time handed in."""

    def __init__(self, config: HedgeConfig, n_ranges: int) -> None:
        self._config = config
        self._left = n_ranges
        self._allowed = int(n_ranges * config.most_percent / 100) + config.few
        self._took_s: deque[float] = deque(maxlen=config.remembered)
        self.n_hedged = 0

    def begun(self) -> None:
        """One more range is being read for the first time."""
        self._left -= 1

    def ended(self, took_s: float) -> None:
        """A range came within `took_s`."""
        self._took_s.append(took_s)

    @property
    def patience_s(self) -> float | None:
        """For how long a range may be read before it is slow; None if nothing tells yet."""
        if self.n_hedged >= self._allowed:
            return None
        ordered = sorted(self._took_s)
        config = self._config
        if self._left > 0:
            if len(ordered) < 8:
                return None
            return max(config.floor_s, config.slow_factor * ordered[int(len(ordered) * 0.95)])
        usual_s = ordered[len(ordered) // 2] if ordered else config.floor_s
        return max(config.last_floor_s, config.last_factor * usual_s)


class Hedger:
    """Context manager around the reads of one plan; `read` takes the place of `read_into`."""

    def __init__(
        self,
        store: HedgeableStore,
        pool: BufferPool,
        n_ranges: int,
        config: HedgeConfig | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pool = pool
        self._policy = HedgePolicy(config or HedgeConfig(), n_ranges)
        self._now_s = now_s
        self._running: set[_Running] = set()
        self._group = asyncio.TaskGroup()
        self._helpers: list[asyncio.Task[None]] = []
        self.n_won = 0

    @property
    def n_hedged(self) -> int:
        """Ranges that were read a second time so far; `n_won` of these were first."""
        return self._policy.n_hedged

    async def __aenter__(self) -> Hedger:
        await self._group.__aenter__()
        self._helpers = [self._group.create_task(self._help()) for _ in range(N_HELPERS)]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for helper in self._helpers:
            helper.cancel()
        is_cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
        given = (kind, error, trace) if is_cancelled else (None, None, None)
        try:
            await self._group.__aexit__(*given)
        except BaseExceptionGroup as failed:
            raise first_cause(failed) from None

    async def read(self, key: str, offset: int, size_bytes: int, lease: Lease) -> Lease:
        """Read a range; its bytes are then at the beginning of the view of the lease returned.

        That is `lease`, or another one of the pool, in whose favour `lease` was released. If this
        raises, `lease` is still the caller's.
        """
        running = _Running(key, offset, size_bytes, self._now_s(), asyncio.timeout(None))
        self._policy.begun()
        try:
            await self._read_first(running, lease.view[:size_bytes])
        except BaseException:
            self._end(running)
            if running.winner is not None:
                running.winner.release()
            raise
        self._end(running)
        self._policy.ended(self._now_s() - running.begun_s)
        if running.winner is None:
            return lease
        lease.release()
        return running.winner

    async def _read_first(self, running: _Running, buffer: memoryview) -> None:
        """Return when either read has brought the bytes."""
        try:
            async with running.scope:
                self._running.add(running)
                await self._store.read_into(running.key, running.offset, buffer)
        except TimeoutError:
            if running.winner is None:
                raise
        except StoreUnavailable:
            running.reading = False
            if running.second is None:
                raise
            await running.second_done.wait()  # which may still bring them
            if running.winner is None:
                raise

    def _end(self, running: _Running) -> None:
        """Nobody waits for the second read any more."""
        running.ended = True
        running.reading = False
        self._running.discard(running)
        if running.second is not None and not running.second_done.is_set():
            running.second.reschedule(0)

    async def _help(self) -> None:
        """Look again and again for a range that is slow, and read it a second time."""
        while True:
            slow = self._slowest()
            if slow is not None:
                await self._read_again(slow)
            else:
                patience_s = self._policy.patience_s or _MAX_LOOK_S
                await asyncio.sleep(min(max(patience_s / 4, _MIN_LOOK_S), _MAX_LOOK_S))

    def _slowest(self) -> _Running | None:
        """The range that is read for longest, if that is too long and another try may help."""
        patience_s = self._policy.patience_s
        if patience_s is None or not self._pool.n_free or self._store.throttled:
            return None
        single = [running for running in self._running if running.second is None]
        oldest = min(single, key=lambda running: running.begun_s, default=None)
        if oldest is None or self._now_s() - oldest.begun_s < patience_s:
            return None
        return oldest

    async def _read_again(self, slow: _Running) -> None:
        """Read a range over a new connection. If it comes first, the first read is cancelled."""
        self._policy.n_hedged += 1
        lease = await self._pool.acquire()
        try:
            async with asyncio.timeout(None) as slow.second:
                buffer = lease.view[: slow.size_bytes]
                await self._store.read_into_anew(slow.key, slow.offset, buffer)
        except (ImageError, TimeoutError):
            lease.release()
        except BaseException:
            lease.release()
            raise
        else:
            if slow.ended:
                lease.release()
            else:
                self._win(slow, lease)
        finally:
            slow.second_done.set()

    def _win(self, slow: _Running, lease: Lease) -> None:
        self.n_won += 1
        slow.winner = lease
        if slow.reading:
            slow.scope.reschedule(0)
