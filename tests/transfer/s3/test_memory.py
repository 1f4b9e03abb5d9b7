"""How much anonymous memory a pull and a push take at 64 connections, in a process of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.transfer.pushes import write_files
from tests.transfer.s3.support import store_at
from tests.transfer.s3.test_transfers import push_directory, run
from transfer.store.s3.config import MIB
from transfer.testing.fault_server import FaultServer
from transfer.testing.faults import Manners

pytestmark = pytest.mark.slow

CONNECTIONS = 64
BLOCK_BYTES = 2 * MIB
MAX_MEMORY_BYTES = (CONNECTIONS + 1) * BLOCK_BYTES
ALLOWED_BYTES = 150 * 1000**2
"""Beyond buffers and trees: the interpreter, what it has loaded, and everything else."""

N_MIB = 448

PROGRAM = """
import asyncio, json, os, sys
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.pull import pull
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.s3.config import S3Config
from transfer.store.s3.store import S3Store

verb, endpoint, where, digest, connections, block_bytes, max_memory_bytes = sys.argv[1:]

async def work():
    store = S3Store(S3Config("bucket", endpoint=endpoint, connections=int(connections)))
    config = TransferConfig(
        block_bytes=int(block_bytes), max_memory_bytes=int(max_memory_bytes), fsync=False
    )
    catalog = await open_catalog(store, write=verb == "push")
    if verb == "pull":
        from imgfmt.digest import Digest
        await pull(catalog, Digest.parse(digest), where, config=config, facts={})
    else:
        await push(catalog, PushRequest([DirectorySource("main", where)]), config=config)

asyncio.run(work())
"""


def peak_anonymous_bytes(process: subprocess.Popen[bytes]) -> int:
    """The most resident anonymous memory that a process has until it ends; it must end well."""
    peak_bytes = 0
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = status.partition("RssAnon:")[2].split()
        peak_bytes = max(peak_bytes, int(found[0]) * 1024 if found else 0)
        time.sleep(0.005)
    assert process.returncode == 0
    return peak_bytes


def source_of(folder: Path, seed: int) -> Path:
    """A directory of data that no two chunks share."""
    chance = np.random.default_rng(seed)
    files = {f"pages-{n}.img": chance.bytes(N_MIB // 8 * MIB) for n in range(8)}
    return write_files(folder, files)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultServer]:
    """A server that takes its time, so that many requests are under way."""
    with pytest.MonkeyPatch.context() as environment, FaultServer() as running:
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield running


def peak_of(verb: str, server: FaultServer, where: Path, digest: str) -> int:
    """The peak of one transfer."""
    numbers = (CONNECTIONS, BLOCK_BYTES, MAX_MEMORY_BYTES)
    arguments = [verb, server.endpoint, str(where), digest, *map(str, numbers)]
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    server.manners = Manners(latency_s=0.2)
    server.most_in_flight = 0
    return peak_anonymous_bytes(subprocess.Popen(command))


def test_pull_and_push_keep_within_their_memory(server: FaultServer, tmp_path: Path) -> None:
    source = source_of(tmp_path / "a", 1)
    digest = run(push_directory(store_at(server.endpoint), source, pack_bytes=64 * MIB))
    tree_bytes = sum(len(o.body) for key, o in server.objects.objects.items() if "trees/" in key)
    limit_bytes = MAX_MEMORY_BYTES + tree_bytes + ALLOWED_BYTES
    pull_bytes = peak_of("pull", server, tmp_path / "out", str(digest))
    assert server.most_in_flight > CONNECTIONS // 3  # or this would tell nothing
    assert MAX_MEMORY_BYTES // 2 < pull_bytes < limit_bytes
    assert peak_of("push", server, source_of(tmp_path / "b", 2), "") < limit_bytes
