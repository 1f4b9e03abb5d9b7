"""Threads: a call waits for its thread whatever happens, and turns are taken in order."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from transfer.threads import Threads, Turns


def test_a_call_runs_on_a_named_thread_and_gives_its_result() -> None:
    def work(a: int, *, b: int) -> tuple[int, str]:
        return a + b, threading.current_thread().name

    async def call() -> tuple[int, str]:
        with Threads("test", 1) as threads:
            return await threads.run(work, 1, b=2)

    result, name = asyncio.run(call())
    assert result == 3
    assert name.startswith("snapcask-test")


def test_what_a_call_raises_comes_out() -> None:
    async def call() -> None:
        with Threads("test", 1) as threads:
            await threads.run(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        asyncio.run(call())


@pytest.mark.parametrize("n_cancels", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_call_waits_for_its_thread(n_cancels: int, fails: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        assert may_end.wait(5)
        ended.append(True)
        if fails:
            raise ValueError("of a call that nobody waits for")

    async def call() -> None:
        with Threads("test", 1) as threads:
            task = asyncio.create_task(threads.run(work))
            await asyncio.to_thread(begun.wait)
            for _ in range(n_cancels):
                task.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not task.done()
            assert not ended
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ended

    asyncio.run(call())


def test_a_cancelled_call_that_has_not_begun_is_run_before_it_ends() -> None:
    begun, may_end = threading.Event(), threading.Event()
    ended: list[str] = []

    def first() -> None:
        begun.set()
        assert may_end.wait(5)
        ended.append("first")

    async def call() -> None:
        with Threads("test", 1) as threads:
            running = asyncio.create_task(threads.run(first))
            await asyncio.to_thread(begun.wait)
            queued = asyncio.create_task(threads.run(ended.append, "queued"))
            await asyncio.sleep(0)
            queued.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not queued.done()
            may_end.set()
            await running
            with pytest.raises(asyncio.CancelledError):
                await queued

    asyncio.run(call())
    assert ended == ["first", "queued"]


def test_closing_waits_for_what_runs() -> None:
    ended: list[bool] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        threading.Event().wait(0.01)
        ended.append(True)

    async def call() -> None:
        threads = Threads("test", 1)
        task = asyncio.create_task(threads.run(work))
        await asyncio.to_thread(begun.wait)
        threads.close()
        assert ended
        await task

    asyncio.run(call())


@pytest.mark.parametrize("seed", range(10))
def test_turns_are_taken_in_the_order_of_their_numbers(seed: int) -> None:
    rng = random.Random(seed)
    turns = Turns()
    order: list[int] = []
    delays = [rng.random() / 500 for _ in range(60)]

    def job(number: int) -> None:
        threading.Event().wait(delays[number])
        with turns.take(number):
            before = len(order)
            threading.Event().wait(delays[number] / 20)
            assert len(order) == before
            order.append(number)

    with ThreadPoolExecutor(rng.randint(1, 8)) as pool:
        for future in [pool.submit(job, number) for number in range(60)]:
            future.result(timeout=10)
    assert order == list(range(60))


def test_after_a_failure_nobody_gets_a_turn() -> None:
    turns, waiting, taken = Turns(), threading.Barrier(4), []

    def job(number: int) -> None:
        waiting.wait(5)
        with turns.take(number):
            taken.append(number)

    with ThreadPoolExecutor(3) as pool:
        waiters = [pool.submit(job, number) for number in (1, 2, 3)]
        waiting.wait(5)
        turns.fail(KeyError("first"))
        turns.fail(ValueError("second"))
        for waiter in waiters:
            with pytest.raises(KeyError, match="first"):
                waiter.result(timeout=5)
    with pytest.raises(KeyError, match="first"), turns.take(0):
        taken.append(0)
    assert taken == []


def test_a_turn_that_raises_is_not_over() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="within"), turns.take(0):
        raise ValueError("within")
    turns.fail(KeyError("told"))
    with pytest.raises(KeyError, match="told"), turns.take(1):
        pass
