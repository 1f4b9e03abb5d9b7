"""Pushes that fail, are cancelled, killed or meet a full disk, at every step."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import (
    ImageError,
    OutOfResources,
)
from imgfmt.image import Image
from imgfmt.store_record import NewChunks
from tests.transfer.pushes import (
    MIB,
    Operations,
    new_store,
    noise,
    push_and_be_killed,
    push_interposed,
    pushed,
    request_of,
    run,
    start_process,
    write_files,
)
from tests.transfer.store_check import (
    check_packs,
    check_references,
)
from tests.transfer.test_push import check_tidy, keys_of
from transfer.catalog import open_catalog
from transfer.push import PushReport
from transfer.store.posix import PosixStore


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """The tests of stores see to durability; here it would only take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def tight_store(tmp_path: Path) -> PosixStore:
    """Every chunk has a pack of its own."""
    return new_store(tmp_path / "store", pack_bytes=4096)


SMALL = {"f": noise(150_000), "g": noise(90_000, 1), "h": b"x" * 9000, "d/i": b""}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three chunks."""
    return write_files(tmp_path / "small", SMALL)


def operations_of_a_push(store: PosixStore, sample: Path) -> list[str]:
    """What a push into a copy of the store asks of it."""
    copy = Path(f"{store.root}-copy")
    shutil.copytree(store.root, copy)
    operations = Operations()
    run(push_interposed(PosixStore(str(copy)), request_of(sample), operations.before))
    shutil.rmtree(copy)
    return operations.names


@pytest.fixture
def earlier(tmp_path: Path, tight_store: PosixStore) -> Digest:
    """The store has an image already, to which `snap:v1` points."""
    return pushed(tight_store, write_files(tmp_path / "earlier", {"f": noise(99_999, 7)})).digest


async def push_and_act(
    store: PosixStore,
    sample: Path,
    act: Callable[[asyncio.Task[PushReport]], object],
    position: int,
) -> tuple[Digest | BaseException, str]:
    """Push, call `act` before a store operation; gives what comes of it, and the operation."""

    async def before() -> None:
        act(task)

    operations = Operations(position, before)
    task = asyncio.create_task(push_interposed(store, request_of(sample), operations.before))
    answer: Digest | BaseException
    try:
        answer = (await task).digest
    except (ImageError, asyncio.CancelledError) as error:
        answer = error
    return answer, operations.names[position]


def fail_full(task: object) -> None:
    raise OutOfResources("told to fail")


@pytest.mark.slow
@pytest.mark.parametrize("act", [fail_full, asyncio.Task.cancel])
def test_a_push_that_fails_at_any_store_operation_leaves_nothing_half_done(
    tmp_path: Path,
    tight_store: PosixStore,
    small: Path,
    earlier: Digest,
    act: Callable[[Any], object],
) -> None:
    store, sample = tight_store, small
    names = operations_of_a_push(store, sample)
    assert len(names) > 20
    new = pushed(new_store(tmp_path / "other"), sample).digest
    for position in range(len(names)):
        place = shutil.copytree(store.root, tmp_path / f"s{position}")
        victim = PosixStore(str(place))
        answer, name = run(push_and_act(victim, sample, act, position))
        told = isinstance(answer, asyncio.CancelledError) or "told to fail" in str(answer)
        assert told or answer == new, name
        assert os.listdir(place / "tmp") == [], name
        if name != "delete leases" or act is asyncio.Task.cancel:
            assert keys_of(victim, "leases/") == [], name
        target = run(check_references(victim))["snap:v1"]
        assert target in (earlier, new), name
        if act is fail_full:
            assert (answer == new) == (target == new), name
        run(check_packs(victim))
        assert pushed(victim, sample).digest == new
        victim.close()
        shutil.rmtree(place)


def known_digests(store: PosixStore) -> set[bytes]:
    """Digests of the chunks in finished packs, whether or not an index segment names them."""
    catalog = run(open_catalog(store))
    names = [layout.pack_name_of(key) for key in keys_of(store, "packs/")]
    tables = [run(catalog.pack_table(name)) for name in names if name is not None]
    return {digest.tobytes() for table in tables for digest in table.names}


@pytest.mark.slow
def test_a_push_that_is_killed_before_any_store_operation_leaves_garbage_at_most(
    tmp_path: Path, tight_store: PosixStore, small: Path, earlier: Digest
) -> None:
    store, sample = tight_store, small
    new_digest = pushed(new_store(tmp_path / "other"), sample).digest
    reused, position, status = [], 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        place = tmp_path / f"s{position}"
        shutil.copytree(store.root, place)
        process = start_process(push_and_be_killed, str(place), str(sample), position)
        process.join(60)
        status = process.exitcode or 0
        victim = PosixStore(str(place))
        assert run(check_references(victim))["snap:v1"] in (earlier, new_digest)
        run(check_packs(victim))
        known = known_digests(victim)
        report = pushed(victim, sample)
        assert report.digest == new_digest
        assert run(check_references(victim)) == {"snap:v1": new_digest}
        reused.append(report.counts.reused_bytes)
        sizes = chunk_sizes(victim, new_digest)
        assert report.counts.new_bytes == sum(n for d, n in sizes.items() if d not in known)
        victim.close()
        shutil.rmtree(place)
        position += 1
    assert status == 0
    assert position > 20
    assert reused[0] == 0
    assert len(set(reused)) >= 3
    assert reused[-1] == sum(map(len, SMALL.values()))


def chunk_sizes(store: PosixStore, digest: Digest) -> dict[bytes, int]:
    """Plain bytes of the chunks of an image, by digest."""
    catalog = run(open_catalog(store))
    image = run(catalog.image(digest))
    assert isinstance(image, Image)
    trees = [run(catalog.tree(member.tree)) for member in image.members]
    return {
        name.tobytes(): int(n_bytes)
        for tree in trees
        for name, n_bytes in zip(tree.chunk_digest, tree.chunk_bytes, strict=True)
    }


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 6 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts filesystems")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no filesystem can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_is_told_and_leaves_no_half_object(tmp_path: Path, small_disk: Path) -> None:
    store = new_store(small_disk / "store", codec=NewChunks.RAW)
    small = pushed(store, write_files(tmp_path / "small", {"f": noise(MIB)}))
    large = write_files(tmp_path / "large", {f"f{i}": noise(3 * MIB, i) for i in range(4)})
    with pytest.raises(OutOfResources, match=r"(packs|index)/.* in store .*no space left"):
        pushed(store, large, tag="large")
    assert run(check_references(store)) == {"snap:v1": small.digest}
    check_tidy(store)
    for facts in run(store.list_objects("packs/")):
        if facts.key not in "".join(map(str, used_packs(store, small.digest))):
            run(store.delete(facts.key))
    again = pushed(store, write_files(tmp_path / "another", {"f": noise(MIB, 9)}), tag="another")
    assert run(check_references(store))["snap:another"] == again.digest


def used_packs(store: PosixStore, digest: Digest) -> list[str]:
    """Keys of the packs of an image."""
    catalog = run(open_catalog(store))
    image = run(catalog.image(digest))
    assert isinstance(image, Image)
    contents = [run(catalog.content(member.tree)) for member in image.members]
    return [layout.pack_key(name.tobytes()) for c in contents for name in c.placement.packs]
