"""Fetches that go on in the background: one for each image, however many calls wait for it.

A call waits as long as it may, and leaves. A fetch that nobody has waited for during
`idle_cancel_s` is cancelled; what it brought stays for the next. Fetches end with the context.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from csi.errors import InProgress
from transfer.progress import Progress

T = TypeVar("T")

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class FetchProgress:
    """How far a fetch is. A `transfer.progress.Progress` that can be put into a sentence."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._begun_s = now_s()
        self._phase = "queued"
        self._done_bytes = 0
        self._total_bytes = 0

    def phase(self, name: str, total_bytes: int) -> None:
        """See `Progress.phase`."""
        self._phase, self._total_bytes, self._done_bytes = name, total_bytes, 0

    def advance(self, n_bytes: int) -> None:
        """See `Progress.advance`."""
        self._done_bytes += n_bytes

    def __str__(self) -> str:
        since_s = self._now_s() - self._begun_s
        if not self._total_bytes:
            return f"{self._phase}, for {since_s:.0f} s"
        share = 100 * self._done_bytes / self._total_bytes
        done, total = _human(self._done_bytes), _human(self._total_bytes)
        return f"{self._phase}: {done} of {total} ({share:.0f} %), for {since_s:.0f} s"


@dataclass(slots=True, eq=False)
class _Fetch(Generic[T]):
    """One that runs. `error` is what its work raised."""

    progress: FetchProgress
    task: asyncio.Task[T | BaseException] | None = None
    waiters: int = 0
    timer: asyncio.TimerHandle | None = None


class Fetches(Generic[T]):
    """Use it as a context manager: leaving cancels what runs and waits for it."""

    def __init__(self, *, max_parallel: int, idle_cancel_s: float) -> None:
        self._slots = asyncio.Semaphore(max_parallel)
        self._idle_cancel_s = idle_cancel_s
        self._running: dict[Hashable, _Fetch[T]] = {}
        self._group = asyncio.TaskGroup()

    @property
    def n_running(self) -> int:
        """Fetches that were begun and have not ended, those in the queue too."""
        return len(self._running)

    @property
    def n_queued(self) -> int:
        """Fetches that wait for their turn."""
        return sum(1 for fetch in self._running.values() if "queued" in str(fetch.progress))

    async def wait(
        self,
        key: Hashable,
        what: str,
        work: Callable[[Progress], Awaitable[T]],
        *,
        timeout_s: float,
    ) -> T:
        """What `work` returns or raises, which is begun unless it runs already under this key.

        Raises InProgress with the progress after `timeout_s`. Cancelling this does not cancel it.
        """
        fetch = self._running.get(key)
        if fetch is None or (fetch.task is not None and fetch.task.cancelling()):
            fetch = self._begin(key, work)
        task = fetch.task
        assert task is not None
        fetch.waiters += 1
        if fetch.timer is not None:
            fetch.timer.cancel()
            fetch.timer = None
        try:
            await asyncio.wait([task], timeout=timeout_s)
        finally:
            fetch.waiters -= 1
            if not fetch.waiters and not task.done():
                loop = asyncio.get_running_loop()
                fetch.timer = loop.call_later(self._idle_cancel_s, task.cancel)
        if not task.done():
            raise InProgress(f"{what} is being fetched ({fetch.progress}); it goes on meanwhile")
        if task.cancelled():
            raise InProgress(f"the fetch of {what} was stopped; it goes on with the next call")
        outcome = task.result()
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)
        return outcome

    def _begin(self, key: Hashable, work: Callable[[Progress], Awaitable[T]]) -> _Fetch[T]:
        fetch: _Fetch[T] = _Fetch(FetchProgress())

        async def run() -> T | BaseException:
            try:
                async with self._slots:
                    fetch.progress.phase("starting", 0)
                    return await work(fetch.progress)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # for who waits; the group must not end of it
                return error
            finally:
                if self._running.get(key) is fetch:
                    del self._running[key]

        self._running[key] = fetch
        fetch.task = self._group.create_task(run())
        return fetch

    async def __aenter__(self) -> Fetches[T]:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for fetch in self._running.values():
            if fetch.timer is not None:
                fetch.timer.cancel()
            if fetch.task is not None:
                fetch.task.cancel()
        await self._group.__aexit__(None, None, None)


def _human(n_bytes: float) -> str:
    for unit in _UNITS:
        if n_bytes < 1024 or unit == _UNITS[-1]:
            break
        n_bytes /= 1024
    return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
