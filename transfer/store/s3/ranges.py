"""What a ranged read asks for, and what an answer must be before its bytes count."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from imgfmt.errors import CorruptData, StoreUnavailable
from transfer.store.s3.errors import RequestFailed
from transfer.store.s3.policy import Action

_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes [start, end) of an object. `what` names it in messages; `key` is the bucket's.

    `etag` and `total_bytes` are the object's as seen before, or None. With `or_less` the object may
    end before `end`, as it is when its size is not known yet.
    """

    key: str
    what: str
    start: int
    end: int
    etag: str | None = None
    total_bytes: int | None = None
    or_less: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """The headers that ask for this."""
        pinned = {} if self.etag is None else {"If-Match": self.etag}
        return {"Range": f"bytes={self.start}-{self.end - 1}", **pinned}


@dataclass(frozen=True, slots=True)
class Found:
    """What a checked answer brings: bytes [start, end) of an object with this ETag and size.

    The ETag is empty where the server gives none. Header names are in lower case.
    """

    start: int
    end: int
    etag: str
    total_bytes: int
    headers: Mapping[str, str]

    @property
    def length_bytes(self) -> int:
        return self.end - self.start


PlaceFound = Callable[[Found], memoryview]
"""Gives the memory for what was found, exactly as long. It must not wait."""


class RangeTransport(Protocol):
    """One attempt at one range. Two implementations: `receive.ZeroCopy` and `portable.Portable`."""

    async def read(self, wanted: Wanted, place: PlaceFound, *, fresh: bool = False) -> Found:
        """Receive a range into the memory that `place` gives, over a new connection if `fresh`.

        Raises RequestFailed, which tells how many bytes of the memory are right. However it ends,
        nothing writes into the memory afterwards.
        """


def check_answer(wanted: Wanted, status: int, headers: Mapping[str, str]) -> Found:
    """Check an answer that is a success. Header names are in lower case. Raises RequestFailed."""
    what = wanted.what
    if status == 200:
        raise _odd(f"{what}: the server ignores ranges and sent the whole object")
    if status != 206:
        raise _odd(f"{what}: the server answers {status} to a ranged read")
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", ""):
        raise _odd(f"{what}: the server, or a proxy, sends it encoded as {encoding[:20]}")
    found = _found(wanted, headers)
    if found.start != wanted.start or found.end > wanted.end:
        raise _odd(f"{what}: bytes {found.start} to {found.end} came instead of {_span(wanted)}")
    if wanted.etag is not None and found.etag != wanted.etag:
        raise overwritten(what)
    if wanted.total_bytes not in (None, found.total_bytes):
        raise overwritten(what)
    if found.end == wanted.end or (wanted.or_less and found.end == found.total_bytes):
        return found
    if found.end == found.total_bytes:
        raise cut_short(wanted)
    raise _odd(f"{what}: bytes {found.start} to {found.end} came instead of {_span(wanted)}")


def _found(wanted: Wanted, headers: Mapping[str, str]) -> Found:
    match = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
    if match is None:
        raise _odd(f"{wanted.what}: the server does not say which range it sends")
    start, last, total = map(int, match.groups())
    if not start <= last < total:
        raise _odd(f"{wanted.what}: the server sends a range that can't be")
    if headers.get("content-length") != str(last + 1 - start):
        raise _odd(f"{wanted.what}: the answer's length is not that of its range")
    return Found(start, last + 1, headers.get("etag", ""), total, headers)


def cut_short(wanted: Wanted) -> RequestFailed:
    """The object ends before the range does."""
    text = f"{wanted.what} is cut short: it ends before byte {wanted.end}"
    return RequestFailed(Action.FAIL, CorruptData(text), status=416)


def overwritten(what: str) -> RequestFailed:
    """The object is not the one that was read before."""
    return RequestFailed(
        Action.FAIL, CorruptData(f"{what} was overwritten while it was read; try again"), status=412
    )


def _odd(text: str) -> RequestFailed:
    return RequestFailed(Action.RETRY, StoreUnavailable(text))


def _span(wanted: Wanted) -> str:
    return f"{wanted.start} to {wanted.end}"
