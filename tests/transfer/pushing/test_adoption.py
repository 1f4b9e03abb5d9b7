"""What an interrupted push finished is not written again, and nothing is searched for otherwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from imgfmt import layout
from imgfmt.errors import ImageError
from tests.transfer.pushes import (
    CONFIG,
    MIB,
    Operations,
    new_store,
    noise,
    push_request,
    pushed,
    request_of,
    run,
    start_process,
    write_files,
)
from tests.transfer.store_check import check_packs, check_references
from transfer.catalog import open_catalog
from transfer.push import push
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore

SELDOM = replace(CONFIG, index_every_packs=100)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_files(tmp_path / "d", {"pages-1.img": noise(12 * MIB)})


def push_until(place: str, directory: str, n_packs: int, end: Callable[[], None]) -> None:
    """Push without writing the index; `end` is called once so many packs are there."""

    ended: list[bool] = []

    async def before(operation: str, key: str) -> None:
        if len(packs_in(place)) >= n_packs and not ended:
            ended.append(True)
            end()

    async def work() -> None:
        catalog = await open_catalog(PosixStore(place), write=True)
        catalog.store = InterposedStore(PosixStore(place), before)
        await push(catalog, request_of(Path(directory)), config=SELDOM)

    run(work())


def packs_in(place: str) -> list[str]:
    return [path.name for path in Path(place, "packs").glob("*/*")]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def push_and_die(place: str, directory: str, n_packs: int) -> None:
    push_until(place, directory, n_packs, _die)


def stored_plain_bytes(store: PosixStore) -> int:
    """Plain bytes in the packs that are there."""
    catalog = run(open_catalog(store))
    names = [layout.pack_name_of(f.key) for f in run(store.list_objects(layout.PACKS))]
    tables = [run(catalog.pack_table(name)) for name in names if name is not None]
    return sum(int(table.stored_bytes.sum()) for table in tables)


@pytest.mark.parametrize("n_packs", [1, 5])
def test_packs_of_a_killed_push_that_no_index_has_are_used(
    tmp_path: Path, directory: Path, n_packs: int
) -> None:
    place = tmp_path / "store"
    store = new_store(place)
    process = start_process(push_and_die, str(place), str(directory), n_packs)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert run(store.list_objects(layout.INDEX)) == []
    there = stored_plain_bytes(store)
    assert there >= n_packs * MIB // 16
    report = pushed(store, directory)
    assert report.counts.reused_bytes == there
    assert report.counts.new_bytes == 12 * MIB - there
    run(check_packs(store))
    assert len(run(check_references(store))) == 1
    assert pushed(store, directory, tag="v2").counts.new_bytes == 0


def test_packs_of_a_push_that_failed_get_into_the_index(tmp_path: Path, directory: Path) -> None:
    place = tmp_path / "store"
    store = new_store(place)

    def fail() -> None:
        raise ImageError("the store fails")

    with pytest.raises(ImageError, match="the store fails"):
        push_until(str(place), str(directory), 4, fail)
    assert run(store.list_objects(layout.LEASES)) == []
    there = stored_plain_bytes(store)
    assert there > 0
    assert pushed(store, directory).counts.reused_bytes == there


def test_packs_are_not_listed_where_no_other_lease_is(tmp_path: Path, directory: Path) -> None:
    store = new_store(tmp_path / "store")
    seen = Operations()
    run(push_request(InterposedStore(store, seen.before), request_of(directory), config=CONFIG))
    assert "list_objects leases" in seen.names
    assert "list_objects packs" not in seen.names


def test_leases_that_were_over_for_long_are_removed_and_others_stay(
    tmp_path: Path, directory: Path
) -> None:
    store = new_store(tmp_path / "store", lease_ttl_s=1000)
    leases = {bytes([number]) * 16: age_s for number, age_s in enumerate((0, 1900, 2100))}
    for lease, age_s in leases.items():
        run(store.put(layout.lease_key(lease), [b"of another writer"]))
        path = tmp_path / "store" / layout.lease_key(lease)
        written_s = path.stat().st_mtime - age_s
        os.utime(path, (written_s, written_s))
    pushed(store, directory)
    left = {facts.key for facts in run(store.list_objects(layout.LEASES))}
    assert left == {layout.lease_key(lease) for lease, age_s in leases.items() if age_s < 2000}
