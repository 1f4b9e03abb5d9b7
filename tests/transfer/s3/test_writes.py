"""Writing to a bucket where answers get lost, conditions are ignored and uploads break off."""

from __future__ import annotations

import asyncio
import secrets
import signal
from typing import Any

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import Conflict, ImageError, Internal, InvalidInput, StoreUnavailable
from imgfmt.reference import ReferenceRecord, TargetKind
from imgfmt.store_record import StoreRecord
from tests.transfer.killing import After, killed
from tests.transfer.s3.servers import Server
from tests.transfer.s3.support import PACK, QUICK, error_of, run, serving, store_at
from transfer.buffers import page_aligned
from transfer.catalog import init_store, open_catalog
from transfer.store.s3.config import MIB, S3Config
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Fault, FaultKind
from transfer.testing.little_s3 import refusal

KEY = "trees/" + "0" * 64
RECORD = StoreRecord(bytes(16), True)
LARGE = bytes(i % 253 for i in range(253 * 1024)) * (21 * MIB // (253 * 1024))
LOST = [FaultKind.LOST_ANSWER, FaultKind.NO_ANSWER]


def record(number: int) -> ReferenceRecord:
    """A first state of a reference."""
    digest = Digest(number.to_bytes(32, "big"))
    return ReferenceRecord("a/b", "t", TargetKind.IMAGE, digest, secrets.token_bytes(16), 0, "me")


def fresh_store(server: FaultServer, **given: Any) -> S3Store:
    return store_at(server.endpoint, **given)


@pytest.mark.parametrize("kind", LOST)
def test_a_creation_whose_answer_is_lost_is_ours(kind: FaultKind) -> None:
    with serving(Fault(kind, method="PUT")) as server:
        assert run(fresh_store(server, patience=QUICK).create(KEY, [b"ours"]))
        assert server.objects.objects[KEY].body == b"ours"
        assert len([seen for seen in server.seen if seen.request.method == "PUT"]) >= 2


def test_a_creation_that_fails_while_someone_else_creates_is_not_ours() -> None:
    with serving(Fault(FaultKind.SERVER_ERROR, method="PUT")) as server:
        server.objects.put(KEY, b"theirs")
        assert not run(fresh_store(server).create(KEY, [b"ours"]))
        assert server.objects.objects[KEY].body == b"theirs"


@pytest.mark.parametrize("kind", LOST)
def test_a_change_whose_answer_is_lost_is_no_conflict(kind: FaultKind) -> None:
    with serving(Fault(kind, method="PUT", skip=1), Fault(kind, method="PUT")) as server:

        async def work() -> None:
            store, first = fresh_store(server, patience=QUICK), record(1)
            await store.change_reference(first, None)
            seen = await store.read_reference("a/b", "t")
            assert seen is not None
            second = first.replaced_by(TargetKind.NONE, None, secrets.token_bytes(16), 1, "me")
            await store.change_reference(second, seen)
            with pytest.raises(Conflict):
                await store.change_reference(record(3), seen)
            with pytest.raises(Conflict):
                await store.change_reference(record(3), None)

        run(work())


def test_a_change_of_a_reference_that_is_gone_is_a_conflict() -> None:
    with serving() as server:

        async def work() -> None:
            store, first = fresh_store(server), record(1)
            await store.change_reference(first, None)
            seen = await store.read_reference("a/b", "t")
            await store.delete("refs/a+b/t")
            with pytest.raises(Conflict, match="a/b:t"):
                await store.change_reference(record(2), seen)

        run(work())


def test_a_server_that_wants_a_retry_of_a_conditional_write_gets_it() -> None:
    answer = refusal("ConditionalRequestConflict", 409)
    with serving(Fault(FaultKind.OTHER, method="PUT", answer=answer, times=2)) as server:
        assert run(fresh_store(server).create(KEY, [b"x"]))


def test_init_refuses_a_server_that_ignores_conditions() -> None:
    with serving(conditions=False) as server:
        store = fresh_store(server)
        error = error_of(lambda: init_store(store, RECORD, allow_non_empty=True))
        assert isinstance(error, InvalidInput)
        assert "does not honour If-None-Match on writes, If-Match on writes" in str(error)
        assert list(server.objects.objects) == [PACK]


def test_init_refuses_a_server_that_does_not_know_conditions() -> None:
    answer = refusal("NotImplemented", 501)
    with serving(Fault(FaultKind.OTHER, method="PUT", answer=answer, times=2)) as server:
        error = error_of(lambda: init_store(fresh_store(server), RECORD, allow_non_empty=True))
        assert isinstance(error, InvalidInput)
        assert "does not honour If-None-Match on writes" in str(error)


def test_init_refuses_a_server_that_ignores_ranges() -> None:
    with serving(Fault(FaultKind.WHOLE_OBJECT, at=16, times=10**9)) as server:
        error = error_of(lambda: init_store(fresh_store(server), RECORD, allow_non_empty=True))
        assert isinstance(error, InvalidInput | StoreUnavailable)
        assert "range" in str(error)


@pytest.mark.s3
@pytest.mark.parametrize("name", ["seaweedfs", "moto"])
def test_init_finds_real_servers_fit(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    prefix = f"init-{secrets.token_hex(4)}/"

    async def work() -> None:
        store = S3Store(S3Config("bucket", prefix, endpoint=server.endpoint))
        assert (await store.abilities()).missing == []
        made = await init_store(store, StoreRecord(secrets.token_bytes(16), True))
        catalog = await open_catalog(store, write=True)
        assert catalog.record == made
        probed = await catalog.probe_record()
        assert probed is not None
        assert "server" in probed.found
        assert {k: v for k, v in probed.found.items() if k != "server"} == dict.fromkeys(
            ("if-none-match", "if-match", "ranges", "listing"), "honoured"
        )
        with pytest.raises(InvalidInput, match="already"):
            await init_store(store, made)
        assert [facts.key for facts in await store.list_objects("tmp/")] == []

    run(work())


async def write_pack(store: S3Store, key: str, raw: bytes, step: int) -> None:
    """Write a pack from many tasks, in no order."""
    view = page_aligned(len(raw))
    view[:] = raw
    sink = await store.open_pack(key)
    try:
        async with asyncio.TaskGroup() as group:
            for start in sorted(range(0, len(raw), step), key=lambda n: n * 7919 % 101):
                group.create_task(sink.write(start, [view[start : start + step]]))
        await sink.commit()
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        await sink.abort()


@pytest.mark.parametrize(
    "size_bytes", [4096, 5 * MIB, 5 * MIB + 4096, 10 * MIB, 20 * MIB // 4096 * 4096]
)
@pytest.mark.parametrize("step", [3 * MIB, 64 * 4096])
def test_a_pack_is_uploaded_in_equal_parts(size_bytes: int, step: int) -> None:
    raw = LARGE[:size_bytes]
    with serving() as server:
        run(write_pack(fresh_store(server, part_bytes=5 * MIB), PACK, raw, step))
        assert server.objects.objects[PACK].body == raw
        parts = [seen.request for seen in server.seen if "partNumber" in seen.request.target]
        lengths = sorted(len(part.body) for part in parts)
        if size_bytes < 5 * MIB:
            assert lengths == []
        else:
            assert set(lengths[1:]) <= {5 * MIB}
            assert sum(lengths) == size_bytes
        assert server.objects.uploads == {}


FAULTS = {
    "begin": Fault(FaultKind.BUSY, method="POST", key=PACK),
    "part": Fault(FaultKind.LOST_ANSWER, method="PUT", skip=1),
    "part refused": Fault(FaultKind.BUSY, method="PUT", skip=1, times=3),
    "completion refused": Fault(FaultKind.SERVER_ERROR, method="POST", skip=1),
    "completion fails after a 200": Fault(FaultKind.ERROR_IN_200, method="POST", skip=1),
    "completion done, answer lost": Fault(FaultKind.LOST_ANSWER, method="POST", skip=1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_upload_survives_a_fault(fault: Fault) -> None:
    fault.used = 0
    raw = LARGE[: 12 * MIB]
    with serving(fault) as server:
        server.objects.objects.clear()
        run(write_pack(fresh_store(server, part_bytes=5 * MIB), PACK, raw, MIB))
        assert server.objects.objects[PACK].body == raw
        assert fault.used > fault.skip


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_an_upload_that_fails_leaves_nothing(method: str) -> None:
    fault = Fault(FaultKind.DENIED, method=method, skip=1, times=10**9)
    with serving(fault) as server:
        server.objects.objects.clear()
        store = fresh_store(server, part_bytes=5 * MIB)
        error = error_of(lambda: write_pack(store, PACK, LARGE[: 12 * MIB], MIB))
        assert isinstance(error, ImageError)
        assert PACK in str(error)
        assert server.objects.objects == {}
        assert server.objects.uploads == {}


def test_a_pack_that_did_not_arrive_whole_is_told() -> None:
    with serving() as server:

        async def work() -> None:
            store = fresh_store(server)
            sink = await store.open_pack(PACK)
            await sink.write(0, [memoryview(bytes(8192))])
            server.script.append(Fault(FaultKind.OTHER, method="PUT", answer=ok))
            with pytest.raises(StoreUnavailable, match="20 bytes of 8192"):
                await sink.commit()

        ok = refusal("x", 200)
        ok.headers, ok.body = {"ETag": '"x"'}, b""
        server.objects.put(PACK, bytes(20))
        run(work())


def test_a_pack_with_a_gap_is_our_fault() -> None:
    with serving() as server:

        async def work() -> None:
            sink = await fresh_store(server).open_pack(PACK)
            await sink.write(4096, [memoryview(bytes(4096))])
            with pytest.raises(Internal, match="gaps"):
                await sink.commit()
            await sink.abort()

        run(work())


def test_unfinished_uploads_are_listed_and_can_be_aborted() -> None:
    with serving() as server:

        async def work() -> None:
            store = fresh_store(server, part_bytes=5 * MIB)
            key = layout.pack_key(bytes(15) + b"\1")
            sink = await store.open_pack(key)
            await sink.write(0, [memoryview(LARGE)[: 6 * MIB]])
            [left] = await store.list_unfinished()
            assert left.key == key
            await store.abort_unfinished(left)
            await store.abort_unfinished(left)
            assert await store.list_unfinished() == []
            await sink.abort()

        run(work())


@pytest.mark.s3
def test_a_large_object_is_written_and_read_in_parts(seaweedfs: Server) -> None:
    raw = secrets.token_bytes(40 * MIB + 5)

    async def work() -> None:
        store = S3Store(S3Config("bucket", "large/", endpoint=seaweedfs.endpoint))
        await store.put(KEY, [raw[:1000], raw[1000:]])
        assert bytes(await store.get(KEY)) == raw
        assert await store.list_unfinished() == []

    run(work())


async def stored(store: S3Store) -> list[tuple[str, int]]:
    """What objects there are, and their sizes."""
    listed = [await store.list_objects(prefix) for prefix in ("trees/", "refs/", "packs/")]
    return [(facts.key, facts.size_bytes) for found in listed for facts in found]


@pytest.mark.s3
@pytest.mark.parametrize("operation", ["put", "create", "change", "pack"])
def test_a_writer_that_dies_after_the_head_of_its_request_changes_nothing(
    seaweedfs: Server, operation: str
) -> None:
    prefix = f"head-{secrets.token_hex(4)}/"

    def opened() -> S3Store:
        return S3Store(S3Config("bucket", prefix, endpoint=seaweedfs.endpoint))

    async def work() -> None:
        store = opened()
        seen = await store.read_reference("a/b", "t")
        match operation:
            case "put":
                await store.put(KEY, [b"second" * 100])
            case "create":
                await store.create("trees/" + "1" * 64, [b"first"])
            case "pack":
                await write_pack(store, PACK, LARGE[:8192], 4096)
            case _:
                await store.change_reference(record(2), seen)

    async def prepare() -> list[tuple[str, int]]:
        store = opened()
        await store.put(KEY, [b"first"])
        await store.change_reference(record(1), None)
        return await stored(store)

    before = run(prepare())
    assert killed(lambda: run(work()), After.HEADS, 1) == -signal.SIGKILL

    async def look() -> None:
        store = opened()
        for _ in range(30):  # the server may need a moment to see that its client is gone
            assert await stored(store) == before
            await asyncio.sleep(0.01)
        seen = await store.read_reference("a/b", "t")
        assert seen is not None
        assert seen.record.target == record(1).target

    run(look())
