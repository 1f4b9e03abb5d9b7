"""A server on 127.0.0.1 in a thread with a loop of its own; for tests only."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Self


class Served:
    """Context manager. A subclass handles connections in `_connected`; `port` is known inside."""

    def __init__(self, name: str, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # or a stalled one could be collected
        self.port = 0

    @property
    def endpoint(self) -> str:
        """Its URL."""
        scheme, host = ("https", "localhost") if self._tls else ("http", "127.0.0.1")
        return f"{scheme}://{host}:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._kept, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _kept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._connected(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which this closes."""
        raise NotImplementedError
