"""What lies where a new store is to be, in a bucket: see `transfer.store.base.Placed`."""

from __future__ import annotations

from typing import Any

from imgfmt import layout
from transfer.oserrors import printable
from transfer.store.s3.bucket import Bucket
from transfer.store.s3.exceptions import failure_of
from transfer.store.s3.session import Wire
from transfer.store.unfinished import is_temporary

_FOLDERS = frozenset(prefix.rstrip("/") for prefix in (*layout.FOLDERS, "signatures/"))


async def in_the_way(bucket: Bucket) -> str | None:
    """An object under the prefix, but for those of probes and what stands for a folder."""
    prefix = bucket.config.prefix
    async for page in bucket.pages("list_objects_v2", "", "ContinuationToken"):
        keys = [item["Key"].removeprefix(prefix) for item in page.get("Contents", [])]
        for key in keys:
            if not key.endswith("/") and key and not is_temporary(key):
                return printable(key)
    return None


async def enclosing_store(bucket: Bucket) -> str | None:
    """The store of a shorter prefix in one of whose folders this one would lie.

    Beside its folders other prefixes are in no store's way. What these credentials may not see is
    passed over.
    """
    parts = bucket.config.prefix.split("/")[:-1]
    for n, folder in enumerate(parts):
        above = "/".join(parts[:n])
        key = f"{above}/{layout.STORE_KEY}" if above else layout.STORE_KEY
        if folder in _FOLDERS and await _is_there(bucket, key):
            return f"s3://{bucket.config.bucket}/{above}".rstrip("/")
    return None


async def _is_there(bucket: Bucket, full_key: str) -> bool:
    what = f"s3://{bucket.config.bucket}/{full_key}"

    async def attempt(wire: Wire) -> dict[str, Any] | None:
        try:
            return await bucket.send(wire, "head_object", Key=full_key)
        except Exception as error:
            failed = failure_of(error, what, wire.client.place)
            if failed.status in (401, 403, 404):
                return None
            raise failed from error

    return await bucket.session.run(what, attempt) is not None
