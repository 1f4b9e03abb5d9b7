"""How groups of tasks end: the one cause that callers see, and clean-up that must be finished."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

CLEAN_UP_S = 10.0
"""How long clean-up may hold up who stops a transfer."""

TAKE_BACK_S = 60.0
"""The same where a reference was written that must not stay."""

T = TypeVar("T")
U = TypeVar("U")

_log = logging.getLogger(__name__)


def first_cause(error: BaseException) -> BaseException:
    """The first error within `error` that is no cancellation, else a cancellation."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    return next((c for c in causes if not isinstance(c, asyncio.CancelledError)), causes[0])


async def both(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, U]) -> tuple[T, U]:
    """Run both at once to their ends. The first error ends the other and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(one), group.create_task(other)
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    return first.result(), second.result()


async def beside(work: Coroutine[Any, Any, T], endless: Coroutine[Any, Any, None]) -> T:
    """Run `work` to its end, and `endless` meanwhile. Raises what either fails of."""
    try:
        async with asyncio.TaskGroup() as group:
            other = group.create_task(endless)
            result = await work
            other.cancel()
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    return result


async def finished(clean_up: Coroutine[Any, Any, None], *, within_s: float = CLEAN_UP_S) -> None:
    """Let a short clean-up end although the caller is being cancelled.

    Whoever cancels waits no longer than `within_s`: a server may have gone silent. What is left
    behind then is what a process that was killed leaves.
    """
    task = asyncio.ensure_future(clean_up)
    caller = asyncio.current_task()
    if caller is None or not caller.cancelling():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await _ended(task, within_s)
            raise
    elif await _ended(task, within_s):
        task.result()


async def _ended(task: asyncio.Future[None], within_s: float) -> bool:
    """Whether the task ended in time; else it is cancelled, and has ended too."""
    done, _ = await asyncio.wait([task], timeout=within_s)
    if done:
        return True
    task.cancel()
    await asyncio.wait([task])
    _log.warning("clean-up was given up after %g s; what was begun may lie in the store", within_s)
    return False
