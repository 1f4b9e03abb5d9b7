"""Where a store may be made: not among other things, and not in another store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.snapcask.conftest import Call


def test_a_directory_that_holds_other_things_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"precious")
    failed = call("init", tmp_path)
    assert failed.code == 2
    assert f"{tmp_path} is not empty, it holds mine" in failed.err
    assert "--allow-non-empty" in failed.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert call("init", tmp_path, "--allow-non-empty").code == 0
    assert (tmp_path / "mine").read_bytes() == b"precious"
    assert call("ls", "--store", tmp_path).code == 0


def test_what_a_mount_or_a_killed_init_leaves_is_not_in_the_way(call: Call, tmp_path: Path) -> None:
    for name in ("lost+found", ".snapshot", "tmp"):
        (tmp_path / name).mkdir()
    assert call("init", tmp_path).code == 0


@pytest.mark.parametrize("inner", ["inner", "packs/00/x", "refs/a"])
@pytest.mark.parametrize("options", [[], ["--allow-non-empty"]])
def test_a_store_in_a_store_is_refused(
    call: Call, tmp_path: Path, inner: str, options: list[str]
) -> None:
    outer = tmp_path / "outer"
    assert call("init", outer).code == 0
    failed = call("init", outer / inner, *options)
    assert failed.code == 2
    assert f"lies in the store {outer}; name a place outside of it" in failed.err
    assert not (outer / inner).exists()


@pytest.mark.parametrize("name", ["", "refs", "packs"])
def test_a_file_in_the_place_of_a_folder_is_refused(call: Call, tmp_path: Path, name: str) -> None:
    place = tmp_path / "place"
    if name:
        place.mkdir()
    (place / name).write_text("mine")
    failed = call("init", place, "--allow-non-empty")
    assert failed.code == 2
    assert f"{place / name} is no directory, and a store needs one there" in failed.err
    assert not (place / "store.msgpack").exists()
