"""The HTTP client: servers that say odd things, proxies, and requests that are abandoned."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import trustme

from imgfmt.errors import StoreUnavailable, Unsupported
from tests.transfer.s3.support import BODY, PACK, TRANSPORTS, run, serving, store_at
from transfer.store.s3.answer import MAX_HEAD_BYTES, Head, ProtocolError
from transfer.store.s3.config import Transport
from transfer.store.s3.http import Connection, ConnectionLost, NoAnswer
from transfer.store.s3.policy import Patience
from transfer.store.s3.pool import Proxy

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
QUICK = Patience(first_byte_s=0.2, stall_window_s=0.2)


@contextlib.asynccontextmanager
async def talking(talk: Talk) -> AsyncIterator[int]:
    """A server that talks as told over each connection; yields its port."""
    talks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks)


def saying(*pieces: bytes, then_wait: bool = True) -> Talk:
    """Reads a request, sends the pieces one by one, and waits for the other side to close."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        if then_wait:
            await reader.read()

    return talk


async def connect(port: int) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(QUICK, None), "127.0.0.1", port
    )
    return connection


async def ask(talk: Talk, memory: memoryview | None = None) -> tuple[Head, bytes, Connection]:
    """One request; the body goes to `memory`, or is collected."""
    async with talking(talk) as port:
        connection = await connect(port)
        try:
            head, body = await connection.request(b"GET / HTTP/1.1\r\n\r\n", lambda head: memory)
            return head, body, connection
        finally:
            await asyncio.sleep(0.005)
            assert connection.get_buffer(-1) is connection._scratch
            connection.abort()


CHUNKED = b"\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
OK = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nX-A: 1\r\nx-a: 2\r\n\r\n"


@pytest.mark.parametrize("cut", range(0, len(OK) + 5, 7))
def test_an_answer_may_come_in_any_pieces(cut: int) -> None:
    async def work() -> None:
        memory = bytearray(b"......")
        whole = OK + b"hello"
        head, body, _ = await ask(saying(whole[:cut], whole[cut:]), memoryview(memory)[:5])
        assert (head.status, head.headers["x-a"], body) == (206, "1, 2", b"")
        assert memory == b"hello."

    run(work())


def test_a_connection_takes_one_request_after_the_other() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(5):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"%05d" % number)

    async def work() -> None:
        async with talking(talk) as port:
            connection = await connect(port)
            for number in range(5):
                memory = bytearray(5)
                await connection.request(b"GET / HTTP/1.1\r\n\r\n", lambda head: memoryview(memory))  # noqa: B023
                assert memory == b"%05d" % number
                assert connection.reusable
            connection.abort()

    run(work())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone", b"none"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 503 x" + CHUNKED, b"hello"),
        (b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 403 x\r\nContent-Length: 2\r\n\r\nno", b"no"),
    ],
)  # fmt: skip
def test_the_body_of_a_refusal_is_collected(answer: bytes, body: bytes) -> None:
    async def work() -> None:
        head, found, _ = await ask(saying(answer))
        assert head.status >= 403
        assert found == body

    run(work())


def test_a_refusal_may_end_with_its_connection() -> None:
    async def work() -> None:
        talk = saying(b"HTTP/1.0 403 Forbidden\r\n\r\n", b"go away", then_wait=False)
        head, body, connection = await ask(talk)
        assert (head.status, body) == (403, b"go away")
        assert not connection.reusable

    run(work())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", ProtocolError),
        (b"HTTP/1.1 206 x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", ProtocolError),
        (b"HTTP/1.1 206 x\r\nContent-Length: 6\r\n\r\nhello!", ProtocolError),
        (b"HTTP/1.1 206 x" + CHUNKED, ProtocolError),
        (b"HTTP/1.1 206 x\r\nX: " + b"y" * 2 * MAX_HEAD_BYTES, ProtocolError),
        (b"HTTP/1.1 206 x\r\nX: y", NoAnswer),
    ],
    ids=["no HTTP", "two lengths", "longer", "chunked", "endless head", "half a head"],
)  # fmt: skip
def test_an_answer_that_is_wrong_is_an_error_and_fills_nothing(
    answer: bytes, error: type[Exception]
) -> None:
    async def work() -> None:
        memory = bytearray(5)
        with pytest.raises(error):
            await ask(saying(answer), memoryview(memory))
        assert memory == bytes(5)

    run(work())


def test_a_refusal_without_end_is_an_error() -> None:
    async def work() -> None:
        answer = b"HTTP/1.1 500 x\r\nContent-Length: 100000000\r\n\r\n"
        with pytest.raises(ProtocolError, match="no end"):
            await ask(saying(answer, *[bytes(16384)] * 20))

    run(work())


