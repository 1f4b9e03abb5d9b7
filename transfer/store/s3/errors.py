"""From what servers and sockets say to our errors: the one table, and the one sentence for each.

A refusal is never absence: only a server's own "no such key" or "no such bucket" is NotFound.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from imgfmt.errors import (
    AccessDenied,
    CorruptData,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
    StoreUnavailable,
    Unsupported,
)
from transfer.store.s3.policy import Action

MAX_SKEW_S = 300.0

_Row = tuple[Action, type[ImageError], str]
_F, _R, _T, _N = Action.FAIL, Action.RETRY, Action.THROTTLE, Action.RENEW

_NO_BUCKET = "bucket {bucket} does not exist at {endpoint}; create it, or correct the name"
_EXPIRED: _Row = (_N, AccessDenied, "the credentials have expired; get new ones and try again")
_BUSY: _Row = (_T, StoreUnavailable, "the server asks to slow down{code}; use fewer connections")
_REGION: _Row = (
    _F, InvalidInput, "bucket {bucket} is in {right_region}, not {region}; set {set_region}"
)  # fmt: skip
_DENIED: _Row = (_F, AccessDenied, "access denied{code}; check what these credentials may do")
_TROUBLE: _Row = (_R, StoreUnavailable, "the server failed{code}; try again")
_CODES: dict[str, _Row] = {
    "NoSuchKey": (_F, NotFound, "it does not exist"),
    "NoSuchUpload": (_F, NotFound, "its upload was aborted by someone else; push again"),
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AccountProblem": _DENIED,
    "InvalidAccessKeyId": (_F, AccessDenied, "the server does not know this access key"),
    "SignatureDoesNotMatch": (
        _F, AccessDenied, "the signature is refused: the secret key is wrong, or a proxy changes"
        " requests"
    ),
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "RequestTimeTooSkewed": (
        _F, AccessDenied, "this machine's clock is {skew} the server's; set it (NTP)"
    ),
    "PermanentRedirect": _REGION,
    "TemporaryRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "SlowDown": _BUSY,
    "ServiceUnavailable": _BUSY,
    "Throttling": _BUSY,
    "ThrottlingException": _BUSY,
    "RequestThrottled": _BUSY,
    "RequestLimitExceeded": _BUSY,
    "BandwidthLimitExceeded": _BUSY,
    "TooManyRequests": _BUSY,
    "InternalError": _TROUBLE,
    "RequestTimeout": _TROUBLE,
    "OperationAborted": _TROUBLE,
    "ConditionalRequestConflict": _TROUBLE,
    "BadDigest": (_R, StoreUnavailable, "it arrived damaged at the server; try again"),
    "XAmzContentSHA256Mismatch": (_R, StoreUnavailable, "it arrived damaged at the server"),
    "InvalidRange": (_F, CorruptData, "it is cut short: the range lies beyond its end"),
    "InvalidObjectState": (_F, InvalidInput, "it is archived; restore it in the bucket first"),
    "NotImplemented": (_F, Unsupported, "the server does not know this request{code}"),
    "InvalidBucketName": (_F, InvalidInput, "{bucket} is no valid name of a bucket"),
    "EntityTooLarge": (_F, OutOfResources, "the server takes no object of this size"),
    "QuotaExceeded": (_F, OutOfResources, "the bucket's quota is used up{code}"),
    "XMinioStorageFull": (_F, OutOfResources, "the server has no space left{code}"),
}  # fmt: skip
_STATUSES: dict[int, _Row] = {
    301: _REGION,
    307: _REGION,
    400: (_F, InvalidInput, "the server calls the request wrong{code}: {message}"),
    401: _DENIED,
    403: _DENIED,
    404: (_F, StoreUnavailable, "{endpoint} answers 404, but not as S3 does; check the endpoint"),
    405: (_F, Unsupported, "the server does not allow this request{code}"),
    408: _TROUBLE,
    409: _TROUBLE,
    412: (_F, CorruptData, "it was overwritten while it was read; try again"),
    416: _CODES["InvalidRange"],
    425: _TROUBLE,
    429: _BUSY,
    500: _TROUBLE,
    501: (_F, Unsupported, "the server does not know this request{code}"),
    502: _TROUBLE,
    503: _BUSY,
    504: _TROUBLE,
    507: (_F, OutOfResources, "the server has no space left{code}"),
}


class NoBucket(NotFound):
    """The bucket itself is absent. Says nothing about objects, so nobody may take it for that."""

    @classmethod
    def of(cls, place: Place, what: str) -> NoBucket:
        """The error about the bucket of `place`."""
        return cls(f"{what}: " + _NO_BUCKET.format(bucket=place.bucket, endpoint=place.endpoint))


class RequestFailed(Exception):
    """One attempt failed. `error` is what to raise if it is not repeated.

    `received_bytes` of the wanted range had come, in order and whole, and need no repeat.
    `status` and `code` are the server's, where it answered; `sent` is False where the request
    surely did not reach it; `timed_out` says that nothing came back for too long.
    """

    def __init__(
        self,
        action: Action,
        error: ImageError,
        *,
        status: int = 0,
        code: str = "",
        retry_after_s: float | None = None,
        received_bytes: int = 0,
        sent: bool = True,
    ) -> None:
        super().__init__(str(error))
        self.timed_out = False
        self.action = action
        self.error = error
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.received_bytes = received_bytes
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request went, for messages."""

    bucket: str
    endpoint: str
    region: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A server's answer that is no success. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    code: str = ""
    message: str = ""
    region: str = ""

    @classmethod
    def of_body(cls, status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
        """Read the error document that S3 sends, if it is one."""
        found = [_element(body, name) for name in (b"Code", b"Message", b"Region")]
        return cls(status, headers, *found)

    def failure(self, what: str, place: Place) -> RequestFailed:
        """What this answer means for a request about `what`."""
        if self.code == "NoSuchBucket":
            return RequestFailed(
                Action.FAIL, NoBucket.of(place, what), status=self.status, code=self.code
            )
        action, kind, sentence = self._row()
        region = self.region or self.headers.get("x-amz-bucket-region", "")
        if (
            kind is InvalidInput
            and self.code in ("", "AuthorizationHeaderMalformed")
            and not region
        ):
            sentence = "the server refuses the request{code}: {message}"
        if self.code == "RequestTimeTooSkewed" and not _skewed(self.headers):
            sentence = "the request came too late, or this machine's clock is wrong"
        code = self.code or str(self.status)
        text = sentence.format(
            bucket=place.bucket, endpoint=place.endpoint, region=place.region, code=f" ({code})",
            right_region=f"region {region}" if region else "another region",
            set_region=f"AWS_REGION={region}" if region else "AWS_REGION",
            skew=_skew(self.headers), message=one_line(self.message),
        )  # fmt: skip
        return RequestFailed(
            action, kind(f"{what}: {text}"), status=self.status, code=self.code,
            retry_after_s=_retry_after_s(self.headers),
        )  # fmt: skip

    def _row(self) -> _Row:
        found = _CODES.get(self.code)
        if found is not None:
            return found
        if self.code.startswith("KMS."):
            return (_F, AccessDenied, "its encryption key can't be used{code}")
        fallback = _TROUBLE if self.status >= 500 else _STATUSES[400]
        return _STATUSES.get(self.status, fallback)


def _element(body: bytes, name: bytes) -> str:
    found = re.search(rb"<%s>([^<]{1,500})</%s>" % (name, name), body)
    return one_line(found[1].decode("utf-8", "replace")) if found else ""


def one_line(text: str) -> str:
    """What somebody else says, fit for a line on a terminal."""
    line = " ".join(text.split())[:300]
    return "".join(c if c.isprintable() else "?" for c in line)


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isdecimal() else None


def skew_s(headers: Mapping[str, str]) -> float | None:
    """Seconds by which this machine's clock is ahead of the server's; None if it does not say."""
    try:
        return time.time() - parsedate_to_datetime(headers.get("date", "")).timestamp()
    except ValueError:
        return None


def _skewed(headers: Mapping[str, str]) -> bool:
    found = skew_s(headers)
    return found is None or abs(found) > MAX_SKEW_S


def _skew(headers: Mapping[str, str]) -> str:
    found = skew_s(headers)
    if found is None:
        return "too far from"
    return f"{abs(found) / 60:.0f} minutes {'ahead of' if found > 0 else 'behind'}"
