"""References in a bucket: one object each, changed by If-None-Match and If-Match (SPEC.md 6.1)."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass
from typing import Any

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.errors import Conflict, CorruptData, InvalidImage, NotFound, Unsupported
from imgfmt.reference import ReferenceRecord, standing_in
from imgfmt.sizes import check_size
from imgfmt.wire import MAX_RECORD_BYTES
from transfer.store.base import StoredReference
from transfer.store.s3.bucket import Bucket, nanoseconds
from transfer.store.s3.errors import NoBucket
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.objects import Objects
from transfer.store.s3.ranges import Found
from transfer.store.s3.reader import read_whole
from transfer.store.s3.sending import Body, content_md5
from transfer.store.s3.session import Wire
from transfer.tasks import first_cause

_N_READERS = 16
_WRITES = "snapcask-writes"
_KEPT_WRITES = 64  # of 22 characters each: metadata may have 2 KiB


@dataclass(frozen=True, slots=True)
class Version:
    """One state of a reference's object: its ETag, and the last changes that led to it.

    `writes` are write ids, the newest first. They lie in the object's metadata, where they tell a
    writer whose answer was lost that its change happened, though others have followed it.
    """

    etag: str
    writes: tuple[str, ...]


class References:
    """All references of the store in `bucket`."""

    def __init__(self, bucket: Bucket, objects: Objects) -> None:
        self._bucket = bucket
        self._objects = objects

    async def read(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`."""
        got = await self._get(name, tag)
        if got is None:
            return None
        raw, found = got
        return self._decoded(name, tag, raw, found)

    async def _get(self, name: str, tag: str) -> tuple[memoryview, Found | None] | None:
        key = reference_key(name, tag)
        what = self._bucket.named(key)

        def check(size_bytes: int, beginning: Octets) -> None:
            check_size(key, size_bytes, beginning, what)

        try:
            return await read_whole(self._bucket.session, self._bucket.full(key), what, check)
        except NoBucket:
            raise
        except NotFound:
            return None

    def _decoded(self, name: str, tag: str, raw: Octets, found: Found | None) -> StoredReference:
        what = self._bucket.named(reference_key(name, tag))
        record = ReferenceRecord.decode(raw, what)
        if (record.name, record.tag) != (name, tag):
            raise InvalidImage(f"{what} is a record of {record.name}:{record.tag}")
        assert found is not None
        writes = found.headers.get(f"x-amz-meta-{_WRITES}", "").split()
        return StoredReference(record, Version(found.etag, tuple(writes)))

    async def read_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`. The ETag is that of the bytes that were damaged."""
        try:
            return await self.read(name, tag)
        except (CorruptData, InvalidImage) as error:
            problem = str(error)
        key = reference_key(name, tag)
        head = await self._bucket.call(
            self._bucket.named(key), "head_object", Key=self._bucket.full(key)
        )
        if 0 < head["ContentLength"] <= MAX_RECORD_BYTES:  # else it can't be a record
            got = await self._get(name, tag)
            if got is None:
                return None
            raw, found = got
            try:
                return self._decoded(name, tag, raw, found)  # it was mended meanwhile
            except (CorruptData, InvalidImage) as error:
                problem = str(error)
            if found is None or found.etag != head["ETag"]:
                raise Conflict(
                    f"{name}:{tag} in store {self._bucket.config.url} changes too fast; try again"
                )
        record = standing_in(name, tag, None, 1, nanoseconds(head["LastModified"]))
        writes = head.get("Metadata", {}).get(_WRITES, "").split()
        return StoredReference(record, Version(head["ETag"], tuple(writes)), problem)

    async def _listed(self, name: str, tag: str) -> StoredReference | None:
        try:
            return await self.read_to_change(name, tag)
        except Unsupported as error:
            record = standing_in(name, tag, None, 1, 0)
            return StoredReference(record, Version("", ()), str(error))

    async def change(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`."""
        key = reference_key(record.name, record.tag)
        write_id = _text(record.write_id)
        earlier: tuple[str, ...] = ()
        condition: dict[str, Any] = {"IfNoneMatch": "*"}
        if seen is not None:
            earlier = seen.version.writes
            condition = {"IfMatch": seen.version.etag}
            if not seen.version.etag:
                raise Unsupported(
                    f"{self._bucket.named(key)} has no ETag, so it can't be changed safely"
                )
        writes = " ".join((write_id, *earlier)[:_KEPT_WRITES])
        raw = record.encode()
        md5 = await content_md5(raw)

        async def attempt(wire: Wire) -> bool:
            try:
                await self._bucket.send(
                    wire, "put_object", Key=self._bucket.full(key), Body=Body(raw),
                    ContentMD5=md5, Metadata={_WRITES: writes}, **condition,
                )  # fmt: skip
                return True
            except Exception as error:
                failed = failure_of(error, self._bucket.named(key), wire.client.place)
                gone = failed.code == "NoSuchKey" and seen is not None
                if failed.status == 412 or gone:
                    return False
                raise failed from error

        if await self._bucket.session.run(self._bucket.named(key), attempt):
            return
        there = await self.read(record.name, record.tag)
        if there is None or not _happened(there, record):
            raise Conflict(
                f"{record.name}:{record.tag} in store {self._bucket.config.url} was changed by"
                " someone else meanwhile"
            )

    async def list(self) -> list[StoredReference]:
        """See `Store.list_references`. Objects that are no references are passed over."""
        parsed = [parse_key(facts.key) for facts in await self._objects.list(layout.REFS)]
        wanted = sorted(found for found in parsed if found is not None)
        pending = iter(wanted)
        states: dict[tuple[str, str], StoredReference] = {}

        async def reader() -> None:
            for name, tag in pending:
                state = await self._listed(name, tag)
                if state is not None:
                    states[name, tag] = state

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_N_READERS, len(wanted))):
                    group.create_task(reader())
        except BaseExceptionGroup as failed:
            raise first_cause(failed) from None
        return [states[pair] for pair in wanted if pair in states]


def _happened(newest: StoredReference, change: ReferenceRecord) -> bool:
    """Whether `change` was made: our own answer may have been lost."""
    if newest.record.write_id == change.write_id:
        return True
    return _text(change.write_id) in newest.version.writes


def _text(write_id: bytes) -> str:
    return base64.urlsafe_b64encode(write_id).decode().rstrip("=")


def reference_key(name: str, tag: str) -> str:
    """`refs/<name>/<tag>`, with `/` in the name written `+` as in a file store."""
    return layout.reference_prefix(name, tag).rstrip("/")


def parse_key(key: str) -> tuple[str, str] | None:
    """The inverse of `reference_key`; None for any other key."""
    found = layout.parse_generation_key(f"{key}/{0:016d}")
    return None if found is None else found[:2]
