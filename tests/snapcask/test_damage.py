"""Damaged stores in directories: what is told of them, with which exit code, and how they heal."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.snapcask.conftest import Call
from tests.snapcask.support import contents

SPARSE_BYTES = 1 << 30


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def in_its_place(path: Path, what: str) -> None:
    path.unlink()
    if what == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")


@pytest.fixture
def image(call: Call, store: Path, snapshot: Path) -> str:
    """The digits of an image that `a:1` points to; `b:1` points to another one."""
    (store.parent / "other").mkdir()
    (store.parent / "other" / "file").write_bytes(b"other")
    assert call("push", store.parent / "other", "b:1").code == 0
    return call("push", snapshot, "a:1").out.split()[0].removeprefix("blake3:")


def newest(store: Path) -> Path:
    return max((store / "refs" / "a" / "1").iterdir())


@pytest.mark.parametrize("folder", ["images", "trees", "placements"])
@pytest.mark.parametrize("damage", [flip, lambda path: in_its_place(path, "symlink")])
def test_a_push_writes_damaged_objects_anew(
    call: Call, store: Path, snapshot: Path, image: str, folder: str, damage: Callable[[Path], None]
) -> None:
    for path in (store / folder).iterdir():
        damage(path)
    assert call("verify", "a:1").code == 6
    assert call("push", snapshot, "a:2").code == 0
    assert call("verify", "a:2").code == 0
    assert call("pull", "a:2", store.parent / "out").code == 0
    out, wanted = contents(store.parent / "out"), contents(snapshot)
    assert {name: found[0] for name, found in out.items()} == {
        name: found[0] for name, found in wanted.items()
    }


@pytest.mark.parametrize("folder", ["images", "trees"])
def test_a_copy_writes_damaged_objects_anew(
    call: Call, store: Path, image: str, folder: str
) -> None:
    other = store.parent / "copy"
    call("init", other)
    assert call("cp", "a:1", "a:1", "--to", other).code == 0
    for path in (other / folder).iterdir():
        flip(path)
    assert call("verify", "a:1", "--store", other).code == 6
    assert call("cp", "a:1", "a:1", "--to", other).code == 0
    assert call("verify", "a:1", "--store", other).code == 0


def test_verify_says_how_a_damaged_pack_is_mended_and_that_works(
    call: Call, store: Path, snapshot: Path, image: str
) -> None:
    pack = max((store / "packs").glob("*/*"), key=lambda path: path.stat().st_size)
    flip(pack)
    assert call("push", snapshot, "a:1").code == 0
    told = call("verify", "--all")
    assert told.code == 6
    key = f"packs/{pack.parent.name}/{pack.name}"
    assert f"to mend: move {key} out of the store, then push" in told.out
    pack.unlink()
    assert call("push", snapshot, "a:1").code == 0
    assert call("verify", "--all").code == 0


@pytest.mark.parametrize("what", ["directory", "symlink"])
@pytest.mark.parametrize("kind", ["image", "tree", "placement", "reference", "pack", "index"])
def test_verify_all_tells_what_is_no_object_and_goes_on(
    call: Call, store: Path, image: str, kind: str, what: str
) -> None:
    paths = {
        "image": store / "images" / image,
        "tree": max((store / "trees").iterdir(), key=lambda path: path.stat().st_size),
        "reference": newest(store),
        "pack": max((store / "packs").glob("*/*"), key=lambda path: path.stat().st_size),
        "index": next((store / "index").iterdir()),
    }
    paths["placement"] = store / "placements" / paths["tree"].name
    in_its_place(paths[kind], what)
    for path in (store / "images").iterdir():
        if path.name != image:
            flip(path)
    told = call("verify", "--all", "--json")
    assert told.code == 6, told
    damages = told.document["damages"]
    assert any("hashes to" in damage["reason"] for damage in damages)
    name = {"reference": "a:1"}.get(kind, paths[kind].name)
    (reason,) = [d["reason"] for d in damages if d["kind"] == kind and name in d["name"]]
    assert "where a file belongs" in reason
    if kind != "index":
        assert call("verify", "a:1").code == 6
        failed = call("pull", "a:1", store.parent / "out")
        assert failed.code == 6, failed
    if kind == "pack":
        assert call("index", "rebuild").code == 6


@pytest.mark.parametrize("what", ["empty", "cut", "flip", "directory", "symlink"])
def test_a_damaged_reference_is_listed_and_can_be_written_anew(
    call: Call, store: Path, snapshot: Path, image: str, what: str
) -> None:
    path = newest(store)
    if what in ("directory", "symlink"):
        in_its_place(path, what)
    elif what == "flip":
        raw = bytearray(path.read_bytes())
        raw[0] ^= 0x40
        path.write_bytes(raw)
    else:
        os.truncate(path, 0 if what == "empty" else 50)
    listed = call("ls", "--json")
    assert listed.code == 0
    found: dict[str, Any] = {one["reference"]: one for one in listed.document["references"]}
    assert found["b:1"]["problem"] is None
    assert path.name in found["a:1"]["problem"]
    assert found["a:1"]["digest"] is None
    shown = call("ls")
    assert "damaged" in shown.out
    assert "a:1: " in shown.err
    assert call("pull", "a:1", store.parent / "out").code == 6
    changes = [
        ("tag", f"@blake3:{image}", "a:1"),
        ("push", snapshot, "a:1"),
        ("variants", "a:1", f"@blake3:{image}"),
        ("rm", "a:1"),
    ]
    damaged = {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    for number, change in enumerate(changes):
        done = call(*change)
        assert done.code == 0, done
        healed = call("ls", "--json", "--all").document["references"]
        assert [one["problem"] for one in healed] == [None, None]
        if number < len(changes) - 1:
            newest(store).unlink()
            assert {p: p.read_bytes() for p in path.parent.iterdir() if p.is_file()} == damaged
    assert "what it pointed to is not known" in done.out


def test_a_pack_that_is_gone_is_told_once_and_mended_by_a_push(
    call: Call, store: Path, snapshot: Path, image: str
) -> None:
    for pack in [path for path in (store / "packs").rglob("*") if path.is_file()]:
        pack.unlink()
    told = call("verify", "a:1")
    assert told.code == 6
    assert told.out.count("does not exist: ") == 1
    assert "to mend: push the directories of the images again" in told.out
    assert "out of the store" not in told.out
    assert call("push", snapshot, "a:1").code == 0
    assert call("verify", "a:1").code == 0


@pytest.mark.parametrize("folder", ["refs/a/1", "images", "trees", "placements", "index", "."])
@pytest.mark.timeout(60)
def test_a_huge_object_costs_no_memory(call: Call, store: Path, image: str, folder: str) -> None:
    for path in list((store / folder).iterdir()):
        if path.is_file():
            os.truncate(path, SPARSE_BYTES)
    calls = [("ls",), ("verify", "a:1"), ("pull", "a:1", store.parent / "out"), ("verify", "--all")]
    tracemalloc.start()
    try:
        codes = [call(*arguments).code for arguments in calls]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 100 << 20
    assert codes == {"index": [0, 0, 0, 6], ".": [6, 6, 6, 6]}.get(folder, [0, 6, 6, 6])
