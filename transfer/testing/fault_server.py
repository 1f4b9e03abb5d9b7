"""A server that speaks enough S3 and does wrong what its script says; for tests only.

It runs in a thread with a loop of its own, on 127.0.0.1. A script is a list of `Fault`s; the first
one that fits a request and is not used up decides what happens to its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from email.utils import formatdate

from transfer.testing.faults import Fault, FaultKind, Manners, Seen
from transfer.testing.little_s3 import Answer, LittleS3, Request, refusal
from transfer.testing.served import Served

_PIECE_BYTES = 256 * 1024
_DRIP_S = 0.01
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 503: "Slow Down"}


class _Close(Exception):
    """The connection is to be closed."""


class FaultServer(Served):
    """Context manager. `objects` and `script` may be changed while it runs."""

    def __init__(
        self,
        objects: LittleS3 | None = None,
        script: Sequence[Fault] = (),
        *,
        manners: Manners | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__("fault-server", tls)
        self.objects = objects or LittleS3()
        self.script = list(script)
        self.manners = manners or Manners()
        self.seen: list[Seen] = []
        self.n_connections = 0
        self.n_open = 0
        self.in_flight = 0
        self.most_in_flight = 0

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.n_connections = self.n_connections, self.n_connections + 1
        self.n_open += 1
        try:
            while True:
                request = await _read_request(reader, writer)
                await self._respond(request, writer, number)
        except (_Close, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.n_open -= 1
            writer.transport.abort()

    async def _respond(self, request: Request, writer: asyncio.StreamWriter, number: int) -> None:
        with self._counted():
            limit = self.manners.most_in_flight
            fault = next((fault for fault in self.script if fault.fits(request)), None)
            if limit is not None and self.in_flight > limit:
                fault = Fault(FaultKind.BUSY)
            answer = self._answer(request, fault)
            self.seen.append(Seen(request, number, answer.status, self.in_flight))
            if answer.status != 503:
                await asyncio.sleep(self.manners.latency_s)
            sender = _Sender(writer, self.manners.speed(number))
            await sender.send(answer, fault)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    def _answer(self, request: Request, fault: Fault | None) -> Answer:
        """The right answer, or what the fault makes of it."""
        head = request.method == "HEAD"
        match fault.kind if fault else None:
            case FaultKind.BUSY:
                wait = fault.retry_after_s if fault else None
                headers = {} if wait is None else {"Retry-After": str(wait)}
                return refusal("SlowDown", 503, head=head, headers=headers)
            case FaultKind.PRECONDITION:
                return refusal("PreconditionFailed", head=head)
            case FaultKind.EXPIRED:
                return refusal("ExpiredToken", 403, head=head)
            case FaultKind.DENIED:
                return refusal("AccessDenied", 403, head=head)
            case FaultKind.SERVER_ERROR:
                return refusal("InternalError", 500, head=head)
            case FaultKind.OTHER if fault and fault.answer:
                body = None if head else fault.answer.body
                return replace(fault.answer, headers=dict(fault.answer.headers), body=body)
            case FaultKind.ERROR_IN_200:
                return refusal("InternalError", 200)
            case FaultKind.WHOLE_OBJECT:
                plain = {k: v for k, v in request.headers.items() if k != "range"}
                return self.objects.answer(Request(request.method, request.target, plain))
            case FaultKind.WRONG_RANGE:
                return self.objects.answer(_shifted(request))
            case FaultKind.GZIP:
                answer = self.objects.answer(request)
                answer.body = gzip.compress(bytes(answer.body or b""), 1)
                answer.headers |= {
                    "Content-Encoding": "gzip", "Content-Length": str(len(answer.body))
                }  # fmt: skip
                return answer
            case FaultKind.WRONG_BYTES:
                answer = self.objects.answer(request)
                raw = bytearray(answer.body or b"")
                raw[len(raw) // 2] ^= 0x40
                answer.body = bytes(raw)
                return answer
        return self.objects.answer(request)


def _shifted(request: Request) -> Request:
    """The same for another range, as long where the object allows."""
    start, end = request.span or (0, 1)
    by = -1 if start else 1
    headers = {**request.headers, "range": f"bytes={start + by}-{end - 1 + by}"}
    return Request(request.method, request.target, headers)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    begin = await reader.readexactly(1)
    if not begin.isalpha():  # TLS, which this server does not speak here
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        raise _Close
    head = (begin + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, target, headers, body)


class _Sender:
    """Sends an answer over one connection, at most at `bytes_per_s`."""

    def __init__(self, writer: asyncio.StreamWriter, bytes_per_s: float | None) -> None:
        self._writer = writer
        self._bytes_per_s = bytes_per_s

    async def send(self, answer: Answer, fault: Fault | None) -> None:
        """Send what the fault leaves of the answer. Raises _Close if nothing may follow."""
        kind = fault.kind if fault else None
        after = fault.after_bytes if fault else 0
        if kind is FaultKind.LOST_ANSWER:
            raise _Close
        if kind is FaultKind.NO_ANSWER:
            await asyncio.Event().wait()
        body = memoryview(answer.body) if answer.body is not None else memoryview(b"")
        await self._head(answer, body)
        match kind:
            case FaultKind.SHORT_BODY | FaultKind.RESET:
                await self._body(body[:after])
                await self._end(reset=kind is FaultKind.RESET)
            case FaultKind.STALL:
                await self._body(body[:after])
                await asyncio.Event().wait()
            case FaultKind.DRIP:
                await self._body(body[:after])
                await self._drip(body[after:])
            case FaultKind.TWICE | FaultKind.TWICE_BODY:
                await self._body(body)
                if kind is FaultKind.TWICE:
                    await self._head(answer, body)
                await self._body(body)
            case _:
                await self._body(body)
        if kind is FaultKind.HALF_CLOSE:
            self._writer.write_eof()

    async def _head(self, answer: Answer, body: memoryview) -> None:
        headers = {"Content-Length": str(len(body)), "Date": formatdate(usegmt=True)}
        headers |= answer.headers
        lines = [f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Odd')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await self._writer.drain()

    async def _body(self, body: memoryview) -> None:
        step = _PIECE_BYTES
        if self._bytes_per_s is not None:
            step = min(step, max(1, int(self._bytes_per_s / 50)))
        for start in range(0, len(body), step):
            piece = body[start : start + step]
            self._writer.write(piece)
            await self._writer.drain()
            if self._bytes_per_s is not None:
                await asyncio.sleep(len(piece) / self._bytes_per_s)

    async def _drip(self, body: memoryview) -> None:
        for start in range(len(body)):
            self._writer.write(body[start : start + 1])
            await asyncio.sleep(_DRIP_S)

    async def _end(self, *, reset: bool) -> None:
        """Close once what was sent has left, gracefully or not."""
        if reset:
            await asyncio.sleep(_DRIP_S)
            linger = struct.pack("ii", 1, 0)
            found: socket.socket = self._writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            self._writer.close()
            await self._writer.wait_closed()
        raise _Close
