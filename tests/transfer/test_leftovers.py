"""What killed writers left is removed by the next one, and nothing that anybody may be at."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from imgfmt import layout
from imgfmt.errors import AccessDenied
from imgfmt.lease import Lease
from imgfmt.store_record import StoreRecord
from tests.transfer.pushes import CONFIG, RECORD, run, write_files
from transfer.catalog import Catalog, init_store
from transfer.collect import collect
from transfer.leases import WriterLease
from transfer.leftovers import remove_leftovers
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.posix import PosixStore

HOUR_S = 3600


def made(folder: Path, record: StoreRecord = RECORD) -> Catalog:
    """A new store."""
    store = PosixStore(str(folder))
    run(init_store(store, record))
    return Catalog(store, record)


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return made(tmp_path / "store")


def leave(catalog: Catalog, name: str, age_s: float) -> Path:
    """An unfinished file of this age."""
    path = Path(catalog.store.url) / layout.TMP / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"left")
    then_s = time.time() - age_s
    os.utime(path, (then_s, then_s))
    return path


def pushed(catalog: Catalog, tmp_path: Path) -> None:
    source = DirectorySource("main", str(write_files(tmp_path / "source", {"a": b"x" * 5000})))
    run(push(catalog, PushRequest([source], reference=("a", "v1")), config=CONFIG))


def test_a_push_removes_what_killed_ones_left(catalog: Catalog, tmp_path: Path) -> None:
    old = [leave(catalog, "0" * 32, 2 * HOUR_S), leave(catalog, "probe-00ff", 2 * HOUR_S)]
    young = leave(catalog, "1" * 32, HOUR_S / 2)
    foreign = leave(catalog, "notes.txt", 2 * HOUR_S)
    pushed(catalog, tmp_path)
    assert [path.exists() for path in old] == [False, False]
    assert young.exists()
    assert foreign.exists()


def test_a_collection_removes_it_too(catalog: Catalog) -> None:
    old = leave(catalog, "0" * 32, 2 * HOUR_S)
    run(collect(catalog))
    assert not old.exists()


def test_what_a_live_writer_may_have_begun_stays(catalog: Catalog) -> None:
    """A push that began three hours ago and still renews its lease may be at an old file."""
    older, old = leave(catalog, "0" * 32, 4 * HOUR_S), leave(catalog, "1" * 32, 2 * HOUR_S)
    lease = Lease(bytes(16), "push", "somebody", HOUR_S, renewal=3)

    async def sweep() -> int:
        await catalog.store.put(layout.lease_key(lease.id), [lease.encode()])
        own = WriterLease(catalog, "push", "us", HOUR_S)
        await own.take()
        return await remove_leftovers(catalog, own)

    assert run(sweep()) == 1
    assert old.exists()
    assert not older.exists()


def test_what_may_not_be_removed_keeps_nobody_from_pushing(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: PosixStore, before_ns: int) -> int:
        raise AccessDenied("tmp/ is not ours")

    monkeypatch.setattr(PosixStore, "remove_unfinished", refuse)
    old = leave(catalog, "0" * 32, 2 * HOUR_S)
    pushed(catalog, tmp_path)
    assert old.exists()


def test_short_leases_make_leftovers_old_sooner(tmp_path: Path) -> None:
    catalog = made(tmp_path / "store", replace(RECORD, lease_ttl_s=60))
    old, young = leave(catalog, "0" * 32, 90), leave(catalog, "1" * 32, 30)
    pushed(catalog, tmp_path)
    assert (old.exists(), young.exists()) == (False, True)
