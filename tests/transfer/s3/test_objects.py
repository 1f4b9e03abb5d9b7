"""Listings of many objects, and objects of odd sizes and names."""

from __future__ import annotations

import pytest

from imgfmt.errors import OutOfResources, StoreUnavailable
from tests.transfer.s3.support import BODY, PACK, TRANSPORTS, run, serving, store_at
from transfer.store.s3.config import MIB, S3Config, Transport
from transfer.store.s3.store import S3Store
from transfer.testing.faults import Fault, FaultKind
from transfer.testing.little_s3 import Answer


def test_a_listing_has_as_many_pages_as_it_needs() -> None:
    keys = [f"index/{number:032x}" for number in range(2500)]
    with serving() as server:
        for key in keys:
            server.objects.put(key, b"x")
        found = run(store_at(server.endpoint).list_objects("index/"))
        assert [facts.key for facts in found] == keys
        assert len(server.seen) == 3


def test_a_listing_that_never_ends_is_an_error() -> None:
    body = b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>again"
    body += b"</NextContinuationToken></ListBucketResult>"
    with serving(Fault(FaultKind.OTHER, times=10**9, answer=Answer(200, {}, body))) as server:
        with pytest.raises(StoreUnavailable, match="no end"):
            run(store_at(server.endpoint).list_objects("index/"))
        assert len(server.seen) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size_bytes", [0, 1, MIB - 1, MIB, MIB + 1, 5 * MIB])
def test_objects_of_all_sizes_are_read_whole(transport: Transport, size_bytes: int) -> None:
    with serving() as server:
        server.objects.put("trees/x", BODY[:size_bytes])
        store = store_at(server.endpoint, transport, range_bytes=MIB)
        assert bytes(run(store.get("trees/x"))) == BODY[:size_bytes]


def test_an_object_that_claims_to_be_endless_costs_nothing() -> None:
    headers = {"Content-Range": f"bytes 0-{MIB - 1}/{10**18}", "ETag": '"x"'}
    answer = Answer(206, headers | {"Content-Length": str(MIB)}, bytes(MIB))
    with (
        serving(Fault(FaultKind.OTHER, answer=answer)) as server,
        pytest.raises(OutOfResources, match="too many"),
    ):
        run(store_at(server.endpoint).get(PACK))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_prefix_is_part_of_every_key_and_of_no_answer(transport: Transport) -> None:
    with serving() as server:

        async def work() -> None:
            config = S3Config("bucket", "a b+c/ä/", endpoint=server.endpoint, transport=transport)
            store = S3Store(config)
            await store.put("trees/x", [b"one"])
            assert await store.create("trees/y", [b"two"])
            assert bytes(await store.get("trees/x")) == b"one"
            assert [facts.key for facts in await store.list_objects("trees/")] == [
                "trees/x", "trees/y",
            ]  # fmt: skip
            assert (await store.facts("trees/y")) is not None
            await store.delete("trees/x")
            assert await store.facts("trees/x") is None

        run(work())
        assert set(server.objects.objects) == {PACK, "a b+c/ä/trees/y"}
