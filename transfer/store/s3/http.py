"""One HTTP/1.1 connection that receives a body straight into the caller's memory.

The head is parsed by llhttp (httptools). From there on the socket is read into the memory that the
caller gave: no copy, no allocation, one system call for as much as the kernel has. A request that
fails, times out or is cancelled closes its connection and lets go of that memory before it returns,
so no late byte can land in a buffer that was handed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from transfer.store.s3.answer import AnswerParser, Head, ProtocolError
from transfer.store.s3.policy import Patience, ProgressWatch, RateLimit

SCRATCH_BYTES = 16 * 1024
LIMITED_BYTES = 64 * 1024
"""What is read at once where the rate is limited, so that pauses are short."""

MAX_ERROR_BYTES = 64 * 1024


class Stalled(Exception):
    """The other side sent its answer too slowly, for too long."""


class NoAnswer(Exception):
    """The other side did not begin to answer in time."""


class ConnectionLost(Exception):
    """The connection ended before the answer did."""


class NoProxy(OSError):
    """The proxy, not the server, could not be reached. `proxy` names it."""

    def __init__(self, proxy: str, cause: OSError) -> None:
        super().__init__(cause.errno, cause.strerror)
        self.proxy = proxy


PlaceBody = Callable[[Head], memoryview | None]
"""Says where the body goes: memory of exactly its length, or None to have it collected.

Called in the middle of receiving: it must not wait. It may raise, which ends the request.
"""


class Connection(asyncio.BufferedProtocol):
    """Made by asyncio; one request at a time.

    `answered` says whether anything came since the last request was sent, and `received_bytes` how
    much of the body lies in the caller's memory; both stay when the request has failed.
    """

    def __init__(self, patience: Patience, rate: RateLimit | None) -> None:
        self.closed = False
        self.n_requests = 0
        self.answered = False
        self.received_bytes = 0
        self._patience = patience
        self._rate = rate
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._transport: asyncio.Transport | None = None
        self._parser: AnswerParser | None = None
        self._place: PlaceBody | None = None
        self._target: memoryview | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._watch = ProgressWatch(patience)
        self._keep = False

    # what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is None:
            return self._scratch
        if self._rate is None:
            return self._target[self.received_bytes :]
        return self._target[self.received_bytes :][:LIMITED_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self.received_bytes += nbytes
            self._watch.note(nbytes)
            if self.received_bytes == len(self._target):
                self._finish()
            self._limit_rate(nbytes)
        elif self._parser is not None:
            self.answered = True
            try:
                self._parse(self._parser, self._scratch[:nbytes])
            except Exception as error:  # whatever it is, it belongs to the waiting request
                self._fail(error)
        else:
            self.abort()  # bytes that nobody asked for

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        parser = self._parser
        if parser is not None and parser.head is not None and self._ends_with_connection(parser):
            self._finish()
        self._fail(exc or ConnectionLost("the connection was closed too early"))

    # receiving

    def _parse(self, parser: AnswerParser, received: memoryview) -> None:
        had_head = parser.head is not None
        parser.feed(received)
        self._watch.note(len(received))
        if parser.head is not None and not had_head:
            self._begin_body(parser, parser.head)
        if self._target is not None:
            self._take_early(parser, self._target)
        elif parser.complete:
            self._keep = parser.keep_alive and not parser.trailing
            self._finish()
        elif len(parser.body) > MAX_ERROR_BYTES:
            raise ProtocolError("the server's error message has no end")

    def _begin_body(self, parser: AnswerParser, head: Head) -> None:
        assert self._place is not None
        target = self._place(head)
        self._start_timer(self._watch.period_s, self._check_progress)
        if target is None:
            return
        if head.headers.get("content-length") != str(len(target)) or not len(target):
            raise ProtocolError("the answer's length is not that of its range")
        self._keep = parser.keep_alive
        self._target = target.cast("B")

    def _take_early(self, parser: AnswerParser, target: memoryview) -> None:
        """Copy the beginning of the body, which came along with the head."""
        early = len(parser.body)
        target[:early] = parser.body
        parser.body.clear()
        self.received_bytes = early
        if parser.complete:
            self._keep = self._keep and not parser.trailing
            self._finish()

    def _ends_with_connection(self, parser: AnswerParser) -> bool:
        headers = parser.head.headers if parser.head else {}
        framed = "content-length" in headers or "transfer-encoding" in headers
        return self._target is None and not framed

    def _limit_rate(self, nbytes: int) -> None:
        pause_s = self._rate.charge(nbytes) if self._rate is not None else 0.0
        if pause_s and self._resume is None and self._transport is not None and not self.closed:
            self._transport.pause_reading()
            self._watch.excuse()
            self._resume = asyncio.get_running_loop().call_later(pause_s, self._read_on)

    def _read_on(self) -> None:
        self._resume = None
        if self._transport is not None and not self.closed:
            self._transport.resume_reading()

    # timers

    def _start_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(after_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_answer(self) -> None:
        if self._resume is not None:  # it is we who do not read
            self._start_timer(self._patience.first_byte_s, self._no_answer)
            return
        self._fail(NoAnswer(f"no answer came within {self._patience.first_byte_s:g} s"))

    def _check_progress(self) -> None:
        if self._resume is not None:
            self._watch.excuse()
        elif self._watch.check():
            p = self._patience
            least = f"{p.stall_bytes_per_s / 1024:g} KiB/s over {p.stall_window_s:g} s"
            self._fail(Stalled(f"the transfer stalled at less than {least}"))
            return
        self._start_timer(self._watch.period_s, self._check_progress)

    # the end of a request

    def _finish(self) -> None:
        self._let_go()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.abort()

    def _let_go(self) -> None:
        self._stop_timer()
        self._target = None
        self._parser = None
        self._place = None

    def abort(self) -> None:
        """Close at once. Nothing is written into anybody's memory any more."""
        self.closed = True
        self._let_go()
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self._transport is not None:
            self._transport.abort()

    # what callers use

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        return self._keep and not self.closed and self._waiter is None

    @property
    def transport(self) -> asyncio.Transport:
        """What asyncio gave."""
        assert self._transport is not None
        return self._transport

    def use_transport(self, transport: asyncio.Transport) -> None:
        """Go on over TLS."""
        self._transport = transport

    async def request(
        self, request: bytes, place: PlaceBody, *, head_only: bool = False
    ) -> tuple[Head, bytes]:
        """Send a request; returns the answer's head, and its body if `place` wanted none.

        Raises what `place` raised, ProtocolError, NoAnswer, Stalled, ConnectionLost or OSError.
        After any error, and when cancelled, the connection is closed and the memory is let go.
        """
        assert self._waiter is None
        if self.closed:
            raise ConnectionLost("the connection was closed while it was idle")
        parser = self._parser = AnswerParser(head_only=head_only)
        self._place = place
        self._watch = ProgressWatch(self._patience)
        self._keep = False
        self.received_bytes = 0
        self.answered = False
        self.n_requests += 1
        self._waiter = asyncio.get_running_loop().create_future()
        self._start_timer(self._patience.first_byte_s, self._no_answer)
        try:
            self.transport.write(request)
            await self._waiter
        except BaseException:
            self.abort()
            raise
        finally:
            self._waiter = None
        assert parser.head is not None
        return parser.head, bytes(parser.body)
