"""How many requests a server gets at a time: found out by trying, and shared by all workers.

The limit grows while that moves more bytes, and falls when the server asks to slow down. The number
at which it asked is remembered, so that the limit settles below it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

PERIOD_S = 0.5
GAIN = 1.03
SETTLED_S = 5.0
DECREASE = 0.7
CEILING_S = 30.0
MAX_CEILING_S = 600.0
THROTTLED_S = 5.0


@dataclass(frozen=True, slots=True)
class Permit:
    """One request under way: how many there were with it, and which decreases it has seen."""

    in_flight: int
    round: int


class ConcurrencyLimit:
    """Admits at most `limit` requests at a time, first come first served. For one event loop."""

    def __init__(self, most: int, now_s: Callable[[], float], *, start: int | None = None) -> None:
        self._now_s = now_s
        self._limit = min(most, max(8, most // 4) if start is None else start)
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._blocked_until_s = self._throttled_until_s = now_s()
        self._round = 0
        self._growth = _Growth(most, now_s())

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return self._limit

    @property
    def in_flight(self) -> int:
        """Requests that are under way."""
        return self._in_flight

    @property
    def throttled(self) -> bool:
        """Whether the server has just asked for less."""
        return self._now_s() < self._throttled_until_s

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Permit]:
        """Wait until one more request may be sent, and count it while the block runs."""
        await self._acquire()
        try:
            yield Permit(self._in_flight, self._round)
        finally:
            self._in_flight -= 1
            self._admit()

    async def _acquire(self) -> None:
        if not self._waiting and self._is_open():
            self._in_flight += 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._admit()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():  # it was admitted in the same moment
                self._in_flight -= 1
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            self._admit()
            raise

    def _is_open(self) -> bool:
        return self._in_flight < self._limit and self._now_s() >= self._blocked_until_s

    def _admit(self) -> None:
        """Let in whoever may be; while the server wants a pause, look again at its end."""
        while self._waiting and self._is_open():
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._in_flight += 1
                waiter.set_result(None)
        if not self._waiting:
            return
        self._growth.was_full = True
        left_s = self._blocked_until_s - self._now_s()
        if left_s > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._admit()

    def succeeded(self, n_bytes: int) -> None:
        """A request moved `n_bytes`. May raise the limit."""
        self._limit = self._growth.after_success(self._limit, n_bytes, self._now_s())
        self._admit()

    def slow_down(self, permit: Permit, pause_s: float = 0.0) -> None:
        """A request was one too many: lower the limit, once for each burst of such answers.

        Nobody sends anything for `pause_s`.
        """
        now_s = self._now_s()
        self._blocked_until_s = max(self._blocked_until_s, now_s + pause_s)
        self._throttled_until_s = now_s + THROTTLED_S
        if permit.round == self._round:
            self._round += 1
            self._limit = self._growth.after_refusal(self._limit, permit.in_flight, now_s)


class _Growth:
    """Decides what the limit should be. `was_full`: somebody had to wait in this period."""

    def __init__(self, most: int, now_s: float) -> None:
        self.was_full = False
        self._most = most
        self._ceiling = most
        self._ceiling_until_s = now_s
        self._refused_at = 0
        self._hold_s = CEILING_S
        self._searching = True  # in large steps, until one gains nothing or is refused
        self._step = 0
        self._grow_after_s = now_s
        self._begin(now_s, 0.0)

    def _begin(self, now_s: float, best_bytes_s: float) -> None:
        self._began_s = now_s
        self._n_done = self._bytes = 0
        self._best_bytes_s = best_bytes_s
        self.was_full = False

    def after_success(self, limit: int, n_bytes: int, now_s: float) -> int:
        self._n_done += 1
        self._bytes += n_bytes
        if now_s - self._began_s < PERIOD_S or self._n_done < limit:
            return limit
        bytes_s, was_full = self._bytes / (now_s - self._began_s), self.was_full
        best_bytes_s = max(bytes_s, self._best_bytes_s)
        if now_s >= self._ceiling_until_s:
            self._ceiling = self._most
        if not was_full or now_s < self._grow_after_s:
            self._begin(now_s, best_bytes_s)
            return limit
        if self._step and bytes_s < self._best_bytes_s * GAIN:
            limit -= self._step  # it gained nothing; try again later, things may have changed
            self._searching, self._step = False, 0
            self._grow_after_s = now_s + SETTLED_S
            self._begin(now_s, 0.0)
            return limit
        raised = min(limit + (max(1, limit // 4) if self._searching else 1), self._ceiling)
        self._step = max(0, raised - limit)
        self._begin(now_s, best_bytes_s)
        return max(limit, raised)

    def after_refusal(self, limit: int, in_flight: int, now_s: float) -> int:
        """The server took fewer than `in_flight` at a time."""
        again = in_flight == self._refused_at
        self._refused_at = in_flight
        self._hold_s = min(2 * self._hold_s, MAX_CEILING_S) if again else CEILING_S
        self._ceiling = max(1, in_flight - 1)
        self._ceiling_until_s = now_s + self._hold_s
        self._searching, self._step = False, 0
        self._grow_after_s = now_s + PERIOD_S
        self._begin(now_s, 0.0)
        return max(1, min(self._ceiling, int(limit * DECREASE)))
