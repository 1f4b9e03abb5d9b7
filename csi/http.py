"""A few pages over HTTP, for probes and Prometheus. Answers GET, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

MAX_HEAD_BYTES = 8192
PATIENCE_S = 10.0

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Page:
    """An answer."""

    status: int
    body: bytes
    kind: str = "text/plain; charset=utf-8"


@contextlib.asynccontextmanager
async def serving(
    address: tuple[str, int], pages: Mapping[str, Callable[[], Awaitable[Page]]]
) -> AsyncIterator[tuple[str, int]]:
    """Serve `pages` by their path meanwhile; yields the address, with the port that was taken."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            page = await asyncio.wait_for(_page(reader, pages), PATIENCE_S)
            head = (
                f"HTTP/1.1 {page.status} {_REASONS[page.status]}\r\nContent-Type: {page.kind}\r\n"
                f"Content-Length: {len(page.body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + page.body)
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    host, port = address
    server = await asyncio.start_server(answer, host or None, port, limit=MAX_HEAD_BYTES)
    try:
        bound = server.sockets[0].getsockname()
        yield bound[0], bound[1]
    finally:
        server.close()


async def _page(
    reader: asyncio.StreamReader, pages: Mapping[str, Callable[[], Awaitable[Page]]]
) -> Page:
    head = await reader.readuntil(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) != 3 or words[0] != b"GET":
        return Page(400, b"only GET\n")
    found = pages.get(words[1].partition(b"?")[0].decode("latin-1"))
    return await found() if found is not None else Page(404, b"no such page\n")
