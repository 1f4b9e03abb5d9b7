"""Whole objects of a bucket: facts, listings, plain and conditional writes, deletion."""

from __future__ import annotations

import secrets
from typing import Any

from transfer.store.base import ObjectFacts
from transfer.store.s3.bucket import Bucket, nanoseconds
from transfer.store.s3.errors import NoBucket
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.ranges import Wanted
from transfer.store.s3.sending import Body, content_md5
from transfer.store.s3.session import Wire

_WRITE_ID = "snapcask-write"


class Objects:
    """Objects of `bucket` under the store's keys."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._bucket_seen = False

    async def facts(self, key: str) -> ObjectFacts | None:
        """See `Store.facts`."""
        what = self._bucket.named(key)

        async def attempt(wire: Wire) -> dict[str, Any] | None:
            try:
                return await self._bucket.send(wire, "head_object", Key=self._bucket.full(key))
            except Exception as error:
                failed = failure_of(error, what, wire.client.place)
                if failed.status == 404:
                    await self._check_bucket(wire)
                    return None
                if 400 <= failed.status < 500 and not failed.code:
                    await self._explain(wire, key)  # a HEAD has no body that would say why
                raise failed from error

        found = await self._bucket.session.run(what, attempt)
        if found is None:
            return None
        return ObjectFacts(key, found["ContentLength"], nanoseconds(found["LastModified"]))

    async def _check_bucket(self, wire: Wire) -> None:
        """Raise NoBucket if what is absent is the bucket."""
        if self._bucket_seen:
            return
        what = f"store {self._bucket.config.url}"
        try:
            await self._bucket.send(wire, "head_bucket")
        except Exception as error:
            failed = failure_of(error, what, wire.client.place)
            if failed.status == 404:
                raise NoBucket.of(wire.client.place, what) from error
            if failed.status == 0:
                raise failed from error
        self._bucket_seen = True  # or we may not know, but the key is absent all the same

    async def _explain(self, wire: Wire, key: str) -> None:
        """Ask for one byte, so that the server says what is wrong; raises that."""
        wanted = Wanted(self._bucket.full(key), self._bucket.named(key), 0, 1)
        await wire.ranges.read(wanted, lambda found: memoryview(bytearray(1)))

    async def list(self, prefix: str) -> list[ObjectFacts]:
        """See `Store.list_objects`."""
        found = []
        async for page in self._bucket.pages("list_objects_v2", prefix, "ContinuationToken"):
            for item in page.get("Contents", []):
                key = item["Key"].removeprefix(self._bucket.config.prefix)
                if key.startswith(prefix) and not key.endswith("/"):
                    written_ns = nanoseconds(item["LastModified"])
                    found.append(ObjectFacts(key, item["Size"], written_ns))
        return sorted(found, key=lambda facts: facts.key)

    async def put(self, key: str, raw: bytes) -> None:
        """Write a small object, in place of any that is there."""
        md5 = await content_md5(raw)

        async def attempt(wire: Wire) -> None:
            await self._bucket.send(
                wire, "put_object", Key=self._bucket.full(key), Body=Body(raw), ContentMD5=md5
            )

        await self._bucket.session.run(self._bucket.named(key), attempt)

    async def create(self, key: str, raw: bytes) -> bool:
        """Write an object unless the key is taken; True if this call wrote it.

        Where the key is taken, a write id in the object's metadata tells whether that was us, and
        the answer got lost; the HTTP client repeats requests on its own account too.
        """
        write_id = secrets.token_hex(16)
        md5 = await content_md5(raw)

        async def attempt(wire: Wire) -> bool:
            try:
                await self._bucket.send(
                    wire, "put_object", Key=self._bucket.full(key), Body=Body(raw),
                    ContentMD5=md5, IfNoneMatch="*", Metadata={_WRITE_ID: write_id},
                )  # fmt: skip
                return True
            except Exception as error:
                failed = failure_of(error, self._bucket.named(key), wire.client.place)
                if failed.status == 412:
                    return await self._holds(wire, key, write_id)
                raise failed from error

        return await self._bucket.session.run(self._bucket.named(key), attempt)

    async def _holds(self, wire: Wire, key: str, write_id: str) -> bool:
        found = await self._bucket.send(wire, "head_object", Key=self._bucket.full(key))
        return bool(found.get("Metadata", {}).get(_WRITE_ID) == write_id)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""

        async def attempt(wire: Wire) -> None:
            try:
                await self._bucket.send(wire, "delete_object", Key=self._bucket.full(key))
            except Exception as error:
                failed = failure_of(error, self._bucket.named(key), wire.client.place)
                if failed.code != "NoSuchKey":
                    raise failed from error

        await self._bucket.session.run(self._bucket.named(key), attempt)
