"""The head of an HTTP/1.1 answer, and the body of one that is read in full: parsed by llhttp."""

from __future__ import annotations

from dataclasses import dataclass

import httptools

MAX_HEAD_BYTES = 64 * 1024


class ProtocolError(Exception):
    """The other side broke HTTP, or sent what was not asked for."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer, names in lower case, repeated ones joined by commas."""

    status: int
    headers: dict[str, str]


class AnswerParser:
    """Collects what llhttp finds of one answer."""

    def __init__(self, *, head_only: bool) -> None:
        self.fields: dict[str, str] = {}
        self.body = bytearray()
        self.head: Head | None = None
        self.complete = False
        self.keep_alive = False
        self.trailing = False
        self._head_bytes = 0
        self._head_only = head_only
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, received: memoryview) -> None:
        if self.head is None:
            self._head_bytes += len(received)
            if self._head_bytes > MAX_HEAD_BYTES:
                raise ProtocolError("the answer's head has no end")
        try:
            self._parser.feed_data(received)
        except httptools.HttpParserUpgrade:
            self.complete = True
        except httptools.HttpParserError as error:
            raise ProtocolError(f"the answer is no HTTP: {error}") from error

    def on_message_begin(self) -> None:
        self.trailing = self.complete

    def on_header(self, name: bytes, value: bytes) -> None:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.fields[key] = f"{self.fields[key]}, {text}" if key in self.fields else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer; the real one follows
            self.fields = {}
            return
        self.head = Head(status, self.fields)
        self.keep_alive = self._parser.should_keep_alive()
        self.complete = self._head_only

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.complete = self.head is not None
