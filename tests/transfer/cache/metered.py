"""A gate on 127.0.0.1 before a server: it counts what the server sends, and can hold bytes back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from urllib.parse import urlsplit

from transfer.testing.served import Served

_PIECE_BYTES = 256 * 1024
_HEAD = re.compile(rb"(?:GET|HEAD) (/\S+) HTTP/1\.1\r\n")


class Metered(Served):
    """Context manager. Connections to `endpoint` are handed on to the server at `target`.

    Answers of connections that asked for packs wait until `n_open` others have asked for the
    object `key`. `sent_bytes` are all that the server sent, heads too.
    """

    def __init__(self, target: str, key: str = "", n_open: int = 0) -> None:
        super().__init__("metered")
        at = urlsplit(target)
        self._target = at.hostname, at.port
        self._key = key.encode()
        self._n_open = n_open
        self._asked = 0
        self._opened = asyncio.Event()
        if not n_open:
            self._opened.set()
        self.sent_bytes = 0
        self.pack_requests = 0

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
