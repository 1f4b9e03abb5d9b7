"""How groups of tasks end: the one cause that callers see, and clean-up that must be finished."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


def first_cause(error: BaseException) -> BaseException:
    """The first error within `error` that is no cancellation, else a cancellation."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [first_cause(inner) for inner in error.exceptions]
    return next((c for c in causes if not isinstance(c, asyncio.CancelledError)), causes[0])


async def finished(clean_up: Awaitable[None]) -> None:
    """Let a short clean-up end although the caller is being cancelled."""
    task = asyncio.ensure_future(clean_up)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
