"""Every fault at the first, a middle and the last range: right bytes or an error that names it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from imgfmt.errors import AccessDenied, CorruptData, ImageError, StoreUnavailable
from tests.transfer.s3.support import (
    BODY,
    N_RANGES,
    PACK,
    QUICK,
    RANGE_BYTES,
    TRANSPORTS,
    read_all,
    run,
    serving,
    store_at,
    until,
    wrong_ranges,
)
from transfer.store.s3.config import Transport
from transfer.store.s3.policy import RetryConfig
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Fault, FaultKind, Manners

pytestmark = pytest.mark.parametrize("transport", TRANSPORTS)

PLACES = {
    "first": RANGE_BYTES // 2,
    "middle": (N_RANGES // 2) * RANGE_BYTES + RANGE_BYTES // 2,
    "last": len(BODY) - 1,
}
FOREVER = 10**9
SILENT = (FaultKind.STALL, FaultKind.NO_ANSWER, FaultKind.DRIP)


def store_for(kind: FaultKind, server: FaultServer, transport: Transport) -> S3Store:
    """A store that loses patience quickly where that is what a test waits for."""
    retry = RetryConfig(attempts=3, base_s=0.001)
    given: dict[str, Any] = {"patience": QUICK, "retry": retry} if kind in SILENT else {}
    return store_at(server.endpoint, transport, **given)


CURED = [
    FaultKind.SHORT_BODY, FaultKind.WHOLE_OBJECT, FaultKind.WRONG_RANGE, FaultKind.STALL,
    FaultKind.NO_ANSWER, FaultKind.RESET, FaultKind.BUSY, FaultKind.GZIP, FaultKind.HALF_CLOSE,
    FaultKind.TWICE, FaultKind.LOST_ANSWER, FaultKind.SERVER_ERROR,
]  # fmt: skip
FATAL: dict[FaultKind, type[ImageError]] = {
    FaultKind.SHORT_BODY: StoreUnavailable,
    FaultKind.WHOLE_OBJECT: StoreUnavailable,
    FaultKind.WRONG_RANGE: StoreUnavailable,
    FaultKind.STALL: StoreUnavailable,
    FaultKind.NO_ANSWER: StoreUnavailable,
    FaultKind.RESET: StoreUnavailable,
    FaultKind.DRIP: StoreUnavailable,
    FaultKind.BUSY: StoreUnavailable,
    FaultKind.PRECONDITION: CorruptData,
    FaultKind.EXPIRED: AccessDenied,
    FaultKind.DENIED: AccessDenied,
    FaultKind.GZIP: StoreUnavailable,
    FaultKind.LOST_ANSWER: StoreUnavailable,
    FaultKind.SERVER_ERROR: StoreUnavailable,
}


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", CURED)
def test_a_fault_that_passes_is_cured(transport: Transport, kind: FaultKind, at: int) -> None:
    with serving(Fault(kind, at=at, after_bytes=300_000)) as server:

        async def work() -> None:
            assert wrong_ranges(await read_all(store_for(kind, server, transport))) == {}

        run(work())
        assert server.script[0].used > 0


@pytest.mark.parametrize("at", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(("kind", "error"), FATAL.items(), ids=FATAL)
def test_a_fault_that_stays_is_an_error_that_names_the_object(
    transport: Transport, kind: FaultKind, error: type[ImageError], at: int
) -> None:
    with serving(Fault(kind, at=at, times=FOREVER, after_bytes=1000)) as server:

        async def work() -> None:
            failed = wrong_ranges(await read_all(store_for(kind, server, transport)))
            if kind is FaultKind.EXPIRED or kind is FaultKind.DENIED:
                assert at // RANGE_BYTES * RANGE_BYTES in failed
            else:
                assert list(failed) == [at // RANGE_BYTES * RANGE_BYTES]
            for found in failed.values():
                assert type(found) is error
                assert PACK in str(found)
                assert "\n" not in str(found)

        begun_s = time.monotonic()
        run(work())
        assert time.monotonic() - begun_s < 15


def test_a_body_that_broke_off_is_resumed_at_its_last_byte(transport: Transport) -> None:
    faults = [
        Fault(FaultKind.SHORT_BODY, after_bytes=300_000),
        Fault(FaultKind.RESET, after_bytes=200_000),
        Fault(FaultKind.STALL, after_bytes=100_000),
    ]
    with serving(*faults) as server:

        async def work() -> None:
            buffer = bytearray(RANGE_BYTES)
            store = store_at(server.endpoint, transport, patience=QUICK)
            await store.read_into(PACK, 0, memoryview(buffer))
            assert buffer == BODY[:RANGE_BYTES]

        run(work())
        asked = [seen.request for seen in server.seen]
    starts = [request.span[0] for request in asked if request.span]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-1] > 0
    assert ["if-match" in request.headers for request in asked] == [False, True, True, True]


def test_no_byte_beyond_what_was_asked_for_is_written(transport: Transport) -> None:
    with serving(Fault(FaultKind.TWICE_BODY), Fault(FaultKind.TWICE)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            for offset in (0, 4096, RANGE_BYTES):
                memory = bytearray(b"." * (RANGE_BYTES + 2))
                await store.read_into(PACK, offset, memoryview(memory)[1:-1])
                assert memory == b"." + BODY[offset : offset + RANGE_BYTES] + b"."

        run(work())


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.DRIP])
def test_a_cancelled_read_never_writes_again(transport: Transport, kind: FaultKind) -> None:
    with serving(Fault(kind, after_bytes=500_000, times=FOREVER)) as server:

        async def work() -> None:
            memory = bytearray(RANGE_BYTES)
            store = store_at(server.endpoint, transport)
            task = asyncio.ensure_future(store.read_into(PACK, 0, memoryview(memory)))
            await until(lambda: memory[499_000:499_999] == BODY[499_000:499_999])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            memory[:] = b"?" * len(memory)
            await asyncio.sleep(0.05)
            assert memory == b"?" * len(memory)

        run(work())


def test_a_slow_body_that_makes_progress_has_all_the_time_it_needs(transport: Transport) -> None:
    manners = Manners(speed=lambda number: 1_000_000.0)  # three stall windows for one range
    with serving(manners=manners) as server:

        async def work() -> None:
            memory = bytearray(RANGE_BYTES)
            store = store_at(server.endpoint, transport, patience=QUICK)
            await store.read_into(PACK, 0, memoryview(memory))
            assert memory == BODY[:RANGE_BYTES]

        run(work())
        assert len(server.seen) == 1


def test_an_object_that_is_overwritten_meanwhile_is_told(transport: Transport) -> None:
    with serving(Fault(FaultKind.SHORT_BODY, after_bytes=100_000)) as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            memory = memoryview(bytearray(RANGE_BYTES))
            await store.read_into(PACK, RANGE_BYTES, memoryview(bytearray(10)))
            server.objects.put(PACK, BODY[::-1])
            with pytest.raises(CorruptData, match=f"{PACK} .*was overwritten"):
                await store.read_into(PACK, 0, memory)
            await store.read_into(PACK, 0, memory)  # whoever starts anew gets what is there
            assert memory == BODY[::-1][:RANGE_BYTES]

        run(work())


def test_a_whole_object_is_never_mixed_of_two_versions(transport: Transport) -> None:
    with serving() as server:

        async def work() -> None:
            store = store_at(server.endpoint, transport)
            server.objects.put(PACK, BODY)
            reading = asyncio.ensure_future(store.get(PACK))
            await until(lambda: bool(server.seen))
            server.objects.put(PACK, BODY[::-1])
            [found] = await asyncio.gather(reading, return_exceptions=True)
            if isinstance(found, BaseException):
                assert isinstance(found, CorruptData)
                assert PACK in str(found)
            else:
                assert bytes(found) in (BODY, BODY[::-1])

        run(work())
