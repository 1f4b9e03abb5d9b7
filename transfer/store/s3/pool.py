"""Keeps connections to one endpoint for use again, and makes new ones: TLS, proxies, timeouts."""

from __future__ import annotations

import asyncio
import base64
import random
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from aiohappyeyeballs import start_connection

from imgfmt.errors import Unsupported
from transfer.store.s3.answer import Head
from transfer.store.s3.client import Base
from transfer.store.s3.http import Connection, ConnectionLost, NoProxy
from transfer.store.s3.policy import Patience, RateLimit

_HAPPY_EYEBALLS_S = 0.25


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; `authorization` is a header's value, or empty."""

    host: str
    port: int
    authorization: str

    @classmethod
    def of_url(cls, url: str) -> Proxy:
        """Read `http://[user:password@]host[:port]`."""
        split = urlsplit(url)
        if split.scheme != "http" or not split.hostname:
            raise Unsupported(
                f"proxy {split.scheme}://{split.hostname}: only http:// proxies serve the zero-copy"
                " transport; use the portable one"
            )
        token = ""
        if split.username is not None:
            user = f"{unquote(split.username)}:{unquote(split.password or '')}"
            token = "Basic " + base64.b64encode(user.encode()).decode()
        return cls(split.hostname, split.port or 80, token)


class ConnectionPool:
    """Connections to `base`, the most recently used first. For one event loop.

    It bounds nothing: who asks for connections does. `close` it in the end.
    """

    def __init__(
        self,
        base: Base,
        tls: ssl.SSLContext | None,
        proxy: Proxy | None,
        patience: Patience,
        rate: RateLimit | None,
        now_s: Callable[[], float],
    ) -> None:
        self._base = base
        self._tls = tls
        self._proxy = proxy
        self._patience = patience
        self._rate = rate
        self._now_s = now_s
        self._idle: list[tuple[Connection, float]] = []
        self._closed = False

    @asynccontextmanager
    async def connection(self, *, fresh: bool = False) -> AsyncIterator[Connection]:
        """A connection, new if `fresh`. It is kept for use again if it may be, else closed."""
        found = None if fresh else self._take()
        connection = found or await self._connect()
        try:
            yield connection
        finally:
            if connection.reusable and not self._closed:
                self._idle.append((connection, self._now_s()))
            else:
                connection.abort()

    def head(self, target: str, headers: list[tuple[str, str]]) -> bytes:
        """The bytes of a GET, as this endpoint or its proxy wants them."""
        if self._proxy is not None and self._tls is None:
            target = f"http://{self._base.authority}{target}"
            if self._proxy.authorization:
                headers = [*headers, ("Proxy-Authorization", self._proxy.authorization)]
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def close(self) -> None:
        """Close all that is idle; what is in use is closed when it is given back."""
        self._closed = True
        for connection, _ in self._idle:
            connection.abort()
        self._idle.clear()

    def _take(self) -> Connection | None:
        oldest_s = self._now_s() - self._patience.idle_s
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and since_s >= oldest_s:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        async with asyncio.timeout(self._patience.connect_s):
            if self._proxy is None:
                return await self._open(self._base.host, self._base.port, self._tls)
            try:
                connection = await self._open(self._proxy.host, self._proxy.port, None)
            except OSError as error:
                named = f"the proxy {self._proxy.host}:{self._proxy.port}"
                raise NoProxy(named, error) from error
            if self._tls is not None:
                await self._tunnel(connection, self._proxy, self._tls)
            return connection

    async def _open(self, host: str, port: int, tls: ssl.SSLContext | None) -> Connection:
        """Connect to any address of the host, another one each time where there are many."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        turn = random.randrange(len(found)) if len({one[0] for one in found}) == 1 else 0
        connected = await start_connection(
            [*found[turn:], *found[:turn]], happy_eyeballs_delay=_HAPPY_EYEBALLS_S
        )
        _, connection = await loop.create_connection(
            lambda: Connection(self._patience, self._rate),
            sock=connected,
            ssl=tls,
            server_hostname=host if tls else None,
        )
        return connection

    async def _tunnel(self, connection: Connection, proxy: Proxy, tls: ssl.SSLContext) -> None:
        """Have the proxy connect to the endpoint, and begin TLS with that."""
        there = f"{self._base.host}:{self._base.port}"
        lines = [f"CONNECT {there} HTTP/1.1", f"Host: {there}"]
        if proxy.authorization:
            lines.append(f"Proxy-Authorization: {proxy.authorization}")
        try:
            request = "\r\n".join([*lines, "", ""]).encode("latin-1")
            head, _ = await connection.request(request, _no_body, head_only=True)
            if head.status != 200:
                said = f"the proxy {proxy.host}:{proxy.port} refuses ({head.status})"
                raise ConnectionLost(f"{said} to connect to {there}")
            loop = asyncio.get_running_loop()
            transport = await loop.start_tls(
                connection.transport, connection, tls, server_hostname=self._base.host
            )
            if transport is None:
                raise ConnectionLost("the connection was closed while TLS began")
            connection.use_transport(transport)
        except BaseException:
            connection.abort()
            raise


def _no_body(head: Head) -> memoryview | None:
    return None
