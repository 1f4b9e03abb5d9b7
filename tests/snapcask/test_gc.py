"""`snapcask gc`: what nothing refers to goes, and only that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import snapcask
from imgfmt.store_record import StoreRecord
from snapcask.exitcodes import ExitCode
from tests.snapcask.conftest import Call


@pytest.fixture
def quick_store(store: Path) -> Path:
    """A store whose leases last a second, so that a collection waits no longer."""
    path = store / "store.msgpack"
    record = StoreRecord.decode(path.read_bytes(), "store record")
    path.chmod(0o600)
    path.write_bytes(replace(record, lease_ttl_s=1).encode())
    return store


def files(store: Path) -> set[Path]:
    return {path for path in store.rglob("*") if path.is_file()}


def test_gc_frees_what_rm_has_left(call: Call, quick_store: Path, snapshot: Path) -> None:
    call("push", snapshot, "a:1")
    call("rm", "a:1")
    before = files(quick_store)
    planned = call("gc", "--history", "0s", "--dry-run")
    assert planned.code == 0
    assert planned.out.startswith("would delete 1 packs and 3 other objects")
    assert files(quick_store) == before
    outcome = call("gc", "--history", "0s", "--json")
    assert "waiting until" in outcome.err
    done = outcome.document
    assert done["packs"] == 1
    assert done["objects"] == 3
    assert done["needed_bytes"] == 0
    assert not list(quick_store.glob("packs/*/*"))
    assert not list(quick_store.glob("trees/*"))
    assert call("verify", "--all").code == 0


def test_gc_keeps_what_references_and_their_history_need(
    call: Call, quick_store: Path, snapshot: Path
) -> None:
    call("push", snapshot, "a:1")
    digest = call("push", snapshot, "b:1", "-q").out.strip()
    call("rm", "a:1")
    call("rm", "b:1")
    assert call("gc").out.startswith("deleted 0 packs and 0 other objects, 0 B")
    assert call("tag", digest, "c:1").code == 0
    assert call("gc", "--history", "0s").out.startswith("deleted 0 packs and 0 other objects, 0 B")
    assert call("verify", "c:1").code == 0


def test_gc_of_a_damaged_store_deletes_nothing_and_says_why(
    call: Call, quick_store: Path, snapshot: Path
) -> None:
    call("push", snapshot, "a:1")
    call("push", snapshot, "b:1", "--annotation", "x=y")
    call("rm", "b:1")
    [tree] = quick_store.glob("trees/*")
    tree.unlink()
    before = files(quick_store)
    failed = call("gc", "--history", "0s")
    assert failed.code == ExitCode.NOT_FOUND
    assert "does not exist, and references need it, so nothing was deleted" in failed.err
    assert files(quick_store) == before


@pytest.mark.parametrize("age", ["1y", "", "5", "-1s", "1.5h", "d"])
def test_an_age_that_is_none_is_refused(call: Call, store: Path, age: str) -> None:
    assert call("gc", f"--history={age}").code == ExitCode.INVALID_INPUT


def test_gc_from_python(call: Call, quick_store: Path, snapshot: Path) -> None:
    call("push", snapshot, "a:1")
    call("rm", "a:1")
    report = snapcask.gc(store=quick_store, history_s=0, dry_run=True)
    assert isinstance(report, snapcask.CollectReport)
    assert report.packs == 1
    assert snapcask.gc(store=quick_store, history_s=0).freed_bytes == report.freed_bytes
