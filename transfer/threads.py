"""Named threads for work that blocks or computes; the engine's only way off the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import ParamSpec, TypeVar

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
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, partial(work, *args, **kwargs)
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            if not future.cancelled():
                future.exception()
            raise

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
