"""What a `FaultServer` may do wrong, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from transfer.testing.little_s3 import Answer, Request


class FaultKind(StrEnum):
    """What may happen to an answer."""

    SHORT_BODY = "short-body"  # closes after some bytes of the body
    WHOLE_OBJECT = "whole-object"  # 200 with all of it, though a range was asked for
    WRONG_RANGE = "wrong-range"  # another range than the one asked for, and says so
    STALL = "stall"  # nothing more after some bytes of the body
    NO_ANSWER = "no-answer"  # not even a head
    RESET = "reset"  # the connection is reset after some bytes of the body
    DRIP = "drip"  # a byte now and then, after some bytes
    BUSY = "busy"  # 503 SlowDown
    PRECONDITION = "precondition"  # 412
    EXPIRED = "expired"  # 403 ExpiredToken
    DENIED = "denied"  # 403 AccessDenied
    GZIP = "gzip"  # the body encoded
    HALF_CLOSE = "half-close"  # right, but the connection is closed for sending after it
    WRONG_BYTES = "wrong-bytes"  # right but for one byte in the middle
    TWICE = "twice"  # the whole answer is sent a second time
    TWICE_BODY = "twice-body"  # the body is sent a second time
    LOST_ANSWER = "lost-answer"  # the request is carried out and the connection closed
    ERROR_IN_200 = "error-in-200"  # an error document after a 200
    SERVER_ERROR = "server-error"  # 500
    OTHER = "other"  # what the fault's own `answer` says


@dataclass(slots=True)
class Fault:
    """Happens to `times` requests that fit, the first `skip` of them excepted.

    A request fits if it has the method, its key contains `key`, and its range contains the byte
    `at` (any, if None). `after_bytes` of the body are sent before what happens in its middle.
    """

    kind: FaultKind
    skip: int = 0
    times: int = 1
    method: str = "GET"
    key: str = ""
    at: int | None = None
    after_bytes: int = 0
    retry_after_s: int | None = None
    answer: Answer | None = None
    used: int = 0

    def fits(self, request: Request) -> bool:
        """Whether this is to happen now; counts the request if it fits."""
        span = request.span
        here = self.at is None or (span is not None and span[0] <= self.at < span[1])
        if request.method != self.method or self.key not in request.path or not here:
            return False
        self.used += 1
        return self.skip < self.used <= self.skip + self.times


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was answered, or would have been, and over which connection it came.

    `in_flight` counts it and all others that were not yet answered then.
    """

    request: Request
    connection: int
    status: int
    in_flight: int


@dataclass(slots=True)
class Manners:
    """How the server behaves throughout. `speed` gives bytes/s of a connection by its number."""

    most_in_flight: int | None = None
    latency_s: float = 0.0
    speed: Callable[[int], float | None] = lambda number: None
