"""Bodies of requests, and waiting for answers: for as long as the body is being taken."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import Awaitable
from typing import TypeVar

from transfer.store.s3.http import NoAnswer

_LOOKS = 4
_ON_THREAD_BYTES = 256 * 1024

T = TypeVar("T")


class Body(io.BytesIO):
    """A body in memory that counts what was taken from it, also by those who only hash it."""

    taken_bytes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        piece = super().read(size)
        self.taken_bytes += len(piece)
        return piece


async def content_md5(raw: bytes) -> str:
    """The header by which a server can tell that a body did not arrive whole.

    SeaweedFS else stores an empty object, in place of any that is there, where the sender dies
    between head and body. A server that keeps no part of such a request needs it not.
    """
    return await asyncio.to_thread(_md5, raw) if len(raw) > _ON_THREAD_BYTES else _md5(raw)


def _md5(raw: bytes) -> str:
    return base64.b64encode(hashlib.md5(raw, usedforsecurity=False).digest()).decode()


async def answered(answer: Awaitable[T], body: Body | None, patience_s: float) -> T:
    """Wait for an answer. Raises NoAnswer after `patience_s` in which nothing of `body` was taken.

    So a slow wire has all the time that it needs, and a dead one does not.
    """
    try:
        async with asyncio.timeout(patience_s) as scope:
            watch = _Watch(scope, body, patience_s)
            try:
                return await answer
            finally:
                watch.end()
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise NoAnswer(f"no answer came within {patience_s:g} s") from error


class _Watch:
    """Puts off a timeout while a body is being taken."""

    def __init__(self, scope: asyncio.Timeout, body: Body | None, patience_s: float) -> None:
        self._scope = scope
        self._body = body
        self._patience_s = patience_s
        self._seen_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        if body is not None:
            self._look()

    def _look(self) -> None:
        assert self._body is not None
        if self._body.taken_bytes > self._seen_bytes:
            self._seen_bytes = self._body.taken_bytes
            self._scope.reschedule(self._loop.time() + self._patience_s)
        self._timer = self._loop.call_later(self._patience_s / _LOOKS, self._look)

    def end(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
