"""A store in a bucket (SPEC.md sections 6.1, 8 and 9): see `transfer.store.base.Store`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.reference import ReferenceRecord
from transfer.store.base import ObjectFacts, PackSink, SizeCheck, StoredReference
from transfer.store.s3 import surroundings
from transfer.store.s3.bucket import Bucket, nanoseconds
from transfer.store.s3.config import MIB, S3Config
from transfer.store.s3.limiter import ConcurrencyLimit
from transfer.store.s3.objects import Objects
from transfer.store.s3.pack_sink import S3PackSink, abort_upload
from transfer.store.s3.probe import Abilities, check, probe_bucket
from transfer.store.s3.ranges import Wanted
from transfer.store.s3.reader import read_range, read_whole
from transfer.store.s3.references import References
from transfer.store.unfinished import is_in_parts, is_temporary

MULTIPART_FROM_BYTES = 32 * MIB
_KEPT_ETAGS = 65_536


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """A multipart upload that nobody completed. It costs space and is in no listing of objects."""

    key: str
    upload_id: str
    begun_ns: int


class S3Store:
    """A `transfer.store.base.Store` in a bucket. Made without a request; nothing need exist yet.

    May be used from any event loop; each has connections of its own, which end with it.
    """

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._bucket = Bucket(config)
        self._objects = Objects(self._bucket)
        self._references = References(self._bucket, self._objects)
        self._etags: dict[str, tuple[str, int]] = {}

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`."""
        return self.config.url

    @property
    def n_writes(self) -> int:
        """See `Store.n_writes`."""
        return self.config.connections

    @property
    def credential_scope(self) -> str:
        """Whose credentials the store is read with; what one may read is not shown to another."""
        return self.config.credential_scope

    @property
    def limit(self) -> ConcurrencyLimit:
        """How many requests the server gets at a time; shared by all that use this loop."""
        return self._bucket.session.limit

    @property
    def throttled(self) -> bool:
        """Whether the server has just asked for fewer requests."""
        return self.limit.throttled

    def close(self) -> None:
        """Let go of all connections; each is closed by its loop, at the latest when that ends."""
        self._bucket.close()

    async def aclose(self) -> None:
        """Close the connections of the running loop now. No request may be under way."""
        await self._bucket.aclose()

    async def probe(self) -> dict[str, str]:
        """See `transfer.store.base.Probed`."""
        abilities = await self.abilities()
        check(abilities, self.url)
        return abilities.found()

    async def abilities(self) -> Abilities:
        """What the server was seen to do right, just now."""
        return await probe_bucket(self._bucket, self._objects)

    async def get(self, key: str, check: SizeCheck | None = None) -> Octets:
        """See `Store.get`. Bytes of two versions of an object are never mixed."""
        bucket = self._bucket
        raw, _ = await read_whole(bucket.session, bucket.full(key), bucket.named(key), check)
        return raw

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`. However this ends, nothing writes to `buffer` afterwards."""
        await self._read_into(key, offset, buffer, fresh=False)

    async def read_into_anew(self, key: str, offset: int, buffer: memoryview) -> None:
        """As `read_into`, over a new connection: see `transfer.hedge`."""
        await self._read_into(key, offset, buffer, fresh=True)

    async def _read_into(self, key: str, offset: int, buffer: memoryview, *, fresh: bool) -> None:
        """Read a range. All ranges of a pack must come from one version of it."""
        if not len(buffer):
            return
        etag, total_bytes = self._etags.get(key, (None, None))
        bucket = self._bucket
        wanted = Wanted(
            bucket.full(key), bucket.named(key), offset, offset + len(buffer), etag, total_bytes
        )
        try:
            found = await read_range(bucket.session, wanted, buffer, fresh=fresh)
        except Exception:
            self._etags.pop(key, None)  # so that a later read may take what is there then
            raise
        if found.etag and layout.pack_name_of(key) is not None:
            if len(self._etags) >= _KEPT_ETAGS:
                self._etags.clear()
            self._etags[key] = (found.etag, found.total_bytes)

    async def facts(self, key: str) -> ObjectFacts | None:
        """See `Store.facts`."""
        return await self._objects.facts(key)

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """See `Store.list_objects`."""
        return await self._objects.list(prefix)

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """See `Store.put`."""
        if sum(map(len, pieces)) < MULTIPART_FROM_BYTES:
            await self._objects.put(key, b"".join(pieces))
            return
        sink = S3PackSink(self._bucket, self._objects, key)
        try:
            offset, step = 0, self.config.part_bytes
            for piece in pieces:
                for start in range(0, len(piece), step):
                    part = memoryview(piece)[start : start + step]
                    await sink.write(offset, [part])
                    offset += len(part)
            await sink.commit()
        finally:
            await sink.abort()

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """See `Store.create`: by If-None-Match."""
        return await self._objects.create(key, b"".join(pieces))

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._etags.pop(key, None)
        await self._objects.delete(key)

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`: a multipart upload, begun with the first full part."""
        self._etags.pop(key, None)
        return S3PackSink(self._bucket, self._objects, key)

    async def read_reference(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`. The version tells ETag and writers."""
        return await self._references.read(name, tag)

    async def reference_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`. A bucket has no older state, so there is no history."""
        return await self._references.read_to_change(name, tag)

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`: by If-None-Match and If-Match."""
        await self._references.change(record, seen)

    async def list_references(self) -> list[StoredReference]:
        """See `Store.list_references`."""
        return await self._references.list()

    async def list_unfinished(self) -> list[UnfinishedUpload]:
        """Multipart uploads under the store's prefix, other people's under way too."""
        found = []
        pages = self._bucket.pages("list_multipart_uploads", "", "KeyMarker", "UploadIdMarker")
        async for page in pages:
            found += [
                UnfinishedUpload(
                    item["Key"].removeprefix(self.config.prefix),
                    item["UploadId"],
                    nanoseconds(item["Initiated"]),
                )
                for item in page.get("Uploads", [])
            ]
        return sorted(found, key=lambda upload: (upload.key, upload.begun_ns))

    async def abort_unfinished(self, upload: UnfinishedUpload) -> None:
        """Free what an upload has stored. Whoever is still at it fails."""
        await abort_upload(self._bucket, upload.key, upload.upload_id)

    async def in_the_way(self) -> str | None:
        """See `Placed.in_the_way`."""
        return await surroundings.in_the_way(self._bucket)

    async def enclosing_store(self) -> str | None:
        """See `Placed.enclosing_store`."""
        return await surroundings.enclosing_store(self._bucket)

    async def unfinished_since_ns(self) -> list[int]:
        """See `Sweepable.unfinished_since_ns`: uploads, and objects of probes."""
        uploads, objects = await self._unfinished()
        return [upload.begun_ns for upload in uploads] + [facts.written_ns for facts in objects]

    async def remove_unfinished(self, before_ns: int) -> int:
        """See `Sweepable.remove_unfinished`."""
        uploads, objects = await self._unfinished()
        old_uploads = [upload for upload in uploads if upload.begun_ns < before_ns]
        for upload in old_uploads:
            await self.abort_unfinished(upload)
        old_objects = [facts for facts in objects if facts.written_ns < before_ns]
        for facts in old_objects:
            await self.delete(facts.key)
        return len(old_uploads) + len(old_objects)

    async def _unfinished(self) -> tuple[list[UnfinishedUpload], list[ObjectFacts]]:
        """What writers left. An upload that seems to be older than the store is none of them.

        There are servers that say the same of the time of all uploads.
        """
        uploads = [one for one in await self.list_unfinished() if is_in_parts(one.key)]
        if uploads:
            record = await self.facts(layout.STORE_KEY)
            since_ns = record.written_ns if record else time.time_ns()
            uploads = [one for one in uploads if one.begun_ns >= since_ns]
        objects = await self.list_objects(layout.TMP)
        return uploads, [facts for facts in objects if is_temporary(facts.key)]
