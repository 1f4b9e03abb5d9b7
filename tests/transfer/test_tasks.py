"""Clean-up of what is cancelled: it is finished, or given up where that takes too long."""

from __future__ import annotations

import asyncio
import logging

import pytest

from transfer.tasks import finished


class Work:
    """Waits in its body, then cleans up for as long as nobody sets `may_end`."""

    def __init__(self) -> None:
        self.begun, self.cleaning, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cleaned = False

    async def run(self, within_s: float) -> None:
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await finished(self._clean(), within_s=within_s)

    async def _clean(self) -> None:
        self.cleaning.set()
        await self.may_end.wait()
        self.cleaned = True


def test_clean_up_is_finished_though_its_caller_is_cancelled() -> None:
    async def check() -> None:
        work = Work()
        async with asyncio.timeout(30):
            task = asyncio.ensure_future(work.run(within_s=30))
            await work.begun.wait()
            task.cancel()
            await work.cleaning.wait()
            work.may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert work.cleaned

    asyncio.run(check())


def test_clean_up_that_never_ends_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        work = Work()
        async with asyncio.timeout(30):
            task = asyncio.ensure_future(work.run(within_s=0.01))
            await work.begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert work.cleaning.is_set()
        assert not work.cleaned

    with caplog.at_level(logging.WARNING, "transfer.tasks"):
        asyncio.run(check())
    assert "clean-up was given up" in caplog.text


def test_clean_up_of_what_is_not_cancelled_has_the_time_that_it_needs() -> None:
    async def check() -> None:
        done = False

        async def clean() -> None:
            nonlocal done
            await asyncio.sleep(0.005)
            done = True

        await finished(clean(), within_s=0.0)
        assert done

    asyncio.run(check())


def test_what_clean_up_fails_of_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("of clean-up")

    async def check() -> None:
        with pytest.raises(ValueError, match="of clean-up"):
            await finished(fail())

    asyncio.run(check())
