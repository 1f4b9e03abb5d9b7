"""What a store holds while an event loop runs: client, connections, and the one way to a request.

Every request goes through `Session.run`: it waits for its turn, is repeated as `policy` says, slows
all others down when the server asks for that, and gets new credentials once when they expire.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from imgfmt.errors import StoreUnavailable
from transfer.store.s3.client import OpenedClient, S3Client
from transfer.store.s3.config import MIB, S3Config, Transport
from transfer.store.s3.errors import Place, RequestFailed
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.limiter import ConcurrencyLimit
from transfer.store.s3.part_memory import MAX_PARTS_BYTES, PartMemory
from transfer.store.s3.policy import Action, RateLimit, Retries, RetryBudget
from transfer.store.s3.pool import ConnectionPool, Proxy
from transfer.store.s3.portable import Portable
from transfer.store.s3.ranges import RangeTransport
from transfer.store.s3.receive import ZeroCopy

MAX_SHARED_PAUSE_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wire:
    """A client with its credentials, and how ranges are read over it."""

    client: S3Client
    ranges: RangeTransport


_open_wires: set[AsyncGenerator[Wire, None]] = set()
"""Keeps generators alive until their loop has ended them: collecting them would be too late."""

_closing: set[asyncio.Task[None]] = set()


async def _wires(config: S3Config, rate: RateLimit | None) -> AsyncGenerator[Wire, None]:
    """Yields one wire and holds it open.

    asyncio ends what is left of generators with its loop, so connections are closed in the loop
    that they belong to even where nobody closes them.
    """
    async with OpenedClient(config) as client:
        if config.transport is Transport.PORTABLE:
            yield Wire(client, Portable(client, rate))
            return
        proxy = client.proxy()
        pool = ConnectionPool(
            client.base,
            await asyncio.to_thread(client.tls),
            None if proxy is None else Proxy.of_url(proxy),
            config.patience,
            rate,
            time.monotonic,
        )
        try:
            yield Wire(client, ZeroCopy(client, pool))
        finally:
            pool.close()


class Session:
    """All requests of one store on one event loop."""

    def __init__(
        self,
        config: S3Config,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.config = config
        self.rate = None if config.bytes_per_s is None else RateLimit(config.bytes_per_s, now_s)
        self.limit = ConcurrencyLimit(_most_requests(config), now_s)
        self.budget = RetryBudget(config.retry)
        self.parts = PartMemory(max(2, MAX_PARTS_BYTES // config.part_bytes))
        self._now_s = now_s
        self._sleep = sleep
        self._uniform = uniform
        self._lock = asyncio.Lock()
        self._wire: Wire | None = None
        self._held: list[AsyncGenerator[Wire, None]] = []

    @property
    def place(self) -> Place:
        """Where requests go, for messages."""
        if self._wire is not None:
            return self._wire.client.place
        config = self.config
        return Place(config.bucket, config.endpoint or "AWS", config.region or "")

    async def wire(self) -> Wire:
        """The current wire, opened if there is none."""
        if self._wire is None:
            async with self._lock:
                if self._wire is None:
                    self._wire = await self._open()
        return self._wire

    async def _open(self) -> Wire:
        held = _wires(self.config, self.rate)
        wire = await anext(held)
        self._held.append(held)
        _open_wires.difference_update(
            [one for one in _open_wires if getattr(one, "ag_frame", None) is None]
        )
        _open_wires.add(held)
        return wire

    async def _renew(self, seen: Wire | None) -> bool:
        """Fetch credentials anew unless that was done since `seen`; False if they are the same."""
        if seen is None:
            return False
        async with self._lock:
            if self._wire is not seen:
                return True
            wire = await self._open()
            if await wire.client.fingerprint() == await seen.client.fingerprint():
                await self._end(self._held.pop())
                return False
            self._wire = wire
            while len(self._held) > 2:  # requests under way may still use the one before
                await self._end(self._held.pop(0))
            return True

    async def _end(self, held: AsyncGenerator[Wire, None]) -> None:
        await held.aclose()
        _open_wires.discard(held)

    async def aclose(self) -> None:
        """Close all connections. No request may be under way."""
        self._wire = None
        while self._held:
            await self._end(self._held.pop())

    def close_soon(self) -> None:
        """As `aclose`, from where nobody can wait: the running loop does it."""
        task = asyncio.get_running_loop().create_task(self.aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    async def run(
        self, what: str, attempt: Callable[[Wire], Awaitable[T]], *, n_bytes: int = 0
    ) -> T:
        """Do `attempt`, again and again if need be; it moves `n_bytes`. Raises imgfmt.errors.

        An attempt raises what the SDK or the transports raise, or RequestFailed.
        """
        retries = Retries(self.config.retry, self.budget, self._now_s, self._uniform)
        while True:
            try:
                result = await self._attempt(what, attempt, retries)
            except _Again as again:
                failed, pause_s, seen = again.failed, again.pause_s, again.seen
            else:
                self.budget.succeeded()
                if n_bytes:
                    self.limit.succeeded(n_bytes)
                return result
            if failed.action is Action.RENEW and pause_s is not None:
                pause_s = 0.0 if await self._renew(seen) else None
            if pause_s is None:
                raise _final(failed, retries.n_failures) from failed.__cause__
            await self._sleep(pause_s)

    async def _attempt(
        self, what: str, attempt: Callable[[Wire], Awaitable[T]], retries: Retries
    ) -> T:
        """One attempt, when it is its turn. Raises _Again with what the policy says to do next."""
        async with self.limit.slot() as permit:
            wire: Wire | None = None
            try:
                wire = await self.wire()
                return await attempt(wire)
            except Exception as error:
                failed = failure_of(error, what, self.place)
                if failed is not error:
                    failed.__cause__ = error
            pause_s = retries.pause_s(
                failed.action,
                gained_bytes=failed.received_bytes,
                retry_after_s=failed.retry_after_s,
            )
            if failed.action is Action.THROTTLE:
                shared_s = failed.retry_after_s or MAX_SHARED_PAUSE_S
                self.limit.slow_down(permit, min(pause_s or 0.0, shared_s))
            elif failed.timed_out:
                self.limit.slow_down(permit)
            raise _Again(failed, pause_s, wire)


class _Again(Exception):
    """An attempt over `seen` failed; the next one is due after `pause_s`, or never if None."""

    def __init__(self, failed: RequestFailed, pause_s: float | None, seen: Wire | None) -> None:
        super().__init__(str(failed))
        self.failed = failed
        self.pause_s = pause_s
        self.seen = seen


def _most_requests(config: S3Config) -> int:
    """A slow wire is filled by a few connections; more would only be starved."""
    if config.bytes_per_s is None:
        return config.connections
    return min(config.connections, max(2, config.bytes_per_s // MIB))


def _final(failed: RequestFailed, n_failures: int) -> Exception:
    """What the caller gets: it says so if more than one attempt was made."""
    error = failed.error
    if isinstance(error, StoreUnavailable) and n_failures > 1:
        return StoreUnavailable(f"{error}; gave up after {n_failures} attempts")
    return error
