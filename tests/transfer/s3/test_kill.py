"""kill -9 anywhere in a push and a pull over S3: 100 seeded runs, and what comes after each."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.image import Image
from imgfmt.store_record import NewChunks
from tests.snapcask.support import contents
from tests.transfer.killing import After, Meter, count_files, killed, metered
from tests.transfer.pushes import RECORD, noise, push_request, request_of, target_of, write_files
from tests.transfer.s3.servers import Server
from transfer.catalog import Catalog, open_catalog
from transfer.config import TransferConfig
from transfer.pull import PullReport, pull
from transfer.pulling.names import MARKER
from transfer.pulling.pull_plan import PullPlan, plan_pull
from transfer.push import PushReport
from transfer.store.s3.config import MIB, S3Config
from transfer.store.s3.store import S3Store
from transfer.verify import verify, verify_all

pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(400)]

RUNS_PER_BATCH = 10
CONFIG = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=6 * MIB, n_threads=2, fsync=False)

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end. SeaweedFS may rest for a minute, which retries bridge."""

    async def bounded() -> T:
        async with asyncio.timeout(150):
            return await work

    return asyncio.run(bounded())


@dataclass(frozen=True)
class Place:
    """A store that each process opens for itself."""

    endpoint: str
    prefix: str

    def store(self) -> S3Store:
        """The store, with parts as small as a server takes."""
        return S3Store(S3Config("bucket", self.prefix, endpoint=self.endpoint, part_bytes=5 * MIB))


def new_place(server: Server, pack_bytes: int) -> Place:
    """A new store. That the server is fit for it is tried elsewhere."""
    place = Place(server.endpoint, f"kill-{secrets.token_hex(6)}/")
    record = replace(
        RECORD, uuid=secrets.token_bytes(16), pack_bytes=pack_bytes, codec=NewChunks.RAW
    )
    run(place.store().put(layout.STORE_KEY, [record.encode()]))
    return place


def push_to(place: Place, folder: Path) -> PushReport:
    """Push a directory as `snap:v1`."""
    return run(push_request(place.store(), request_of(folder), config=CONFIG))


@dataclass(frozen=True)
class Seen:
    """What a store holds: names of packs, and what the tag points to."""

    packs: frozenset[bytes]
    target: Digest | None


async def look(place: Place) -> Seen:
    """Read the listing and the reference, and check what that points to."""
    store = place.store()
    listed = [layout.pack_name_of(f.key) for f in await store.list_objects(layout.PACKS)]
    target = await target_of(store)
    if target is not None:
        assert (await verify(await open_catalog(store), [target], config=CONFIG)).sound
    return Seen(frozenset(name for name in listed if name), target)


async def chunks_of_packs(catalog: Catalog, packs: frozenset[bytes]) -> set[bytes]:
    """Digests of the chunks in whole packs."""
    tables = [await catalog.pack_table(name) for name in packs]
    return {digest.tobytes() for table in tables for digest in table.names}


async def chunk_sizes(catalog: Catalog, digest: Digest) -> dict[bytes, int]:
    """Plain bytes of the chunks of an image, by digest."""
    image = await catalog.image(digest)
    assert isinstance(image, Image)
    tree = await catalog.tree(image.members[0].tree)
    pairs = zip(tree.chunk_digest, tree.chunk_bytes, strict=True)
    return {name.tobytes(): int(n_bytes) for name, n_bytes in pairs}


def snapshot_of(folder: Path, seed: int, n_mib: int) -> Path:
    """A directory of which a part is the same for every seed."""
    files = {
        "pages.img": noise(MIB, 1) + bytes(MIB) + noise((n_mib - 1) * MIB, seed),
        **{f"core-{n}.img": noise(3000 + n, seed + n) for n in range(4)},
    }
    return write_files(folder, files)


PUSHES = [
    (After.SENT_BYTES, 2 * MIB, 10), (After.SENT_BYTES, 6 * MIB, 14), (After.REQUESTS, MIB, 4),
    (After.HEADS, MIB, 4), (After.ANSWERED, MIB, 4),
]  # fmt: skip


@pytest.mark.parametrize(("after", "pack_bytes", "n_mib"), PUSHES)
def test_a_push_that_is_killed_anywhere_is_finished_by_the_next(
    seaweedfs: Server, tmp_path: Path, after: After, pack_bytes: int, n_mib: int
) -> None:
    place = new_place(seaweedfs, pack_bytes)
    first = push_to(place, snapshot_of(tmp_path / "first", 998, n_mib)).digest
    meter = Meter()
    with metered(meter):
        previous = push_to(place, snapshot_of(tmp_path / "second", 999, n_mib)).digest
    chance = random.Random(f"{after}{pack_bytes}")
    known = {name for digest in (first, previous) for name in run(_sizes_of(place, digest))}
    n_reused, before = 0, run(look(place))
    for number in range(RUNS_PER_BATCH):
        folder = snapshot_of(tmp_path / f"s{number}", 1000 * number + 7, n_mib)
        limit = int(meter.counts[after] * 0.97 * (number + chance.random()) / RUNS_PER_BATCH)
        code = killed(partial(push_to, place, folder), after, limit)
        assert code == -signal.SIGKILL, (number, limit)
        seen = run(look(place))
        there = known | run(_chunks_in(place, seen.packs - before.packs))
        report = push_to(place, folder)
        assert seen.target in (previous, report.digest)
        assert before.packs <= seen.packs
        sizes = run(_sizes_of(place, report.digest))
        assert report.counts.new_bytes <= sum(n for d, n in sizes.items() if d not in there)
        n_reused += len(seen.packs - before.packs)
        before = run(look(place))
        assert before.target == report.digest
        previous, known = report.digest, known | set(sizes)
    assert n_reused >= RUNS_PER_BATCH // 2
    found = run(_verified(place))
    assert found.sound
    assert found.images == RUNS_PER_BATCH + 2
    run(_abort_orphans(place))


