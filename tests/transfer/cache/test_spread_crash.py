"""After kill -9 or a power cut with parts of a tree on two disks: right, or gone on with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from imgfmt.digest import Digest
from tests.filesystems import Disk, disk
from tests.transfer.cache.several import pages, parts, seen, world_on
from tests.transfer.cache.support import World, config
from tests.transfer.cache.test_crash import _after, die, fork
from tests.transfer.fixture_store import FixtureStore, expected
from transfer.cache import build as building
from transfer.cache import demote, trash
from transfer.cache import evict as evicting
from transfer.cache.build import Build
from transfer.cache.damage import add_damage
from transfer.cache.evict import evict_all
from transfer.cache.owners import is_sound
from transfer.cache.publish import mount_one
from transfer.pulling.materialise import TreeWriter
from transfer.store.posix import PosixStore

pytestmark = pytest.mark.root

NODES = pages(1, files=4)
STEPS = (
    "begin_journal", "placed", "written", "attributes", "one synced", "all synced",
    "part renamed", "part durable", "main renamed", "main durable", "named", "marked", "removed",
)  # fmt: skip
COMPLETE = ("named", "marked", "removed")


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    """Two XFS."""
    with disk(tmp_path, "xfs", name="a") as one, disk(tmp_path, "xfs", name="b") as other:
        yield [one, other]


@pytest.fixture
def world(disks: list[Disk], store: FixtureStore) -> World:
    """A cache on them."""
    return world_on(disks, store)


def arm(world: World, step: str) -> None:
    """Have this process die right after a step."""
    match step:
        case "begin_journal":
            _after(building, "begin_journal")
        case "placed":
            _after(building, "write_places")
        case "written":
            _after(Build, "note", 3)
        case "attributes":
            _after(TreeWriter, "finish_root")
        case "one synced":
            _after(building, "sync_filesystem")
        case "all synced":
            _after(building, "sync_filesystem", 2)
        case "part renamed":
            _die_at_rename(f"{world.disks[0]}/", "/trees/")
        case "part durable":
            _after(building, "sync_folder")
        case "main renamed":
            _die_at_rename(f"{world.root}/", "/trees/")
        case "main durable":
            _after(building, "sync_folder", 2)
        case "named":
            _die_at_rename(f"{world.root}/", "/marks/")
        case "marked":
            _after(building, "sync_folder", 3)
        case "removed":
            _after(building, "remove_file", 3)
        case _:
            raise AssertionError(step)


def _die_at_rename(above: str, folder: str) -> None:
    original = os.rename

    def rename(source: str, target: str, **given: int) -> None:
        original(source, target, **given)
        if target.startswith(above) and folder in target and ".new-" not in target:
            die()

    os.rename = rename  # type: ignore[assignment]


def dies(world: World, work: Callable[[], object]) -> None:
    """Do something in a process that dies of it."""

    def fresh() -> None:
        world.store.catalog.store = PosixStore(str(world.store.root))  # with threads of its own
        work()

    assert fork(fresh) == -signal.SIGKILL


def dies_at(world: World, image: Digest, step: str) -> None:
    """Warm in a process that dies after this step."""

    def work() -> None:
        arm(world, step)
        world.warm(image)

    dies(world, work)


def right_or_absent(world: World, image: Digest) -> bool:
    """A tree that counts is right; says whether it counts."""
    if not is_sound(world.paths, world.tree_of(image), world.cache.session):
        return False
    assert seen(world, image) == expected(NODES)
    assert [sum(b"pages" in name for name in part) for part in parts(world, image)] == [2, 2]
    return True


def nothing_is_left(world: World) -> None:
    """Once all is evicted."""
    evict_all(world.cache)
    for root in (world.root, *world.disks):
        assert os.listdir(root / "trash") == []
        assert list(root.rglob("*.img")) == []
    for kind in ("trees", "partial", "places", "marks"):
        assert os.listdir(Path(world.paths.folder) / kind) == []


def cut_power(world: World, disks: list[Disk]) -> None:
    """On both disks at once."""
    for at in disks:
        at.cut_power()
    world.reopen()


@pytest.mark.parametrize("step", STEPS)
def test_after_kill_9_the_next_goes_on(world: World, step: str) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, step)
    world.reopen()
    assert right_or_absent(world, image) == (step in COMPLETE)
    report = world.warm(image)
    assert right_or_absent(world, image)
    if step not in ("begin_journal", "placed", "written"):
        assert report.fetched_bytes == 0
    nothing_is_left(world)


@pytest.mark.parametrize("step", STEPS)
def test_after_a_power_cut_the_next_goes_on(world: World, disks: list[Disk], step: str) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, step)
    cut_power(world, disks)
    complete = right_or_absent(world, image)
    assert step == "named" or complete == (step in COMPLETE)
    report = world.warm(image)
    assert right_or_absent(world, image)
    if step in ("all synced", "part renamed", "part durable", "main renamed", "main durable"):
        assert report.fetched_bytes == 0
    nothing_is_left(world)


@pytest.mark.parametrize("step", ["attributes", "one synced", "part renamed"])
@pytest.mark.parametrize("lost", [0, 1])
def test_what_one_disk_lost_is_written_again(
    world: World, disks: list[Disk], step: str, lost: int
) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, step)
    disks[lost].cut_power()
    world.reopen()
    assert not right_or_absent(world, image)
    world.warm(image)
    assert right_or_absent(world, image)
    nothing_is_left(world)


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_finished_tree_counts_after_a_power_cut_of_one_disk_if_it_was_synced(
    world: World, disks: list[Disk], fsync: bool, lost: int
) -> None:
    image = world.store.add(NODES)
    world.warm(image, using=config(fsync=fsync))
    assert right_or_absent(world, image)
    disks[lost].cut_power()
    world.reopen()
    assert right_or_absent(world, image) == fsync
    world.warm(image)
    assert right_or_absent(world, image)
    nothing_is_left(world)


@pytest.mark.parametrize("step", ["unmarked", "main moved", "part moved"])
@pytest.mark.parametrize("power", [False, True])
def test_a_removal_that_is_cut_off_leaves_nothing_that_counts(
    world: World, disks: list[Disk], step: str, power: bool
) -> None:
    image = world.store.add(NODES)
    world.warm(image)

    def work() -> None:
        match step:
            case "unmarked":
                _after(evicting, "sync_folder")
            case "main moved":
                _after(trash, "empty_trash")
            case _:
                _after(trash, "empty_trash", 2)
        evict_all(world.cache)

    dies(world, work)
    if power:
        cut_power(world, disks)
    assert not right_or_absent(world, image)
    world.warm(image)
    assert right_or_absent(world, image)
    nothing_is_left(world)


@pytest.mark.parametrize("step", ["unmarked", "one back", "all back"])
def test_a_tree_that_is_taken_back_half_way_goes_on(world: World, step: str) -> None:
    image = world.store.add(NODES)
    world.warm(image)
    tree = world.tree_of(image)
    part = world.paths.on(next(iter(world.cache.disks)))
    next(Path(part.tree(tree)).rglob("pages*")).unlink()
    add_damage(world.paths, tree, np.zeros(0, np.int64))

    def work() -> None:
        match step:
            case "unmarked":
                _after(demote, "sync_folder")
            case "one back":
                _die_at_rename(f"{world.root}/", "/partial/")
            case _:
                _die_at_rename(f"{world.disks[0]}/", "/partial/")
        world.warm(image)

    dies(world, work)
    world.reopen()
    world.warm(image)
    assert seen(world, image) == expected(NODES)
    nothing_is_left(world)


def test_a_merge_that_was_cut_off_is_undone_by_the_next(
    world: World,
) -> None:
    image = world.store.add(NODES)
    world.warm(image)
    tree = world.tree_of(image)

    def killed(folder: str) -> None:
        die()

    dies(world, lambda: mount_one(world.cache, world.paths, tree, "/", "v", mount=killed))
    (left,) = (path for path in (world.root / "merged").iterdir() if path.is_dir())
    assert os.path.ismount(left)
    names: list[str] = []
    mount_one(world.cache, world.paths, tree, "/", "w", mount=lambda f: names.extend(os.listdir(f)))
    assert "core-1.img" in names
    assert os.listdir(world.root / "merged") == []
