"""Tries out what a store must offer (SPEC.md section 9), for `snapcask init` and `doctor`.

Many servers speak S3 and not all of them honour conditions: some ignore them, and then two writers
overwrite each other without a word.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from imgfmt import layout
from imgfmt.errors import CorruptData, InvalidInput, StoreUnavailable
from transfer.store.s3.bucket import Bucket
from transfer.store.s3.errors import one_line
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.objects import Objects
from transfer.store.s3.ranges import Wanted
from transfer.store.s3.reader import read_range, read_whole
from transfer.store.s3.sending import Body
from transfer.store.s3.session import Wire

_N_RACERS = 8
_MOST_OF_A_NAME = 100


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server was seen to do right."""

    if_none_match: bool
    if_match: bool
    ranges: bool
    listing: bool
    server: str = ""

    def found(self) -> dict[str, str]:
        """The same by short names, for the record; `server` is what it calls itself."""
        tried = {
            "if-none-match": self.if_none_match,
            "if-match": self.if_match,
            "ranges": self.ranges,
            "listing": self.listing,
        }
        found = {name: "honoured" if holds else "ignored" for name, holds in tried.items()}
        return found | ({"server": self.server} if self.server else {})

    @property
    def missing(self) -> list[str]:
        """What it did not, in words."""
        named = {
            "If-None-Match on writes": self.if_none_match,
            "If-Match on writes": self.if_match,
            "ranged reads": self.ranges,
            "listings of what was just written": self.listing,
        }
        return [name for name, holds in named.items() if not holds]


async def probe_bucket(bucket: Bucket, objects: Objects) -> Abilities:
    """Try everything on a few small objects under `tmp/`, and remove them."""
    stem = f"{layout.TMP}probe-{secrets.token_hex(8)}"
    keys = [f"{stem}-{name}" for name in ("create", "race", "change")]
    try:
        return Abilities(
            if_none_match=await _creates(bucket, objects, keys[0], keys[1]),
            if_match=await _changes(bucket, keys[2]),
            ranges=await _reads_ranges(bucket, keys[2]),
            listing=any(facts.key == keys[2] for facts in await objects.list(layout.TMP)),
            server=await _server(bucket, keys[2]),
        )
    finally:
        for key in keys:
            await objects.delete(key)


def check(abilities: Abilities, url: str) -> None:
    """Raise InvalidInput unless the server does all that concurrent writers rely on."""
    if abilities.missing:
        raise InvalidInput(
            f"the server of store {url} does not honour {', '.join(abilities.missing)}, so writers"
            " at the same time could overwrite each other; use a newer version, another server, or"
            " a directory"
        )


async def _creates(bucket: Bucket, objects: Objects, key: str, raced: str) -> bool:
    """Whether a key is created once, one after the other and at the same time."""
    if [await _put(bucket, key, IfNoneMatch="*") for _ in range(2)] != [True, False]:
        return False
    async with asyncio.TaskGroup() as group:
        racers = [group.create_task(_put(bucket, raced, IfNoneMatch="*")) for _ in range(_N_RACERS)]
    return [racer.result() for racer in racers].count(True) == 1


async def _changes(bucket: Bucket, key: str) -> bool:
    """Whether an object is changed only as long as it is what was seen."""
    await _put(bucket, key)
    _, found = await read_whole(bucket.session, bucket.full(key), bucket.named(key))
    if found is None or not found.etag:
        return False
    return [await _put(bucket, key, IfMatch=found.etag) for _ in range(2)] == [True, False]


async def _put(bucket: Bucket, key: str, **condition: Any) -> bool | None:
    """Write something new; False if the condition did not hold, None if it is not understood."""
    raw = secrets.token_bytes(64)

    async def attempt(wire: Wire) -> bool | None:
        try:
            await bucket.send(wire, "put_object", Key=bucket.full(key), Body=Body(raw), **condition)
            return True
        except Exception as error:
            failed = failure_of(error, bucket.named(key), wire.client.place)
            if failed.status in (409, 412):
                return False
            if condition and failed.status == 501:
                return None
            raise failed from error

    return await bucket.session.run(bucket.named(key), attempt)


async def _server(bucket: Bucket, key: str) -> str:
    """What the server calls itself, on one short line; many do not."""
    answer = await bucket.call(bucket.named(key), "head_object", Key=bucket.full(key))
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return one_line(str(headers.get("server", "")))[:_MOST_OF_A_NAME]


async def _reads_ranges(bucket: Bucket, key: str) -> bool:
    raw, _ = await read_whole(bucket.session, bucket.full(key), bucket.named(key))
    middle = memoryview(bytearray(10))
    wanted = Wanted(bucket.full(key), bucket.named(key), 7, 17)
    try:
        await read_range(bucket.session, wanted, middle)
    except (CorruptData, StoreUnavailable):
        return False
    return bool(middle == raw[7:17])
