"""Whole pushes and pulls over S3, with faults in the middle of them."""

from __future__ import annotations

import asyncio
import filecmp
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, NotFound
from imgfmt.store_record import NewChunks, StoreRecord
from tests.transfer.s3.servers import Server
from tests.transfer.s3.support import QUICK, TRANSPORTS, store_at
from transfer import naming
from transfer.buffers import BufferPool
from transfer.catalog import Catalog, init_store, open_catalog
from transfer.collect import CollectReport, collect
from transfer.config import TransferConfig
from transfer.hedge import Hedger
from transfer.pull import pull
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.s3.config import MIB, S3Config, Transport
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Fault, FaultKind, Manners
from transfer.testing.little_s3 import LittleS3

CONFIG = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=8 * MIB, n_threads=2, fsync=False)
KINDS = [kind for kind in FaultKind if kind not in (FaultKind.OTHER, FaultKind.ERROR_IN_200)]
SILENT = (FaultKind.STALL, FaultKind.NO_ANSWER, FaultKind.DRIP)
FOREVER = 10**9

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], limit_s: float = 60) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    return asyncio.run(bounded())


async def push_directory(store: S3Store, source: Path, *, pack_bytes: int = 4 * MIB) -> Digest:
    """Set the store up, and push a directory."""
    record = StoreRecord(secrets.token_bytes(16), True, pack_bytes=pack_bytes, codec=NewChunks.RAW)
    await init_store(store, record)
    catalog = await open_catalog(store, write=True)
    request = PushRequest([DirectorySource("main", str(source))], reference=("image", "v1"))
    return (await push(catalog, request, config=CONFIG)).digest


async def pull_image(store: S3Store, digest: Digest, target: Path) -> None:
    await pull(await open_catalog(store), digest, str(target), config=CONFIG, facts={})


