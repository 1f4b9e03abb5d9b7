"""As much of S3 as the engine uses, over objects in memory. Pure: a request in, an answer out."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_MESSAGES = {
    "NoSuchKey": 404, "NoSuchBucket": 404, "NoSuchUpload": 404, "PreconditionFailed": 412,
    "InvalidRange": 416, "InvalidPart": 400, "MethodNotAllowed": 405,
}  # fmt: skip
_METADATA = "x-amz-meta-"


@dataclass(frozen=True, slots=True)
class Request:
    """Header names are in lower case; `target` is as it was sent."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def path(self) -> str:
        """The decoded path: `/bucket/key`."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        """Parameters; the last of each name."""
        found = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        return {name: values[-1] for name, values in found.items()}

    @property
    def span(self) -> tuple[int, int] | None:
        """The half-open range that is asked for."""
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass(slots=True)
class Answer:
    """What goes back. A body of None means that only its length is told (HEAD)."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview | None = b""


@dataclass(frozen=True, slots=True)
class Stored:
    """One version of an object."""

    body: bytes
    etag: str
    written: datetime
    metadata: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, body: bytes, metadata: Mapping[str, str] | None = None) -> Stored:
        """An object that is written now."""
        etag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        return cls(body, etag, datetime.now(UTC), metadata or {})


class LittleS3:
    """One bucket. `conditions` says whether conditional writes are honoured or ignored."""

    def __init__(self, bucket: str = "bucket", *, conditions: bool = True) -> None:
        self.bucket = bucket
        self.conditions = conditions
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}

    def put(self, key: str, body: bytes) -> None:
        """Write an object from the test itself."""
        self.objects[key] = Stored.of(body)

    def answer(self, request: Request) -> Answer:
        """Do what a request says."""
        bucket, _, key = request.path.lstrip("/").partition("/")
        if bucket != self.bucket:
            return refusal("NoSuchBucket", head=request.method == "HEAD")
        query = request.query
        match request.method:
            case "GET" if not key:
                return self._list_uploads() if "uploads" in query else self._list(query)
            case "HEAD" if not key:
                return Answer(200)
            case "GET" | "HEAD":
                return self._get(key, request)
            case "PUT":
                return self._put_part(query, request) if query else self._put(key, request)
            case "POST":
                return self._begin(key) if "uploads" in query else self._complete(key, query)
            case "DELETE":
                if "uploadId" in query:
                    gone = self.uploads.pop(query["uploadId"], None) is None
                    return refusal("NoSuchUpload") if gone else Answer(204)
                self.objects.pop(key, None)
                return Answer(204)
        return refusal("MethodNotAllowed")

    def _get(self, key: str, request: Request) -> Answer:
        head = request.method == "HEAD"
        stored = self.objects.get(key)
        if stored is None:
            return refusal("NoSuchKey", head=head)
        if request.headers.get("if-match", stored.etag) != stored.etag:
            return refusal("PreconditionFailed", head=head)
        headers = {
            "ETag": stored.etag,
            "Last-Modified": format_datetime(stored.written, usegmt=True),
            "Accept-Ranges": "bytes",
        } | {_METADATA + name: value for name, value in stored.metadata.items()}
        total = len(stored.body)
        span = request.span
        if head or span is None:
            headers["Content-Length"] = str(total)
            return Answer(200, headers, None if head else stored.body)
        start, end = span[0], min(span[1], total)
        if start >= total:
            return refusal("InvalidRange")
        headers["Content-Length"] = str(end - start)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        return Answer(206, headers, memoryview(stored.body)[start:end])

    def _put(self, key: str, request: Request) -> Answer:
        stored = self.objects.get(key)
        if self.conditions:
            if request.headers.get("if-none-match") == "*" and stored is not None:
                return refusal("PreconditionFailed")
            wanted = request.headers.get("if-match")
            if wanted is not None and (stored is None or stored.etag != wanted):
                return refusal("PreconditionFailed" if stored else "NoSuchKey")
        metadata = {
            name.removeprefix(_METADATA): value
            for name, value in request.headers.items()
            if name.startswith(_METADATA)
        }
        made = self.objects[key] = Stored.of(request.body, metadata)
        return Answer(200, {"ETag": made.etag})

    def _begin(self, key: str) -> Answer:
        upload_id = secrets.token_hex(8)
        self.uploads[upload_id] = (key, {})
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")

    def _put_part(self, query: Mapping[str, str], request: Request) -> Answer:
        upload = self.uploads.get(query["uploadId"])
        if upload is None:
            return refusal("NoSuchUpload")
        upload[1][int(query["partNumber"])] = request.body
        return Answer(200, {"ETag": Stored.of(request.body).etag})

    def _complete(self, key: str, query: Mapping[str, str]) -> Answer:
        upload = self.uploads.pop(query["uploadId"], None)
        if upload is None:
            return refusal("NoSuchUpload")
        made = self.objects[key] = Stored.of(b"".join(upload[1][n] for n in sorted(upload[1])))
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.etag)}</ETag>")

    def _list(self, query: Mapping[str, str]) -> Answer:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        most = int(query.get("max-keys", "1000"))
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        items = "".join(
            f"<Contents><Key>{quote(key)}</Key><Size>{len(self.objects[key].body)}</Size>"
            f"<LastModified>{self.objects[key].written.isoformat()}</LastModified></Contents>"
            for key in keys[:most]
        )
        if len(keys) > most:
            last = escape(keys[most - 1])
            items += f"<IsTruncated>true</IsTruncated><NextContinuationToken>{last}"
            items += "</NextContinuationToken>"
        return _xml("ListBucketResult", f"<EncodingType>url</EncodingType>{items}")

    def _list_uploads(self) -> Answer:
        now = datetime.now(UTC).isoformat()
        items = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"
            f"<Initiated>{now}</Initiated></Upload>"
            for upload_id, (key, _) in self.uploads.items()
        )
        return _xml("ListMultipartUploadsResult", items)


def refusal(
    code: str, status: int = 0, *, head: bool = False, headers: Mapping[str, str] | None = None,
    more: str = "",
) -> Answer:  # fmt: skip
    """An error as S3 words it."""
    made = _xml("Error", f"<Code>{code}</Code><Message>{code}, says the server</Message>{more}")
    made.status = status or _MESSAGES[code]
    made.headers |= headers or {}
    if head:
        made.headers.pop("Content-Length", None)
        made.body = b""
    return made


def _xml(name: str, inner: str) -> Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><{name}>{inner}</{name}>'.encode()
    return Answer(200, {"Content-Type": "application/xml"}, body)
