"""Reading slow ranges twice: when it is done, who wins, and what becomes of the buffers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from imgfmt.errors import CorruptData, StoreUnavailable
from transfer.buffers import BufferPool, Lease
from transfer.hedge import HedgeableStore, HedgeConfig, HedgePolicy, Hedger

pytestmark = pytest.mark.slow

SLOT_BYTES = 4096
EAGER = HedgeConfig(last_floor_s=0.001, last_factor=0.0, most_percent=100.0)


class ScriptedStore:
    """Reads that do what a test says; `first` and `again` are awaited before the bytes come."""

    def __init__(self) -> None:
        self.first: Callable[[int], Coroutine[Any, Any, None]] = self.at_once
        self.again: Callable[[int], Coroutine[Any, Any, None]] = self.at_once
        self.throttled = False
        self.n_again = 0
        self.again_began = asyncio.Event()

    async def at_once(self, offset: int) -> None:
        """Nothing is in the way."""

    async def never(self, offset: int) -> None:
        """The read hangs."""
        await asyncio.Event().wait()

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `HedgeableStore.read_into`."""
        await self.first(offset)
        buffer[:] = bytes([offset % 251 + 1]) * len(buffer)

    async def read_into_anew(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `HedgeableStore.read_into_anew`."""
        self.n_again += 1
        self.again_began.set()
        await self.again(offset)
        buffer[:] = bytes([offset % 251 + 1]) * len(buffer)


def right(lease: Lease, offset: int, size_bytes: int = SLOT_BYTES) -> bool:
    return bytes(lease.view[:size_bytes]) == bytes([offset % 251 + 1]) * size_bytes


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


def test_the_s3_store_can_be_hedged() -> None:
    pytest.importorskip("httptools")
    from transfer.store.s3.config import S3Config
    from transfer.store.s3.store import S3Store

    store: HedgeableStore = S3Store(S3Config("bucket"))
    for name in ("read_into", "read_into_anew", "throttled"):
        assert hasattr(type(store), name)


def test_while_ranges_are_left_only_what_takes_far_too_long_is_read_twice() -> None:
    policy = HedgePolicy(HedgeConfig(), n_ranges=100)
    assert policy.patience_s is None  # nothing tells what is usual
    for took_s in [0.5] * 95 + [2.0] * 5:
        policy.begun()
        policy.ended(took_s)
    policy = HedgePolicy(HedgeConfig(), n_ranges=1000)
    for _ in range(100):
        policy.begun()
        policy.ended(0.1)
    assert policy.patience_s == 1.0  # the floor
    for _ in range(100):
        policy.begun()
        policy.ended(0.9)
    assert policy.patience_s == pytest.approx(2.7)


def test_when_all_ranges_have_begun_patience_is_short() -> None:
    policy = HedgePolicy(HedgeConfig(), n_ranges=10)
    for _ in range(9):
        policy.begun()
        policy.ended(0.2)
    policy.begun()
    assert policy.patience_s == pytest.approx(0.3)


def test_only_a_part_of_all_ranges_is_read_twice() -> None:
    policy = HedgePolicy(HedgeConfig(most_percent=5.0, few=1), n_ranges=40)
    for _ in range(40):
        policy.begun()
        policy.ended(0.2)
    assert policy.patience_s is not None
    policy.n_hedged = 3
    assert policy.patience_s is None


def test_without_a_slow_range_nothing_is_read_twice() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(4, SLOT_BYTES)
        async with Hedger(store, pool, 20) as hedger:
            for offset in range(20):
                lease = await pool.acquire()
                assert await hedger.read("k", offset, SLOT_BYTES, lease) is lease
                assert right(lease, offset)
                lease.release()
        assert (store.n_again, hedger.n_hedged, hedger.n_won) == (0, 0, 0)
        assert pool.n_free == 4

    run(work())


def test_the_second_read_wins_over_one_that_hangs() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES, poison=True)
        store.first = store.never
        async with Hedger(store, pool, 1, EAGER) as hedger:
            lease = await pool.acquire()
            got = await hedger.read("k", 7, 100, lease)
            assert got is not lease
            assert right(got, 7, 100)
            assert pool.n_free == 1
            got.release()
        assert (hedger.n_hedged, hedger.n_won) == (1, 1)
        assert pool.n_free == 2

    run(work())


def test_the_first_read_wins_over_a_second_one_that_hangs() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES)
        store.again = store.never

        async def after_the_second_began(offset: int) -> None:
            await store.again_began.wait()

        store.first = after_the_second_began
        async with Hedger(store, pool, 1, EAGER) as hedger:
            lease = await pool.acquire()
            assert await hedger.read("k", 7, SLOT_BYTES, lease) is lease
            assert right(lease, 7)
            await asyncio.sleep(0.001)
            assert pool.n_free == 1  # the loser's buffer came back when its read had ended
            lease.release()
        assert (hedger.n_hedged, hedger.n_won) == (1, 0)
        assert pool.n_free == 2

    run(work())


@pytest.mark.parametrize("second_works", [True, False])
def test_a_first_read_that_fails_waits_for_the_second(second_works: bool) -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES)

        async def fail_late(offset: int) -> None:
            await store.again_began.wait()
            raise StoreUnavailable("first")

        async def later(offset: int) -> None:
            await asyncio.sleep(0.005)
            if not second_works:
                raise StoreUnavailable("second")

        store.first, store.again = fail_late, later
        async with Hedger(store, pool, 1, EAGER) as hedger:
            lease = await pool.acquire()
            if second_works:
                lease = await hedger.read("k", 3, SLOT_BYTES, lease)
                assert right(lease, 3)
            else:
                with pytest.raises(StoreUnavailable, match="first"):
                    await hedger.read("k", 3, SLOT_BYTES, lease)
            lease.release()
        assert pool.n_free == 2

    run(work())


def test_damage_is_told_at_once() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES)

        async def damaged(offset: int) -> None:
            await store.again_began.wait()
            raise CorruptData("short")

        store.first, store.again = damaged, store.never
        async with Hedger(store, pool, 1, EAGER) as hedger:
            lease = await pool.acquire()
            with pytest.raises(CorruptData):
                await hedger.read("k", 3, SLOT_BYTES, lease)
            lease.release()
        assert pool.n_free == 2

    run(work())


def test_a_throttled_server_and_a_full_pool_are_left_alone() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES)
        store.throttled = True

        async def slowly(offset: int) -> None:
            await asyncio.sleep(0.05)

        store.first = slowly
        async with Hedger(store, pool, 1, EAGER) as hedger:
            with await pool.acquire() as lease:
                await hedger.read("k", 1, SLOT_BYTES, lease)
        store.throttled = False
        async with Hedger(store, pool, 1, EAGER) as hedger:
            with await pool.acquire() as lease, await pool.acquire():
                await hedger.read("k", 1, SLOT_BYTES, lease)
        assert store.n_again == 0

    run(work())


def test_an_error_of_the_body_comes_out_as_it_is() -> None:
    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(2, SLOT_BYTES)
        with pytest.raises(CorruptData, match="mine"):
            async with Hedger(store, pool, 1):
                raise CorruptData("mine")

    run(work())


@pytest.mark.parametrize("seed", range(200))
def test_no_buffer_is_lost_or_shared_under_random_delays_and_cancellations(seed: int) -> None:
    chance = random.Random(seed)
    n_slots, n_ranges = 4, 12

    async def work() -> None:
        store, pool = ScriptedStore(), BufferPool(n_slots, SLOT_BYTES, poison=True)

        async def hop(offset: int) -> None:
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(chance.choice([0, 0, 0.001, 0.012]))
            if chance.random() < 0.1:
                raise StoreUnavailable("by chance")

        store.first = store.again = hop
        offsets = iter(range(n_ranges))

        async def worker(hedger: Hedger) -> None:
            for offset in offsets:
                with await pool.acquire() as first:
                    first.retain()
                    lease = first
                    try:
                        lease = await hedger.read("k", offset, SLOT_BYTES, first)
                        assert right(lease, offset)
                    except StoreUnavailable:
                        pass
                    finally:
                        lease.release()

        async with Hedger(store, pool, n_ranges, EAGER) as hedger:
            tasks = [asyncio.ensure_future(worker(hedger)) for _ in range(3)]
            if chance.random() < 0.5:
                await asyncio.sleep(chance.random() * 0.01)
                tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                if not task.cancelled() and task.exception() is not None:
                    raise task.exception() or AssertionError
        assert pool.n_free == n_slots

    run(work())
