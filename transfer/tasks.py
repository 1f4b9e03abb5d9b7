"""How groups of tasks end: the one cause that callers see, and clean-up that must be finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def first_cause(error: BaseException) -> BaseException:
    """The first error within `error` that is no cancellation, else a cancellation."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    return next((c for c in causes if not isinstance(c, asyncio.CancelledError)), causes[0])


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


async def finished(clean_up: Awaitable[None]) -> None:
    """Let a short clean-up end although the caller is being cancelled."""
    task = asyncio.ensure_future(clean_up)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
