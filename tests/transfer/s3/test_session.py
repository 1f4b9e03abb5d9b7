"""Connections, credentials and limits of a store in use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from imgfmt.errors import AccessDenied, StoreUnavailable
from tests.transfer.s3.support import (
    BODY,
    HASTY,
    N_RANGES,
    PACK,
    RANGE_BYTES,
    TRANSPORTS,
    read_all,
    run,
    serving,
    store_at,
    until,
    wrong_ranges,
)
from transfer.store.s3.config import MIB, Transport
from transfer.store.s3.policy import RetryConfig
from transfer.testing.faults import Fault, FaultKind, Manners

both = pytest.mark.parametrize("transport", TRANSPORTS)


@both
def test_connections_are_used_again(transport: Transport) -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            for _ in range(3):
                assert wrong_ranges(await read_all(store, n_workers=2)) == {}

        run(work())
        assert len(server.seen) == 3 * N_RANGES
        assert server.n_connections <= 2


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    with serving(Fault(FaultKind.HALF_CLOSE, times=10**9)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, retry=RetryConfig(attempts=1))
            for _ in range(20):
                await store.read_into(PACK, 0, memoryview(bytearray(100)))

        run(work())


def test_a_connection_that_dies_under_a_request_is_replaced() -> None:
    with serving(Fault(FaultKind.LOST_ANSWER, skip=1)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, retry=RetryConfig(attempts=1))
            for _ in range(2):
                await store.read_into(PACK, 0, memoryview(bytearray(100)))

        run(work())
        assert [seen.connection for seen in server.seen] == [0, 0, 1]


def test_a_read_anew_has_a_connection_of_its_own() -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint)
            buffer = bytearray(RANGE_BYTES)
            await store.read_into(PACK, 0, memoryview(buffer))
            await store.read_into_anew(PACK, 0, memoryview(buffer))
            assert buffer == BODY[:RANGE_BYTES]

        run(work())
        assert [seen.connection for seen in server.seen] == [0, 1]


@both
def test_a_store_serves_one_loop_after_the_other(transport: Transport) -> None:
    with serving() as server:
        store = store_at(server.endpoint, transport)
        for _ in range(3):
            assert wrong_ranges(run(read_all(store))) == {}
        store.close()


@both
@pytest.mark.parametrize("explicitly", [True, False])
def test_closing_ends_all_connections(transport: Transport, explicitly: bool) -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            await store.get(PACK)
            await store.facts(PACK)
            assert server.n_open > 0
            if explicitly:
                await store.aclose()
            else:
                store.close()
            await until(lambda: server.n_open == 0)

        run(work())


@both
@pytest.mark.parametrize("operation", ["read", "facts", "put"])
def test_expired_credentials_are_fetched_anew_once(
    transport: Transport, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"read": "GET", "facts": "HEAD", "put": "PUT"}[operation]
    faults = [Fault(FaultKind.EXPIRED, method=method, key="0000")]
    if operation == "facts":
        faults.append(Fault(FaultKind.EXPIRED, key="0000"))  # the GET that asks for the reason
    with serving(*faults) as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old")

        async def operate(do: str) -> None:
            store = store_at(server.endpoint, transport)
            await store.list_objects("x/")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new")
            if do == "read":
                await store.read_into(PACK, 0, memoryview(bytearray(10)))
            elif do == "facts":
                assert await store.facts(PACK) is not None
            else:
                await store.put("trees/0000", [b"x"])

        run(operate(operation))
        used = ["=new/" in seen.request.headers["authorization"] for seen in server.seen]
        assert used[0] is False
        assert used[-1] is True


def test_many_requests_with_expired_credentials_renew_them_once() -> None:
    with (
        serving(Fault(FaultKind.EXPIRED, times=4, key="packs/")) as server,
        pytest.MonkeyPatch.context() as env,
    ):
        env.setenv("AWS_ACCESS_KEY_ID", "old")

        async def work() -> None:
            store = store_at(server.endpoint)
            await store.list_objects("x/")
            env.setenv("AWS_ACCESS_KEY_ID", "new")
            assert wrong_ranges(await read_all(store, n_workers=4)) == {}

        run(work())


def test_credentials_that_stay_expired_are_an_error() -> None:
    with serving(Fault(FaultKind.EXPIRED, times=10**9)) as server:

        async def work() -> None:
            with pytest.raises(AccessDenied, match="have expired"):
                await store_at(server.endpoint).read_into(PACK, 0, memoryview(bytearray(10)))

        run(work())
        assert len(server.seen) == 1


@both
def test_a_server_that_takes_few_requests_gets_no_more(transport: Transport) -> None:
    manners = Manners(most_in_flight=3, latency_s=0.01)
    with serving(manners=manners) as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            for _ in range(8):
                found = await read_all(store, n_workers=16, n_bytes=64 * 1024)
                assert wrong_ranges(found) == {}
            assert store.limit.limit <= 3
            refused = [seen.status for seen in server.seen].count(503)
            assert wrong_ranges(await read_all(store, n_workers=16, n_bytes=64 * 1024)) == {}
            assert [seen.status for seen in server.seen].count(503) <= refused + 1

        run(work())


def test_what_the_server_says_of_waiting_is_honoured() -> None:
    with serving(Fault(FaultKind.BUSY, retry_after_s=1)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, retry=RetryConfig(base_s=0.001, cap_s=5))
            begun_s = time.monotonic()
            await store.read_into(PACK, 0, memoryview(bytearray(10)))
            assert time.monotonic() - begun_s > 0.9

        run(work())


@both
def test_the_bandwidth_limit_is_kept(transport: Transport) -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport, bytes_per_s=8 * MIB)
            await store.list_objects("x/")
            begun_s = time.monotonic()
            assert wrong_ranges(await read_all(store, n_workers=4)) == {}
            took_s = time.monotonic() - begun_s
            assert took_s > 0.8 * len(BODY) / (8 * MIB)

        run(work())


def test_uploads_keep_the_bandwidth_limit_too() -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint, bytes_per_s=16 * MIB, part_bytes=5 * MIB)
            await store.list_objects("x/")
            begun_s = time.monotonic()
            sink = await store.open_pack(PACK)
            await sink.write(0, [memoryview(bytes(10 * MIB))])
            await sink.commit()
            assert time.monotonic() - begun_s > 0.4

        run(work())


def test_a_broken_server_uses_up_the_budget_and_ends_the_transfer() -> None:
    with serving(Fault(FaultKind.SERVER_ERROR, times=10**9)) as server:
        retry = RetryConfig(attempts=1000, budget=20, base_s=0.0, cap_s=0.0)

        async def work() -> None:
            found = await read_all(store_at(server.endpoint, retry=retry))
            assert all(isinstance(error, StoreUnavailable) for error in found.values())

        run(work())
        assert len(server.seen) <= N_RANGES + 20


@both
@pytest.mark.parametrize("way", ["read", "put"])
def test_a_cancelled_request_leaves_the_store_usable(transport: Transport, way: str) -> None:
    with serving(manners=Manners(latency_s=0.05)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport, retry=HASTY)
            await store.list_objects("x/")
            do: Callable[[], Coroutine[Any, Any, None]] = {
                "read": lambda: store.read_into(PACK, 0, memoryview(bytearray(RANGE_BYTES))),
                "put": lambda: store.put("trees/x", [BODY]),
            }[way]
            for _ in range(10):
                task = asyncio.ensure_future(do())
                await asyncio.sleep(0.002)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert store.limit.in_flight == 0
            assert wrong_ranges(await read_all(store)) == {}

        run(work())
