"""A pack on its way into a bucket: a multipart upload whose parts are sent as they fill.

A part is copied together in memory of its own, because what fills it comes from buffers that are
needed again; the write that completes a part also sends it. How many parts are in memory at once
is bounded for the whole store, see `part_memory`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from imgfmt.errors import ImageError, Internal, StoreUnavailable
from transfer.store.s3.bucket import Bucket
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.objects import Objects
from transfer.store.s3.sending import Body
from transfer.store.s3.session import Wire

_JOIN_S = 120.0
"""What a server may take to join parts into an object."""

_log = logging.getLogger(__name__)


class _Part:
    """Memory for `part_bytes`, and how many of them are there."""

    def __init__(self, part_bytes: int) -> None:
        self.body = Body()
        self.body.seek(part_bytes - 1)
        self.body.write(b"\0")
        self.filled_bytes = 0

    def fill(self, offset: int, piece: memoryview) -> None:
        self.body.seek(offset)
        self.body.write(piece)
        self.filled_bytes += len(piece)


class S3PackSink:
    """See `transfer.store.base.PackSink`."""

    def __init__(self, bucket: Bucket, objects: Objects, key: str) -> None:
        self._bucket = bucket
        self._objects = objects
        self._key = key
        self._part_bytes = bucket.config.part_bytes
        self._parts: dict[int, _Part] = {}
        self._sent: dict[int, str] = {}
        self._size_bytes = 0
        self._upload_id: str | None = None
        self._begin_lock = asyncio.Lock()

    @property
    def _what(self) -> str:
        return self._bucket.named(self._key)

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """See `PackSink.write`. The bytes are copied; full parts are sent before this returns."""
        full: list[int] = []
        for piece in pieces:
            rest = piece.cast("B")
            while len(rest):
                number, within = divmod(offset, self._part_bytes)
                part = self._parts.get(number) or await self._new_part(number, full)
                now = rest[: self._part_bytes - within]
                part.fill(within, now)
                offset, rest = offset + len(now), rest[len(now) :]
                if part.filled_bytes == self._part_bytes:
                    full.append(number)
        self._size_bytes = max(self._size_bytes, offset)
        await self._send_full(full)

    async def _new_part(self, number: int, full: list[int]) -> _Part:
        """A part that is not there yet. Where memory is tight, sends those in `full` first."""
        memory = self._bucket.session.parts
        if memory.is_tight:
            await self._send_full(full)
        await memory.take()
        if number in self._parts:  # another write was first
            memory.give_back()
        else:
            self._parts[number] = _Part(self._part_bytes)
        return self._parts[number]

    async def _send_full(self, full: list[int]) -> None:
        """Send these parts and let go of them; `full` is empty then."""
        while full:
            number = full.pop(0)
            with self._bucket.session.parts.sending():
                await self._send(number, self._parts[number].body)
            self._drop(number)

    def _drop(self, *numbers: int) -> None:
        """Let go of parts."""
        for number in numbers:
            del self._parts[number]
        self._bucket.session.parts.give_back(len(numbers))

    async def _send(self, number: int, body: Body) -> None:
        upload_id = await self._begin()
        n_bytes = len(body.getbuffer())
        session = self._bucket.session
        if session.rate is not None:
            await asyncio.sleep(session.rate.charge(n_bytes))

        async def attempt(wire: Wire) -> dict[str, Any]:
            body.seek(0)
            return await self._bucket.send(
                wire, "upload_part", Key=self._bucket.full(self._key), Body=body,
                UploadId=upload_id, PartNumber=number + 1,
            )  # fmt: skip

        what = f"part {number + 1} of {self._what}"
        self._sent[number] = (await session.run(what, attempt, n_bytes=n_bytes))["ETag"]

    async def _begin(self) -> str:
        async with self._begin_lock:
            if self._upload_id is None:
                answer = await self._bucket.call(
                    self._what, "create_multipart_upload", Key=self._bucket.full(self._key)
                )
                self._upload_id = str(answer["UploadId"])
            return self._upload_id

    async def commit(self) -> None:
        """See `PackSink.commit`. A pack of less than one part is sent at once."""
        last = self._last_part()
        if last is not None and not self._sent:
            await self._objects.put(self._key, last.getvalue())
        else:
            if last is not None:
                await self._send(len(self._sent), last)
            await self._complete()
        self._drop(*self._parts)
        self._upload_id = None
        facts = await self._objects.facts(self._key)
        if facts is None or facts.size_bytes != self._size_bytes:
            found = "nothing" if facts is None else f"{facts.size_bytes} bytes"
            raise StoreUnavailable(
                f"{self._what}: the server has {found} of {self._size_bytes}; push again"
            )

    def _last_part(self) -> Body | None:
        """The part that is not full, cut to its length. Raises Internal if bytes are missing."""
        n_full, rest_bytes = divmod(self._size_bytes, self._part_bytes)
        last = self._parts.get(n_full)
        there_bytes = 0 if last is None else last.filled_bytes
        whole = set(self._sent) == set(range(n_full)) and there_bytes == rest_bytes
        if not whole or set(self._parts) - {n_full}:
            raise Internal(f"{self._what} was not written without gaps")
        if last is None:
            return None
        last.body.truncate(rest_bytes)
        return last.body

    async def _complete(self) -> None:
        parts = [{"PartNumber": n + 1, "ETag": etag} for n, etag in sorted(self._sent.items())]
        is_repeat = False

        async def attempt(wire: Wire) -> None:
            nonlocal is_repeat
            try:
                await self._bucket.send(
                    wire, "complete_multipart_upload", Key=self._bucket.full(self._key),
                    UploadId=self._upload_id, MultipartUpload={"Parts": parts}, more_s=_JOIN_S,
                )  # fmt: skip
            except Exception as error:
                failed = failure_of(error, self._what, wire.client.place)
                if failed.code == "NoSuchUpload" and is_repeat:
                    return  # an answer was lost; `commit` looks whether all is there
                is_repeat = True
                raise failed from error

        await self._bucket.session.run(self._what, attempt)

    async def abort(self) -> None:
        """See `PackSink.abort`. Where the server can't be told, the upload is left for `doctor`."""
        self._drop(*self._parts)
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is None:
            return
        try:
            await abort_upload(self._bucket, self._key, upload_id)
        except ImageError as error:
            _log.warning("an unfinished upload of %s is left behind: %s", self._what, error)


async def abort_upload(bucket: Bucket, key: str, upload_id: str) -> None:
    """Free what a multipart upload has stored. Nothing happens if it is gone."""

    async def attempt(wire: Wire) -> None:
        try:
            await bucket.send(
                wire, "abort_multipart_upload", Key=bucket.full(key), UploadId=upload_id
            )
        except Exception as error:
            failed = failure_of(error, bucket.named(key), wire.client.place)
            if failed.status != 404:
                raise failed from error

    await bucket.session.run(bucket.named(key), attempt)