async def _sizes_of(place: Place, digest: Digest) -> dict[bytes, int]:
    return await chunk_sizes(await open_catalog(place.store()), digest)


async def _chunks_in(place: Place, packs: frozenset[bytes]) -> set[bytes]:
    return await chunks_of_packs(await open_catalog(place.store()), packs)


async def _verified(place: Place) -> Any:
    return await verify_all(await open_catalog(place.store()), config=CONFIG)


async def _abort_orphans(place: Place) -> None:
    """What killed pushes left half uploaded can be seen, and freed; it is no pack."""
    store = place.store()
    there = {facts.key for facts in await store.list_objects(layout.PACKS)}
    for left in await store.list_unfinished():
        assert left.key not in there
        await store.abort_unfinished(left)
    assert await store.list_unfinished() == []


async def pulling(place: Place, digest: Digest, target: Path) -> PullReport:
    """Go on with what an earlier pull left."""
    catalog = await open_catalog(place.store())
    return await pull(catalog, digest, str(target), config=CONFIG, facts={}, resume=True)


async def planning(place: Place, digest: Digest, target: Path) -> PullPlan:
    """What that would move."""
    catalog = await open_catalog(place.store())
    return await plan_pull(catalog, digest, str(target), config=CONFIG, facts={}, resume=True)


def tree_of(target: Path) -> dict[bytes, Any]:
    """All below the target, without what says that it is whole."""
    found = contents(target)
    found.pop(MARKER, None)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with large and small files, holes and links, and one that may not be written."""
    folder = snapshot_of(tmp_path_factory.mktemp("source") / "dir", 5, 16)
    write_files(folder, {f"d/e{n}/small": noise(10 + n, n) for n in range(6)})
    os.link(folder / "d/e0/small", folder / "d/hard")
    (folder / "link").symlink_to("d/hard")
    (folder / "d/e1").chmod(0o555)
    return folder


@pytest.fixture(scope="module")
def pulled_from(seaweedfs: Server, source: Path) -> tuple[Place, Digest]:
    """A store that has the directory."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "admin")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "admin-secret")
        place = new_place(seaweedfs, 4 * MIB)
        return place, push_to(place, source).digest


PULLS = [
    (After.RECEIVED_BYTES, False), (After.RECEIVED_BYTES, True), (After.ANSWERED, False),
    (After.FILES, False), (After.FILES, True),
]  # fmt: skip


@pytest.mark.parametrize(("after", "in_place"), PULLS)
def test_a_pull_that_is_killed_anywhere_is_finished_by_the_next(
    pulled_from: tuple[Place, Digest], source: Path, tmp_path: Path, after: After, in_place: bool
) -> None:
    place, digest = pulled_from
    wanted = contents(source)
    total = _total(after, lambda target: run(pulling(place, digest, target)), tmp_path)
    chance = random.Random(f"{after}{in_place}")
    n_killed = present_bytes = 0
    for number in range(RUNS_PER_BATCH):
        home = tmp_path / f"h{number}"
        target = home / "out"
        target.mkdir(parents=True) if in_place else home.mkdir()
        limit = int(total * 0.99 * (number + chance.random()) / RUNS_PER_BATCH)
        code = killed(lambda: run(pulling(place, digest, target)), after, limit)  # noqa: B023
        assert code in (0, -signal.SIGKILL), (number, limit)
        n_killed += code != 0
        if _is_whole(target, in_place=in_place):
            assert tree_of(target) == wanted
            continue
        assert in_place or not target.exists()
        plan = run(planning(place, digest, target))
        report = run(pulling(place, digest, target))
        assert report.fetched_bytes == plan.fetch_bytes
        assert tree_of(target) == wanted
        assert (target / "d/e0/small").stat().st_ino == (target / "d/hard").stat().st_ino
        assert os.listdir(home) == ["out"]
        present_bytes += plan.present_bytes
        if after is After.RECEIVED_BYTES:
            buffered_bytes = CONFIG.max_memory_bytes + MIB  # and what is no chunk
            assert plan.present_bytes >= limit - buffered_bytes
    assert n_killed >= RUNS_PER_BATCH - 2
    assert present_bytes > 8 * MIB
    assert run(_verified(place)).sound


def _total(after: After, work: Callable[[Path], object], folder: Path) -> int:
    """What a pull that nobody kills comes to."""
    if after is After.FILES:
        return count_files(lambda: work(folder / "whole"), folder / "said")
    meter = Meter()
    with metered(meter):
        work(folder / "whole")
    return meter.counts[after]


def _is_whole(target: Path, *, in_place: bool) -> bool:
    return (target / os.fsdecode(MARKER)).exists() if in_place else target.exists()
