"""The portable transport: ranged GETs through aiobotocore's own body, which copies what comes.

The reference that the zero-copy transport is measured against, and the way out where a proxy or a
server does not go along with that. aiobotocore checks neither status nor range of an answer and
takes a short body for a success, so all of that is checked here too.
"""

from __future__ import annotations

import asyncio
from typing import Any

from transfer.store.s3.answer import ProtocolError
from transfer.store.s3.client import S3Client
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.http import ConnectionLost, Stalled
from transfer.store.s3.policy import MIB, ProgressWatch, RateLimit
from transfer.store.s3.ranges import Found, PlaceFound, Wanted, check_answer, cut_short, overwritten


class Portable:
    """A `RangeTransport` over the SDK's client."""

    def __init__(self, client: S3Client, rate: RateLimit | None) -> None:
        self._client = client
        self._rate = rate
        self._patience = client.config.patience

    async def read(self, wanted: Wanted, place: PlaceFound, *, fresh: bool = False) -> Found:
        """See `RangeTransport.read`. Which connection serves it is the SDK's choice."""
        progress = _Progress()
        try:
            pinned = {} if wanted.etag is None else {"IfMatch": wanted.etag}
            async with asyncio.timeout(self._patience.first_byte_s + self._patience.connect_s):
                answer = await self._client.sdk.get_object(
                    Bucket=self._client.config.bucket,
                    Key=wanted.key,
                    Range=wanted.headers["Range"],
                    **pinned,
                )
            facts = answer["ResponseMetadata"]
            body = answer["Body"]
            async with body:
                try:
                    found = check_answer(wanted, facts["HTTPStatusCode"], facts["HTTPHeaders"])
                    await self._copy(body, place(found), progress)
                except BaseException:
                    body.close()  # what is left of it is not worth reading
                    raise
            return found
        except Exception as error:
            failed = failure_of(error, wanted.what, self._client.place)
            if failed.status == 412:
                failed = overwritten(wanted.what)
            elif failed.status == 416:
                failed = cut_short(wanted)
            failed.received_bytes = progress.received_bytes
            raise failed from error

    async def _copy(self, body: Any, target: memoryview, progress: _Progress) -> None:
        watch = ProgressWatch(self._patience)
        loop = asyncio.get_running_loop()
        next_check_s = loop.time() + watch.period_s
        while progress.received_bytes < len(target):
            async with asyncio.timeout(self._patience.stall_window_s):
                piece = await body.read(min(MIB, len(target) - progress.received_bytes))
            if not piece:
                raise ConnectionLost("the connection was closed too early")
            start = progress.received_bytes
            progress.received_bytes += len(piece)
            target[start : progress.received_bytes] = piece
            watch.note(len(piece))
            if self._rate is not None and (pause_s := self._rate.charge(len(piece))):
                watch.excuse()
                await asyncio.sleep(pause_s)
            if loop.time() >= next_check_s:
                next_check_s = loop.time() + watch.period_s
                if watch.check():
                    raise Stalled("the transfer stalled")
        if await body.read(1):
            raise ProtocolError("the answer is longer than its range")


class _Progress:
    """Bytes of the target that are right."""

    def __init__(self) -> None:
        self.received_bytes = 0
