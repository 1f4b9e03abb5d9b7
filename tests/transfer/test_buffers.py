"""Buffers: no slot is lost and none is given twice, whoever is cancelled when."""

from __future__ import annotations

import asyncio
import ctypes
import random

import pytest

from imgfmt.errors import Internal
from transfer.buffers import BufferPool, Lease, page_aligned

SLOT_BYTES = 4096


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def acquire_all(pool: BufferPool) -> list[Lease]:
    return [await pool.acquire() for _ in range(pool.n_slots)]


@pytest.mark.parametrize("length_bytes", [1, 4096, 3 * 4096 + 1])
def test_memory_is_writable_and_begins_on_a_page(length_bytes: int) -> None:
    view = page_aligned(length_bytes)
    assert len(view) == length_bytes
    assert address_of(view) % 4096 == 0
    view[:] = b"x" * length_bytes


@pytest.mark.parametrize("seed", range(200))
def test_no_slot_is_lost_or_given_twice_when_waiters_are_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    pool = BufferPool(rng.randint(1, 4), SLOT_BYTES)
    held: set[int] = set()

    async def use() -> None:
        with await pool.acquire() as lease:
            address = address_of(lease.view)
            assert address not in held
            held.add(address)
            try:
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
            finally:
                held.remove(address)

    async def work() -> None:
        tasks: list[asyncio.Task[None]] = []
        for _ in range(40):
            tasks += [asyncio.create_task(use()) for _ in range(rng.randint(0, 4))]
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            for task in rng.sample(tasks, min(len(tasks), rng.randint(0, 3))):
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
        assert pool.n_free == pool.n_slots
        async with asyncio.timeout(5):
            leases = await acquire_all(pool)
        assert len({address_of(lease.view) for lease in leases}) == pool.n_slots

    asyncio.run(work())


def test_a_slot_is_waited_for_until_another_goes_back() -> None:
    async def work() -> None:
        pool = BufferPool(2, SLOT_BYTES)
        first, _ = await acquire_all(pool)
        waiter = asyncio.create_task(pool.acquire())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiter.done()
        view = first.view
        first.release()
        assert (await waiter).view is view

    asyncio.run(work())


def test_a_slot_goes_back_when_every_holder_has_released_it() -> None:
    async def work() -> None:
        pool = BufferPool(1, SLOT_BYTES)
        lease = await pool.acquire()
        assert lease.retain() is lease
        lease.release()
        assert pool.n_free == 0
        assert len(lease.view) == SLOT_BYTES
        lease.release()
        assert pool.n_free == 1

    asyncio.run(work())


def test_a_lease_is_of_no_use_after_its_last_release() -> None:
    async def work() -> None:
        pool = BufferPool(1, SLOT_BYTES)
        with await pool.acquire() as lease:
            pass
        for misuse in (lambda: lease.view, lease.retain, lease.release):
            with pytest.raises(Internal, match="release"):
                misuse()
        assert pool.n_free == 1

    asyncio.run(work())


def test_slots_are_made_when_first_needed_and_then_used_again() -> None:
    made: list[int] = []

    def allocate(length_bytes: int) -> memoryview:
        made.append(length_bytes)
        return page_aligned(length_bytes)

    async def work() -> None:
        pool = BufferPool(3, SLOT_BYTES, allocate)
        assert made == []
        for _ in range(5):
            with await pool.acquire(), await pool.acquire():
                pass
        assert made == [SLOT_BYTES, SLOT_BYTES]

    asyncio.run(work())


def test_a_slot_that_can_not_be_made_is_not_lost() -> None:
    fail = True

    def allocate(length_bytes: int) -> memoryview:
        if fail:
            raise MemoryError
        return page_aligned(length_bytes)

    async def work() -> None:
        nonlocal fail
        pool = BufferPool(2, SLOT_BYTES, allocate)
        with pytest.raises(MemoryError):
            await pool.acquire()
        assert pool.n_free == 2
        fail = False
        await acquire_all(pool)

    asyncio.run(work())


def test_released_buffers_are_poisoned_if_asked() -> None:
    async def work() -> None:
        pool = BufferPool(1, SLOT_BYTES, poison=True)
        with await pool.acquire() as lease:
            view = lease.view
            view[:] = b"a" * SLOT_BYTES
        assert view == b"\xdb" * SLOT_BYTES

    asyncio.run(work())