def same(left: Path, right: Path) -> bool:
    names = sorted(path.name for path in left.iterdir())
    match, _, _ = filecmp.cmpfiles(left, right, names, shallow=False)
    return match == names == sorted(path.name for path in right.iterdir())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a large file that no codec shrinks, and small ones."""
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(7)
    (folder / "pages.img").write_bytes(rng.bytes(11 * MIB + 5))
    for number in range(3):
        (folder / f"core-{number}.img").write_bytes(rng.bytes(3000))
    return folder


@pytest.fixture(scope="module")
def pushed(source: Path) -> tuple[LittleS3, Digest]:
    """The objects of a store that `source` was pushed to."""
    with pytest.MonkeyPatch.context() as env, FaultServer() as server:
        env.setenv("AWS_ACCESS_KEY_ID", "key")
        env.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        digest = run(push_directory(store_at(server.endpoint), source))
        return server.objects, digest


def pack_reads(objects: LittleS3, digest: Digest, folder: Path) -> list[tuple[str, int]]:
    """The ranges of packs that a pull reads: key and first byte, in order."""
    with FaultServer(objects) as server:
        run(pull_image(store_at(server.endpoint), digest, folder / "plain"))
        spans = [
            (s.request.path, s.request.span) for s in server.seen if "/packs/" in s.request.path
        ]
        return [(path, span[0]) for path, span in spans if span is not None]


@pytest.mark.parametrize("which", [0, 0.5, 1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("times", [1, FOREVER], ids=["once", "always"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pull_ends_right_or_tells_the_object(
    pushed: tuple[LittleS3, Digest], source: Path, tmp_path: Path, kind: FaultKind, times: int,
    which: float,
) -> None:  # fmt: skip
    objects, digest = pushed
    reads = pack_reads(objects, digest, tmp_path)
    key, at = reads[round(which * (len(reads) - 1))]
    fault = Fault(kind, times=times, key=key, at=at, after_bytes=1000)
    target = tmp_path / "target"
    with FaultServer(objects, [fault]) as server:
        begun_s = time.monotonic()
        try:
            given: dict[str, Any] = {"patience": QUICK} if kind in SILENT else {}
            run(pull_image(store_at(server.endpoint, **given), digest, target))
        except ImageError as error:
            assert key.rpartition("/")[2] in str(error)  # noqa: PT017
            assert not target.exists()
        else:
            assert same(source, target)
        assert fault.used > 0
        assert time.monotonic() - begun_s < 20
        if times == 1 and kind not in (FaultKind.PRECONDITION, FaultKind.EXPIRED, FaultKind.DENIED,
                                       FaultKind.WRONG_BYTES):  # fmt: skip
            assert target.exists()


@pytest.mark.s3
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_push_and_pull_over_a_real_server(
    seaweedfs: Server, transport: Transport, source: Path, tmp_path: Path
) -> None:
    prefix = f"transfers-{secrets.token_hex(4)}/"

    async def work() -> None:
        store = S3Store(
            S3Config("bucket", prefix, endpoint=seaweedfs.endpoint, transport=transport)
        )
        digest = await push_directory(store, source, pack_bytes=12 * MIB)
        await pull_image(store, digest, tmp_path / "target")
        assert await store.list_unfinished() == []
        store.close()

    run(work())
    assert same(source, tmp_path / "target")


SMALL = 256 * 1024
N_SMALL = 320


async def read_hedged(store: S3Store, key: str, body: bytes) -> float:
    """Read an object with 16 workers as an executor does; returns the seconds."""
    pool = BufferPool(18, SMALL, poison=True)
    offsets = iter(range(0, len(body), SMALL))
    begun_s = time.monotonic()
    async with Hedger(store, pool, len(body) // SMALL) as hedger:

        async def worker() -> None:
            for offset in offsets:
                lease = await pool.acquire()
                lease = await hedger.read(key, offset, SMALL, lease)
                with lease:
                    assert lease.view == body[offset : offset + SMALL]

        async with asyncio.TaskGroup() as group:
            for _ in range(16):
                group.create_task(worker())
    return time.monotonic() - begun_s


@pytest.mark.slow
def test_one_slow_connection_of_sixteen_costs_little() -> None:
    body = np.random.default_rng(1).bytes(N_SMALL * SMALL)
    took_s = {}
    for slow in (False, True):
        objects = LittleS3()
        objects.put("packs/x", body)
        manners = Manners(speed=lambda n: 20_000 if slow and n == 5 else 2_000_000)  # noqa: B023
        with FaultServer(objects, manners=manners) as server:
            config = S3Config("bucket", endpoint=server.endpoint, connections=64)
            took_s[slow] = run(read_hedged(S3Store(config), "packs/x", body))
    assert took_s[True] < 1.5 * took_s[False]


def test_a_hedged_read_of_a_throttled_server_finishes_and_settles() -> None:
    body = np.random.default_rng(1).bytes(100 * SMALL)
    objects = LittleS3()
    objects.put("packs/x", body)
    manners = Manners(most_in_flight=8, latency_s=0.05)
    with FaultServer(objects, manners=manners) as server:

        async def work() -> None:
            store = store_at(server.endpoint)
            await read_hedged(store, "packs/x", body)
            assert store.limit.limit <= 8

        run(work())
        late = [seen.status for seen in server.seen][-50:]
        assert late.count(503) <= 2


async def collect_some(catalog: Catalog) -> CollectReport:
    """Collect until there is garbage: the server's clock shows seconds, and now is not yet past."""
    while True:
        report = await collect(catalog, 0)
        if report.objects:
            return report


@pytest.mark.s3
def test_garbage_is_collected_from_a_real_server(seaweedfs: Server, source: Path) -> None:
    """An image without a reference goes, with its packs; the other one stays whole."""
    prefix = f"garbage-{secrets.token_hex(4)}/"

    async def work() -> None:
        store = S3Store(S3Config("bucket", prefix, endpoint=seaweedfs.endpoint))
        record = StoreRecord(secrets.token_bytes(16), True, pack_bytes=4 * MIB, lease_ttl_s=2)
        await init_store(store, record)
        catalog = await open_catalog(store, write=True)
        (source / "empty").mkdir(exist_ok=True)
        sources = [DirectorySource("main", str(source))]
        kept = await push(catalog, PushRequest(sources, reference=("image", "v1")), config=CONFIG)
        n_packs = len(await store.list_objects(layout.PACKS))
        other = [DirectorySource("main", str(source / "empty"))]
        await push(catalog, PushRequest(other, reference=None), config=CONFIG)
        assert (await collect_some(catalog)).objects == 3
        await naming.remove(catalog, "image", "v1")
        assert (await collect(catalog)).packs == 0  # its history needs it
        report = await collect_some(catalog)
        assert (report.packs, report.objects) == (n_packs, 3)
        assert report.needed_bytes == 0
        for folder in (layout.PACKS, layout.IMAGES, layout.DOOMED, layout.LEASES, layout.INDEX):
            assert await store.list_objects(folder) == []
        with pytest.raises(NotFound):
            await catalog.image(kept.digest)
        store.close()

    run(work())
