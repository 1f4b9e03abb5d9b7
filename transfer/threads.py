"""Named threads for work that blocks or computes; the engine's only way off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """`n_threads` threads. A call that is cancelled still waits for its thread.

    So a buffer that was handed to a thread is never given to someone else while it is in use.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.n_threads = n_threads
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"snapcask-{name}")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work(*args, **kwargs)` on a thread and wait for it, cancelled or not."""
        call = _Call(partial(work, *args, **kwargs))
        self._executor.submit(call)
        try:
            await call.ended
        except asyncio.CancelledError:
            await call.outlast()
            raise
        return call.result()

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Call(Generic[T]):
    """A call on its way through a thread, and the future that its end wakes.

    A third of the cost of `run_in_executor` and `shield`, which chain three futures for it.
    """

    __slots__ = ("_error", "_loop", "_result", "_work", "ended")

    def __init__(self, work: Callable[[], T]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def __call__(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    async def outlast(self) -> None:
        """Wait for the thread, however often this is cancelled."""
        while not self._result and self._error is None:
            self.ended = self._loop.create_future()
            with contextlib.suppress(asyncio.CancelledError):
                await self.ended

    def result(self) -> T:
        """What the work returned. Raises what it raised."""
        if self._error is None:
            return self._result[0]
        try:
            raise self._error
        finally:
            self._error = None  # an error that refers to the frame that holds it lives too long


class Turns:
    """Lets jobs that run at once do one part of their work in the order of their numbers.

    Jobs must be started in that order, so that whoever is waited for is running. After a failure
    every later job raises the same error.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def take(self, number: int) -> Iterator[None]:
        """Wait until all lower numbers have had their turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._next == number)
            if self._error is not None:
                raise self._error
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Nobody gets a turn any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
