"""How many requests a server gets: never more than the limit, and a limit that finds its level."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from transfer.store.s3.limiter import CEILING_S, PERIOD_S, ConcurrencyLimit, Permit


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


class Wire:
    """A simulated network and server, in which a request of 8 MiB takes its share of the time.

    It moves `per_request_bytes_s` for each request under way, up to `most_bytes_s`, and refuses
    requests beyond `most_requests`.
    """

    def __init__(
        self, limit: ConcurrencyLimit, clock: Clock, *, per_request_bytes_s: float = 50e6,
        most_bytes_s: float = 1e9, most_requests: int = 10**6,
    ) -> None:  # fmt: skip
        self.limit, self.clock = limit, clock
        self.per_request_bytes_s, self.most_bytes_s = per_request_bytes_s, most_bytes_s
        self.most_requests = most_requests
        self.n_refused = 0

    async def run(self, seconds: float, n_workers: int = 64) -> None:
        """Keep the limit busy for so long."""
        end_s = self.clock.s + seconds
        while self.clock.s < end_s:
            n_admitted = await self._round(n_workers)
            rate = min(self.most_bytes_s, n_admitted * self.per_request_bytes_s)
            self.clock.s += max(0.01, n_admitted * 8e6 / rate if n_admitted else 0.01)

    async def _round(self, n_workers: int) -> int:
        """As many requests as are admitted, all at once; returns how many were answered."""
        admitted: list[Permit] = []
        ended = asyncio.Event()

        async def request() -> None:
            async with self.limit.slot() as permit:
                admitted.append(permit)
                await ended.wait()

        tasks = [asyncio.ensure_future(request()) for _ in range(n_workers)]
        for _ in range(5):
            await asyncio.sleep(0)
        served = [p for p in admitted if p.in_flight <= self.most_requests]
        for permit in admitted:
            if permit in served:
                self.limit.succeeded(8_000_000)
            else:
                self.n_refused += 1
                self.limit.slow_down(permit)
        for task in tasks[len(admitted) :]:
            task.cancel()
        ended.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(served)


def test_it_begins_with_a_quarter_and_at_least_eight() -> None:
    clock = Clock()
    assert ConcurrencyLimit(64, clock).limit == 16
    assert ConcurrencyLimit(20, clock).limit == 8
    assert ConcurrencyLimit(3, clock).limit == 3


def test_it_grows_while_more_requests_move_more_bytes() -> None:
    async def work() -> None:
        clock = Clock()
        limit = ConcurrencyLimit(64, clock)
        await Wire(limit, clock, per_request_bytes_s=50e6, most_bytes_s=2e9).run(60)
        assert 38 <= limit.limit <= 64

    run(work())


def test_it_stays_where_more_requests_gain_nothing() -> None:
    async def work() -> None:
        clock = Clock()
        limit = ConcurrencyLimit(64, clock)
        await Wire(limit, clock, per_request_bytes_s=100e6, most_bytes_s=1e9).run(120)
        assert limit.limit <= 24

    run(work())


def test_it_does_not_grow_where_nobody_waits() -> None:
    async def work() -> None:
        clock = Clock()
        limit = ConcurrencyLimit(64, clock)
        await Wire(limit, clock).run(30, n_workers=4)
        assert limit.limit == 16

    run(work())


@pytest.mark.parametrize("most_requests", [1, 3, 8, 30])
def test_it_settles_at_what_the_server_takes(most_requests: int) -> None:
    async def work() -> None:
        clock = Clock()
        limit = ConcurrencyLimit(64, clock)
        wire = Wire(limit, clock, most_requests=most_requests, most_bytes_s=1e12)
        await wire.run(60)
        assert limit.limit <= most_requests
        assert limit.limit >= most_requests // 2
        wire.n_refused = 0
        await wire.run(CEILING_S)
        assert wire.n_refused <= 3

    run(work())


def test_a_burst_of_refusals_lowers_it_once() -> None:
    async def work() -> None:
        limit = ConcurrencyLimit(64, Clock())
        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(_refused(limit))
        assert limit.limit == 11

    async def _refused(limit: ConcurrencyLimit) -> None:
        async with limit.slot() as permit:
            await asyncio.sleep(0)
            limit.slow_down(Permit(16, permit.round))

    run(work())


def test_nobody_is_admitted_while_the_server_wants_a_pause() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        limit = ConcurrencyLimit(4, loop.time)
        async with limit.slot() as permit:
            limit.slow_down(permit, 0.05)
        assert limit.throttled
        begun_s = loop.time()
        async with limit.slot():
            assert loop.time() - begun_s >= 0.045

    run(work())


def test_it_recovers_when_the_server_takes_more_again() -> None:
    async def work() -> None:
        clock = Clock()
        limit = ConcurrencyLimit(64, clock)
        wire = Wire(limit, clock, most_requests=4, most_bytes_s=1e12)
        await wire.run(20)
        assert limit.limit <= 4
        wire.most_requests = 10**6
        await wire.run(2 * CEILING_S + 60 * PERIOD_S)
        assert limit.limit > 16

    run(work())


@pytest.mark.parametrize("seed", range(200))
def test_no_place_is_lost_under_random_cancellation(seed: int) -> None:
    chance = random.Random(seed)

    async def work() -> None:
        limit = ConcurrencyLimit(3, Clock(), start=3)
        inside = 0

        async def worker() -> None:
            nonlocal inside
            async with limit.slot():
                inside += 1
                assert inside <= 3
                try:
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks = [asyncio.ensure_future(worker()) for _ in range(30)]
        for _ in range(chance.randrange(40)):
            await asyncio.sleep(0)
            chance.choice(tasks).cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            assert done is None or isinstance(done, asyncio.CancelledError)
        assert limit.in_flight == 0
        async with limit.slot(), limit.slot(), limit.slot():
            assert limit.in_flight == 3

    run(work())
