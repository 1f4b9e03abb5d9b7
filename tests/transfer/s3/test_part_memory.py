"""Parts of uploads in memory: a bound that holds, and that nobody waits at for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.transfer.s3.support import PACK, run, serving, store_at
from transfer.buffers import page_aligned
from transfer.store.s3.config import MIB
from transfer.store.s3.part_memory import PartMemory
from transfer.testing.faults import Manners

PART_BYTES = 5 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_no_more_parts_are_taken_than_allowed_while_one_is_sent(seed: int) -> None:
    chance = random.Random(seed)
    most, n_held, peak = chance.randrange(1, 4), 0, 0

    async def work() -> None:
        nonlocal n_held, peak
        memory = PartMemory(most)

        async def use() -> None:
            nonlocal n_held, peak
            await memory.take()
            n_held += 1
            peak = max(peak, n_held)
            try:
                with memory.sending():
                    for _ in range(chance.randrange(4)):
                        await asyncio.sleep(0)
            finally:
                n_held -= 1
                memory.give_back()

        tasks = [asyncio.create_task(use()) for _ in range(30)]
        await asyncio.sleep(0)
        for task in chance.sample(tasks[most:], 8):  # these wait
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert memory.n_parts == 0

    run(work())
    assert peak <= most


def test_parts_that_wait_for_each_other_s_bytes_are_all_sent() -> None:
    raw = bytes(range(256)) * (30 * MIB // 256)

    async def work() -> None:
        store = store_at(server.endpoint, part_bytes=PART_BYTES)
        memory = store._bucket.session.parts = PartMemory(2)
        view = page_aligned(len(raw))
        view[:] = raw
        sink = await store.open_pack(PACK)
        for begin, end in ((0, MIB), (MIB, PART_BYTES)):  # no part is full after the first round
            for start in range(0, len(raw), PART_BYTES):
                await sink.write(start + begin, [view[start + begin : start + end]])
        await sink.commit()
        await sink.abort()
        assert memory.n_parts == 0

    with serving() as server:
        run(work())
        assert server.objects.objects[PACK].body == raw


def test_packs_that_are_sent_at_once_share_the_bound() -> None:
    held: list[int] = []

    async def work() -> None:
        store = store_at(server.endpoint, part_bytes=PART_BYTES)
        memory = store._bucket.session.parts = PartMemory(3)
        view = page_aligned(4 * PART_BYTES)

        async def send(number: int) -> None:
            sink = await store.open_pack(PACK[:-1] + str(number))
            for start in range(0, len(view), PART_BYTES):
                await sink.write(start, [view[start : start + PART_BYTES]])
                held.append(memory.n_parts)
            await sink.commit()

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(send(number))
        assert memory.n_parts == 0

    with serving(manners=Manners(latency_s=0.01)) as server:
        run(work())
    assert max(held) <= 3
