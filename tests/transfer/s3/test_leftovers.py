"""What killed pushes left in a bucket: only what is ours is ever removed."""

from __future__ import annotations

import time

import pytest

from tests.transfer.s3.servers import BUCKET, Server
from tests.transfer.s3.support import PACK, run, store_at

HOUR_NS = 3600 * 10**9


@pytest.mark.s3
@pytest.mark.parametrize("server_name", ["seaweedfs", "moto"])
def test_only_old_uploads_and_objects_of_writers_are_removed(
    server_name: str, request: pytest.FixtureRequest
) -> None:
    """moto says of all uploads that they began in 2010: none can be told to be old."""
    server: Server = request.getfixturevalue(server_name)
    client = server.client()
    client.put_object(Bucket=BUCKET, Key="left/store.msgpack", Body=b"of a store")
    keys = [f"left/{PACK}", f"left/other/{PACK}", "left/notes", f"beside/{PACK}"]
    for key in keys:
        client.create_multipart_upload(Bucket=BUCKET, Key=key)
    objects = ["left/tmp/probe-00ff-race", "left/tmp/mine.txt"]
    for key in objects:
        client.put_object(Bucket=BUCKET, Key=key, Body=b"left")

    async def sweep(before_ns: int) -> int:
        store = store_at(server.endpoint, prefix="left/")
        return await store.remove_unfinished(before_ns)

    def left() -> set[str]:
        uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        found = client.list_objects_v2(Bucket=BUCKET, Prefix="left/").get("Contents", [])
        return {one["Key"] for one in (*uploads, *found)} & {*keys, *objects}

    assert run(sweep(time.time_ns() - HOUR_NS)) == 0
    assert left() == {*keys, *objects}
    removed = {objects[0]} if server.kind == "moto" else {keys[0], objects[0]}
    assert run(sweep(time.time_ns() + HOUR_NS)) == len(removed)
    assert left() == {*keys, *objects} - removed
