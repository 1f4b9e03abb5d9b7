"""A gate on 127.0.0.1 before a server: it counts what the server sends, and can hold bytes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from types import TracebackType
from urllib.parse import urlsplit

_PIECE_BYTES = 256 * 1024
_HEAD = re.compile(rb"(?:GET|HEAD) (/\S+) HTTP/1\.1\r\n")


class Metered:
    """Context manager. Connections to `endpoint` are handed on to the server at `target`.

    Answers of connections that asked for packs wait until `n_open` others have asked for the
    object `key`. `sent_bytes` are all that the server sent, heads too.
    """

    def __init__(self, target: str, key: str = "", n_open: int = 0) -> None:
        at = urlsplit(target)
        self._target = at.hostname, at.port
        self._key = key.encode()
        self._n_open = n_open
        self._asked = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._opened: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metered", daemon=True)
        self.sent_bytes = 0
        self.pack_requests = 0
        self.port = 0

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Metered:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._opened = asyncio.Event()
        if not self._n_open:
            self._opened.set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held = asyncio.Event()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there, to = await asyncio.open_connection(*self._target)
            try:
                async with asyncio.TaskGroup() as group:
                    answers = group.create_task(self._answers(there, writer, held))
                    await self._requests(reader, to, held)
                    answers.cancel()
            finally:
                to.transport.abort()
                writer.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, held: asyncio.Event
    ) -> None:
        assert self._opened is not None
        while raw := await _read(reader):
            for path in _HEAD.findall(raw):
                if b"/packs/" in path:
                    self.pack_requests += 1
                    held.set()
                elif self._key and self._key in path:
                    self._asked += 1
                    if self._asked >= self._n_open:
                        self._opened.set()
            to.write(raw)
            with contextlib.suppress(ConnectionError):
                await to.drain()

    async def _answers(
        self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, held: asyncio.Event
    ) -> None:
        assert self._opened is not None
        while raw := await _read(there):
            if held.is_set():
                await self._opened.wait()
            self.sent_bytes += len(raw)
            writer.write(raw)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        writer.close()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What comes next; nothing once the other side is gone, however it went."""
    try:
        return await reader.read(_PIECE_BYTES)
    except ConnectionError:
        return b""
