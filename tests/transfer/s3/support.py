"""What tests of the S3 store share: stores with little patience, and an object to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from imgfmt import layout
from transfer.store.s3.config import MIB, S3Config, Transport
from transfer.store.s3.policy import Patience, RetryConfig
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Fault, Manners
from transfer.testing.little_s3 import LittleS3

BUCKET = "bucket"
PACK = layout.pack_key(bytes(16))
RANGE_BYTES = MIB
N_RANGES = 5
BODY = bytes(i * i % 251 for i in range(65_536)) * (N_RANGES * RANGE_BYTES // 65_536)
TRANSPORTS = (Transport.ZERO_COPY, Transport.PORTABLE)

QUICK = Patience(connect_s=0.7, first_byte_s=0.3, stall_window_s=0.3)
HASTY = RetryConfig(base_s=0.001, cap_s=0.01, throttle_patience_s=0.5)

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end; 30 s are a hang."""

    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(bounded())


def store_at(endpoint: str, transport: Transport = Transport.ZERO_COPY, **given: Any) -> S3Store:
    """A store in `BUCKET` that repeats at once what failed."""
    chosen: dict[str, Any] = {"retry": HASTY} | given
    return S3Store(S3Config(BUCKET, endpoint=endpoint, transport=transport, **chosen))


def serving(
    *script: Fault, manners: Manners | None = None, conditions: bool = True, **given: Any
) -> FaultServer:
    """A fault server that has one pack, `BODY`."""
    objects = LittleS3(BUCKET, conditions=conditions)
    objects.put(PACK, BODY)
    return FaultServer(objects, script, manners=manners, **given)


async def read_all(
    store: S3Store, *, n_workers: int = 2, n_bytes: int = RANGE_BYTES
) -> dict[int, bytes | Exception]:
    """Read the pack range by range; what each range brought, by its offset."""
    found: dict[int, bytes | Exception] = {}
    offsets = iter(range(0, len(BODY), n_bytes))

    async def worker() -> None:
        for offset in offsets:
            buffer = bytearray(b"\xee" * min(n_bytes, len(BODY) - offset))
            try:
                await store.read_into(PACK, offset, memoryview(buffer))
            except Exception as error:
                found[offset] = error
            else:
                found[offset] = bytes(buffer)

    await asyncio.gather(*(worker() for _ in range(n_workers)))
    return found


def wrong_ranges(found: dict[int, bytes | Exception]) -> dict[int, Exception]:
    """The ranges that failed. Fails if one brought other bytes than it should."""
    for offset, raw in found.items():
        if isinstance(raw, bytes):
            assert raw == BODY[offset : offset + len(raw)]
    return {offset: raw for offset, raw in found.items() if isinstance(raw, Exception)}


def error_of(work: Callable[[], Coroutine[Any, Any, object]]) -> Exception:
    """What a coroutine raises; fails if it does not."""

    async def caught() -> Exception:
        try:
            await work()
        except Exception as error:
            return error
        raise AssertionError("nothing was raised")

    return run(caught())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or task brings about; fails after 5 s."""
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("what was waited for did not come")
