"""The bucket behind a store: its session on each event loop, calls of the SDK, and listings."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from imgfmt.errors import StoreUnavailable
from transfer.store.s3.config import S3Config
from transfer.store.s3.sending import answered
from transfer.store.s3.session import Session, Wire

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Bucket:
    """Keys are the store's; the prefix is added here, and not shown in messages."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def session(self) -> Session:
        """What sends all requests of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._sessions.get(loop)
        if found is None:
            for ended in [other for other in self._sessions if other.is_closed()]:
                del self._sessions[ended]  # the session holds its loop, so it would stay for ever
            found = self._sessions[loop] = Session(self.config)
        return found

    async def aclose(self) -> None:
        """Close the connections of the running loop. No request may be under way."""
        found = self._sessions.pop(asyncio.get_running_loop(), None)
        if found is not None:
            await found.aclose()

    def close(self) -> None:
        """Let go of all connections; each is closed by its loop, at the latest when that ends."""
        with contextlib.suppress(RuntimeError):  # no loop runs here: then it has closed them
            found = self._sessions.get(asyncio.get_running_loop())
            if found is not None:
                found.close_soon()
        self._sessions.clear()

    def full(self, key: str) -> str:
        """The object's key in the bucket."""
        return self.config.prefix + key

    def named(self, key: str) -> str:
        """An object, for messages."""
        return f"{key} in store {self.config.url}"

    async def send(
        self, wire: Wire, operation: str, *, more_s: float = 0.0, **parameters: Any
    ) -> dict[str, Any]:
        """Call an operation of the SDK once. Raises what the SDK raises, and NoAnswer.

        A `Body`, if there is one, is a `sending.Body`. The server has `more_s` to think.
        """
        method = getattr(wire.client.sdk, operation)
        patience = self.config.patience
        answer: dict[str, Any] = await answered(
            method(Bucket=self.config.bucket, **parameters),
            parameters.get("Body"),
            patience.connect_s + patience.first_byte_s + more_s,
        )
        return answer

    async def call(
        self, what: str, operation: str, *, n_bytes: int = 0, **parameters: Any
    ) -> dict[str, Any]:
        """Call an operation of the SDK, repeated as need be. Raises imgfmt.errors."""

        async def attempt(wire: Wire) -> dict[str, Any]:
            return await self.send(wire, operation, **parameters)

        return await self.session.run(what, attempt, n_bytes=n_bytes)

    async def pages(
        self, operation: str, prefix: str, *markers: str
    ) -> AsyncIterator[dict[str, Any]]:
        """All pages of a listing; `markers` name the parameters that ask for the next one."""
        what = self.named(prefix or "listing")
        handed_on: dict[str, Any] = {}
        while True:
            page = await self.call(what, operation, Prefix=self.full(prefix), **handed_on)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")}
            if not following or following == handed_on:
                raise StoreUnavailable(f"{what}: the server's listing has no end")
            handed_on = following


def nanoseconds(moment: datetime) -> int:
    """A moment as nanoseconds since 1970, exact."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1000
