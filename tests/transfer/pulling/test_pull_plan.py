"""What a dry run says is what the pull then moves; it writes nothing and takes nothing away."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput, NotFound, OutOfResources
from tests.transfer.fixture_store import CONFIG, MIB, FixtureStore, Node, noise, run
from tests.transfer.pulling.test_resume import NODES, cut_off, pulled
from transfer.pulling.pull_plan import PullPlan, plan_pull


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    """A store."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of the targets."""
    made = tmp_path / "home"
    made.mkdir()
    return made


def planned(store: FixtureStore, image: Digest, target: Path, **given: Any) -> PullPlan:
    """Plan with the arguments of a pull that goes on with what was there before."""
    given = {"resume": True, "facts": {}, "config": CONFIG, **given}
    return run(plan_pull(store.catalog, image, str(target), **given))


def everything(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """All there is below a folder, and when it was changed."""
    found = {path: path.lstat() for path in [folder, *folder.rglob("*")]}
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns) for path, s in found.items()}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_plan_of_a_new_target_is_what_the_pull_moves(
    store: FixtureStore, home: Path, in_place: bool
) -> None:
    image = store.add(NODES)
    target = home / "out"
    if in_place:
        target.mkdir()
    before = everything(home)
    plan = planned(store, image, target)
    assert everything(home) == before
    reads: list[int] = []
    original = store.store.read_into

    async def read_into(key: str, offset: int, buffer: memoryview) -> None:
        reads.append(len(buffer))
        await original(key, offset, buffer)

    store.store.read_into = read_into  # type: ignore[method-assign]
    report = pulled(store, image, target)
    assert (plan.requests, plan.fetch_bytes) == (len(reads), sum(reads))
    assert plan.fetch_bytes == report.fetched_bytes
    assert plan.packs == len(list(store.pack_paths()))
    assert (plan.chunks, plan.files, plan.digest) == (report.chunks, report.files, report.digest)
    assert plan.logical_bytes == report.logical_bytes
    assert plan.zero_bytes == MIB
    assert plan.plain_bytes == plan.logical_bytes - plan.zero_bytes
    assert plan.present_bytes == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_what_an_interrupted_pull_left_is_not_counted(
    store: FixtureStore, home: Path, in_place: bool
) -> None:
    image = store.add(NODES)
    target = home / "out"
    if in_place:
        target.mkdir()
    whole = planned(store, image, target)
    cut_off(store, image, target, "cut")
    before = everything(home)
    plan = planned(store, image, target)
    anew = planned(store, image, target, resume=False)
    assert everything(home) == before
    assert 0 < plan.present_bytes < whole.plain_bytes
    assert plan.present_bytes + plan.plain_bytes == whole.plain_bytes
    assert plan.chunks < whole.chunks
    assert anew == whole
    assert pulled(store, image, target).fetched_bytes == plan.fetch_bytes


def test_the_rest_is_planned_of_the_same_member_alone(store: FixtureStore, home: Path) -> None:
    trees = [store.add_tree({b"a": Node(noise(6 * MIB, seed))}) for seed in (3, 4)]
    image = store.add_image(*trees)
    cut_off(store, image, home / "out", "cut", member="rank-0")
    assert planned(store, image, home / "out", member="rank-0").present_bytes > 0
    assert planned(store, image, home / "out", member="rank-1").present_bytes == 0
    assert planned(store, image, home / "out").plain_bytes == 12 * MIB


def test_an_empty_image_moves_nothing(store: FixtureStore, home: Path) -> None:
    plan = planned(store, store.add({b"empty": Node(b"")}), home / "out")
    assert (plan.requests, plan.packs, plan.chunks, plan.fetch_bytes) == (0, 0, 0, 0)
    assert plan.files == 1


def test_a_plan_fails_where_the_pull_would(
    store: FixtureStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = store.add(NODES)
    (home / "full").mkdir()
    (home / "full" / "x").touch()
    (home / "file").touch()
    before = everything(home)
    with pytest.raises(InvalidInput, match="not empty"):
        planned(store, image, home / "full")
    with pytest.raises(InvalidInput, match="exists"):
        planned(store, image, home / "file")
    with pytest.raises(InvalidInput, match="make it first"):
        planned(store, image, home / "no" / "out")
    with pytest.raises(NotFound, match="no member"):
        planned(store, image, home / "out", member="x")
    real = os.fstatvfs

    def full(descriptor: int) -> os.statvfs_result:
        found = list(real(descriptor))
        found[4] = 3  # f_bavail
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", full)
    with pytest.raises(OutOfResources, match="nothing was written"):
        planned(store, image, home / "out")
    monkeypatch.undo()
    assert everything(home) == before
