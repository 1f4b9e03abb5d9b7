"""The zero-copy transport: ranged GETs of our own, signed by botocore, received in place.

Beside it a custom HTTP session inside aiobotocore was weighed: it would keep what a request costs
there (0.9 ms), which at 8 MiB a range is a third of what receiving the bytes costs.
"""

from __future__ import annotations

from transfer.store.s3.answer import Head
from transfer.store.s3.client import S3Client
from transfer.store.s3.errors import Refusal, RequestFailed
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.http import Connection, ConnectionLost
from transfer.store.s3.pool import ConnectionPool
from transfer.store.s3.ranges import Found, PlaceFound, Wanted, check_answer, cut_short, overwritten


class ZeroCopy:
    """A `RangeTransport` over connections of `pool`."""

    def __init__(self, client: S3Client, pool: ConnectionPool) -> None:
        self._client = client
        self._pool = pool

    async def read(self, wanted: Wanted, place: PlaceFound, *, fresh: bool = False) -> Found:
        """See `RangeTransport.read`."""
        received_bytes = 0
        try:
            headers = await self._client.signed(wanted.key, wanted.headers)
            request = self._pool.head(self._client.base.target(wanted.key), headers)
            for new in (True,) if fresh else (False, True):
                async with self._pool.connection(fresh=new) as connection:
                    was_used = connection.n_requests > 0
                    try:
                        return await self._receive(connection, request, wanted, place)
                    except Exception as error:
                        received_bytes = connection.received_bytes
                        # a server may close what was idle at any time: ask on a new connection
                        lost = isinstance(error, ConnectionLost | OSError)
                        if not (lost and was_used and not connection.answered):
                            raise
            raise AssertionError("a new connection was not used before")
        except Exception as error:
            failed = failure_of(error, wanted.what, self._client.place)
            failed.received_bytes = received_bytes
            raise failed from error

    async def _receive(
        self, connection: Connection, request: bytes, wanted: Wanted, place: PlaceFound
    ) -> Found:
        found: Found | None = None

        def place_body(head: Head) -> memoryview | None:
            nonlocal found
            if head.status >= 300:
                return None
            found = check_answer(wanted, head.status, head.headers)
            return place(found)

        head, body = await connection.request(request, place_body)
        if found is not None:
            return found
        raise refused(wanted, Refusal.of_body(head.status, head.headers, body), self._client)


def refused(wanted: Wanted, refusal: Refusal, client: S3Client) -> RequestFailed:
    """What the refusal of a ranged read means."""
    if refusal.status == 412:
        return overwritten(wanted.what)
    if refusal.status == 416:
        return cut_short(wanted)
    return refusal.failure(wanted.what, client.place)
