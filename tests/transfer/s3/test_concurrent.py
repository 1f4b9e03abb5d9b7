"""Pushes of several processes to one store and one tag at once: one wins, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import secrets
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import ErrorKind, ImageError
from imgfmt.store_record import NewChunks, StoreRecord
from tests.transfer.killing import exit_code, start_forked
from tests.transfer.pushes import CONFIG, noise, push_request, request_of, target_of, write_files
from tests.transfer.s3.servers import Server
from tests.transfer.store_check import files_below, files_of
from transfer.catalog import init_store, open_catalog
from transfer.store.s3.config import MIB, S3Config
from transfer.store.s3.store import S3Store
from transfer.testing.interpose import InterposedStore
from transfer.verify import verify_all

N_WRITERS = 4

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end; 60 s are a hang."""

    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


def source_of(folder: Path, number: int) -> Path:
    """A directory that shares a part with all others, and a part with the next one."""
    return write_files(
        folder,
        {
            "shared": noise(2 * MIB, 1),
            "own": noise(2 * MIB, 100 + number),
            "next": noise(MIB, 200 + number % 2),
        },
    )


@pytest.mark.s3
@pytest.mark.parametrize("name", ["seaweedfs", "moto"])
def test_of_pushes_of_several_processes_to_one_tag_one_wins_and_the_others_are_told(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue(name)
    config = S3Config("bucket", f"many-{secrets.token_hex(6)}/", endpoint=server.endpoint)
    record = StoreRecord(secrets.token_bytes(16), True, pack_bytes=MIB, codec=NewChunks.RAW)
    run(init_store(S3Store(config), record))
    meeting = multiprocessing.get_context("fork").Barrier(N_WRITERS)
    sources = [source_of(tmp_path / f"s{number}", number) for number in range(N_WRITERS)]

    async def before(operation: str, key: str) -> None:
        if operation == "change_reference":  # all have read it before, and none has changed it
            meeting.wait(50)

    def push_one(number: int) -> None:
        try:
            store = InterposedStore(S3Store(config), before)
            said = {"digest": str(run(push_request(store, request_of(sources[number]))).digest)}
        except ImageError as error:
            said = {"kind": error.kind.value, "error": str(error)}
        (tmp_path / f"said-{number}").write_text(json.dumps(said))

    pids = [start_forked(partial(push_one, number)) for number in range(N_WRITERS)]
    assert [exit_code(pid) for pid in pids] == [0] * N_WRITERS
    said = [json.loads((tmp_path / f"said-{n}").read_text()) for n in range(N_WRITERS)]
    [winner] = [n for n in range(N_WRITERS) if "digest" in said[n]]
    run(check(S3Store(config), sources, said, winner))


async def check(
    store: S3Store, sources: list[Path], said: list[dict[str, str]], winner: int
) -> None:
    """The tag is the winner's; every image is there whole, and its pusher knows its digest."""
    catalog = await open_catalog(store)
    target = await target_of(store)
    assert str(target) == said[winner]["digest"]
    found = await verify_all(catalog, config=CONFIG)
    assert found.sound
    assert found.images == N_WRITERS
    for number, source in enumerate(sources):
        if number != winner:
            assert said[number]["kind"] == ErrorKind.CONFLICT
            assert "snap:v1" in said[number]["error"]
        text = said[number].get("digest") or said[number]["error"].split("snapcask tag ")[1]
        digest = Digest.parse(text.split()[0])
        assert await files_of(store, digest) == files_below(source)
        again = await push_request(store, request_of(source, tag=None))
        assert (again.digest, again.counts.new_bytes) == (digest, 0)
    assert await target_of(store) == target
    assert await store.list_objects("leases/") == []
    assert await store.list_unfinished() == []