def test_a_connection_that_ends_in_the_head_or_body_is_lost() -> None:
    async def work() -> None:
        for answer in (b"", OK[:20], OK, OK + b"hell"):
            with pytest.raises(ConnectionLost):
                await ask(saying(answer, then_wait=False), memoryview(bytearray(5)))

    run(work())


def test_what_place_raises_comes_out() -> None:
    def place(head: Head) -> memoryview:
        raise LookupError(head.status)

    async def work() -> None:
        async with talking(saying(OK + b"hello")) as port:
            connection = await connect(port)
            with pytest.raises(LookupError, match="206"):
                await connection.request(b"GET / HTTP/1.1\r\n\r\n", place)
            assert connection.closed

    run(work())


def test_bytes_that_nobody_asked_for_close_the_connection() -> None:
    async def work() -> None:
        memory = memoryview(bytearray(5))
        async with talking(saying(OK + b"hello", b"more")) as port:
            connection = await connect(port)
            await connection.request(b"GET / HTTP/1.1\r\n\r\n", lambda head: memory)
            await asyncio.sleep(0.02)
            assert not connection.reusable

    run(work())


@pytest.mark.parametrize("when", ["in the head", "in the body"])
def test_an_abandoned_request_lets_go_of_the_memory_at_once(when: str) -> None:
    async def work() -> None:
        memory = memoryview(bytearray(5))
        answer = OK + b"he" if when == "in the body" else OK[:30]
        async with talking(saying(answer)) as port:
            connection = await connect(port)
            task = asyncio.ensure_future(
                connection.request(b"GET / HTTP/1.1\r\n\r\n", lambda head: memory)
            )
            await asyncio.sleep(0.02)
            assert connection.answered
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert connection.closed
            assert connection.get_buffer(-1) is connection._scratch
            connection.get_buffer(-1)[:5] = b"late!"  # what the kernel would do
            connection.buffer_updated(5)
            assert memory[2:] == bytes(3)
            memory.release()  # nobody else holds it

    run(work())


class RecordingProxy:
    """An HTTP proxy that forwards to one port and notes what it was asked."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heads: list[bytes] = []

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        if head.startswith(b"CONNECT"):
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            there_writer.write(head)

        async def forward(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while piece := await source.read(65_536):
                to.write(piece)
                await to.drain()
            to.close()

        try:
            await asyncio.gather(forward(reader, there_writer), forward(there_reader, writer))
        finally:
            there_writer.transport.abort()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_requests_go_through_the_proxy_that_the_environment_names(
    scheme: str, transport: Transport, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    tls = None
    if scheme == "https":
        authority = trustme.CA()
        bundle = tmp_path_factory.mktemp("ca") / "ca.pem"
        authority.cert_pem.write_to_path(bundle)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("store.example").configure_cert(tls)
    with serving(tls=tls) as server:
        proxy = RecordingProxy(server.port)

        async def work() -> None:
            async with talking(proxy.talk) as port:
                monkeypatch.setenv(f"{scheme}_proxy", f"http://me:pass%20word@127.0.0.1:{port}")
                store = store_at(f"{scheme}://store.example:{server.port}", transport)
                buffer = bytearray(100_000)
                for _ in range(2):
                    await store.read_into(PACK, 5, memoryview(buffer))
                    assert buffer == BODY[5:100_005]
                await store.aclose()

        run(work())
    first = proxy.heads[0]
    expected = base64.b64encode(b"me:pass word")
    assert expected in first
    if scheme == "https":
        assert first.startswith(b"CONNECT store.example:%d HTTP/1.1" % server.port)
        assert b"AWS4" not in b"".join(proxy.heads)
    else:
        assert first.startswith(b"GET http://store.example:%d/bucket/" % server.port)


def test_a_proxy_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        refusing = saying(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", then_wait=False)
        async with talking(refusing) as port:
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
            with pytest.raises(StoreUnavailable, match=r"proxy 127.0.0.1:\d+ refuses \(407\)"):
                await store_at("https://store.example").read_into(PACK, 0, memoryview(bytearray(5)))

    run(work())


def test_no_proxy_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving() as server:
        assert bytes(run(store_at(server.endpoint).get(PACK))) == BODY


def test_only_plain_proxies_are_spoken_to() -> None:
    assert Proxy.of_url("http://h") == Proxy("h", 80, "")
    with pytest.raises(Unsupported, match="portable"):
        Proxy.of_url("https://h:3128")
