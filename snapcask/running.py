"""An event loop on a thread of its own, so that blocking calls work wherever they are made."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from snapcask import interrupts, logs

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

_SIGNAL_POLL_S = 0.2


class LoopThread:
    """Runs coroutines one after the other. Close it, or use it as a context manager."""

    def __init__(self) -> None:
        logs.begin()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_note)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="snapcask-loop", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end and return its result, or raise what it raises.

        Where the wait is interrupted (Ctrl-C), `work` is cancelled and has cleaned up before the
        interruption is raised; a second interruption is raised at once.
        """
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def settle(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(settle)

        def stop() -> None:
            if tasks:
                tasks[0].cancel()
            else:  # interrupted before it began
                work.close()
                outcome.cancel()

        try:
            self._loop.call_soon_threadsafe(start)
            _wait(outcome)
            return outcome.result()
        except BaseException:
            interrupts.seen()
            if not outcome.done():
                self._loop.call_soon_threadsafe(stop)
                with suppress(BaseException):
                    _wait(outcome)
            raise

    def close(self) -> None:
        """Stop the loop and end the thread. Nothing may be running."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _wait(outcome: Future[Any]) -> None:
    """Wait until there is an outcome.

    Again and again: a signal that the kernel gives to another thread does not wake this one, and
    Python calls its handler only here.
    """
    while not outcome.done():
        interrupts.check()
        with suppress(TimeoutError, CancelledError):
            outcome.exception(_SIGNAL_POLL_S)


def _note(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody waits for any more, such as the error of a task that was cancelled too late."""
    _log.debug("%s: %r", context["message"], context.get("exception"))


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine on a loop of its own. See `LoopThread.run`."""
    with LoopThread() as loop:
        return loop.run(work)


def blocking(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The same call for those who wait for it."""

    @functools.wraps(call)
    def wait(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(call(*args, **kwargs))

    return wait
