"""After kill -9 or a power cut at any step the cache is complete and right, or goes on cleanly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from tests.filesystems import Disk
from tests.transfer.cache.support import World, config, join, snapshot
from tests.transfer.fixture_store import contents, expected
from transfer.cache import build as building
from transfer.cache import evict as evicting
from transfer.cache import trash
from transfer.cache.build import Build
from transfer.cache.evict import evict_all
from transfer.cache.owners import is_sound
from transfer.pulling.materialise import TreeWriter
from transfer.store.posix import PosixStore

Make = Callable[[Path], World]
NODES = snapshot(1, mib=4)

STEPS = (
    "begin_journal", "written", "attributes", "synced", "renamed", "folders", "named",
    "marked", "removed",
)  # fmt: skip
EVICTION_STEPS = ("unmarked", "moved")


def die() -> None:
    """End as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def _after(module: Any, name: str, calls: int = 1) -> None:
    """Die when a function of a module has been called so often."""
    original = getattr(module, name)
    left = [calls]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            die()
        return result

    setattr(module, name, wrapped)


def arm(step: str) -> None:
    """Have this process die right after a step."""
    match step:
        case "begin_journal":
            _after(building, "begin_journal")
        case "written":
            _after(Build, "note", 3)
        case "attributes":
            _after(TreeWriter, "finish_root")
        case "synced":
            _after(building, "sync_filesystem")
        case "renamed":
            _die_at_rename("/trees/")
        case "named":
            _die_at_rename("/marks/")
        case "folders":
            _after(building, "sync_folder")
        case "marked":
            _after(building, "sync_folder", 2)
        case "removed":
            _after(building, "remove_file", 3)
        case "unmarked":
            _after(evicting, "sync_folder")
        case "moved":
            _after(trash, "empty_trash")
        case _:
            raise AssertionError(step)


def _die_at_rename(folder: str) -> None:
    """At the one that makes a tree, or its mark, have its name there."""
    original = os.rename

    def rename(source: str, target: str, **given: Any) -> None:
        original(source, target, **given)
        if folder in target and ".new-" not in target and not target.startswith(source):
            die()

    os.rename = rename  # type: ignore[assignment]


def fork(work: Callable[[], object]) -> int | None:
    """Do something in a process of its own; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return join([process])[0]


def dies_at(world: World, image: Digest, step: str, **given: Any) -> None:
    """Warm in a process that dies after this step."""

    def fresh() -> None:
        arm(step)
        world.store.catalog.store = PosixStore(str(world.store.root))  # with threads of its own
        world.warm(image, **given)

    assert fork(fresh) == -signal.SIGKILL


def check_right_or_absent(world: World, image: Digest) -> bool:
    """A tree that counts is right; says whether it counts."""
    tree = world.tree_of(image)
    if not is_sound(world.paths, tree, world.cache.session):
        return False
    assert contents(world.paths.tree(tree)) == expected(NODES)
    return True


@pytest.mark.parametrize("step", STEPS)
def test_after_kill_9_the_next_goes_on(world: World, step: str) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, step)
    world.reopen()
    complete = check_right_or_absent(world, image)
    assert complete == (step in ("named", "marked", "removed"))
    report = world.warm(image)
    assert check_right_or_absent(world, image)
    if step not in ("begin_journal", "written"):
        assert report.fetched_bytes == 0
    assert os.listdir(os.path.join(world.paths.folder, "partial")) in ([], [_journal(world, image)])
    assert evict_all(world.cache)
    assert os.listdir(world.cache.trash) == []


def _journal(world: World, image: Digest) -> str:
    return os.path.basename(world.paths.journal(world.tree_of(image)))


@pytest.mark.parametrize("step", STEPS)
def test_after_a_power_cut_the_next_goes_on(xfs: Disk, make_world: Make, step: str) -> None:
    world = make_world(xfs.root)
    image = world.store.add(NODES)
    dies_at(world, image, step)
    xfs.cut_power()
    world.reopen()
    complete = check_right_or_absent(world, image)
    assert step == "named" or complete == (step in ("marked", "removed"))
    report = world.warm(image)
    assert check_right_or_absent(world, image)
    if step in ("synced", "renamed", "folders"):
        assert report.fetched_bytes == 0


@pytest.mark.parametrize("fsync", [False, True])
def test_after_a_power_cut_a_finished_tree_is_right_if_it_counts(
    xfs: Disk, make_world: Make, fsync: bool
) -> None:
    world = make_world(xfs.root)
    image = world.store.add(NODES)
    world.warm(image, using=config(fsync=fsync))
    assert check_right_or_absent(world, image)
    xfs.cut_power()
    world.reopen()
    assert check_right_or_absent(world, image) == fsync
    world.warm(image)
    assert check_right_or_absent(world, image)


@pytest.mark.parametrize("step", EVICTION_STEPS)
@pytest.mark.parametrize("power", [False, True])
def test_a_removal_that_is_cut_off_leaves_nothing_that_counts(
    xfs: Disk, make_world: Make, step: str, power: bool
) -> None:
    world = make_world(xfs.root)
    image = world.store.add(NODES)
    world.warm(image)

    def work() -> None:
        arm(step)
        evict_all(world.cache)

    assert fork(work) == -signal.SIGKILL
    if power:
        xfs.cut_power()
        world.reopen()
    assert not is_sound(world.paths, world.tree_of(image), world.cache.session)
    world.warm(image)
    assert check_right_or_absent(world, image)
    evict_all(world.cache)
    assert os.listdir(world.cache.trash) == []


def test_a_half_written_journal_is_used_up_to_where_it_fits(world: World) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, "written")
    journal = Path(world.paths.journal(world.tree_of(image)))
    raw = journal.read_bytes()
    journal.write_bytes(raw[:-5])
    report = world.warm(image)
    assert check_right_or_absent(world, image)
    assert report.fetched_bytes > 0


@pytest.mark.parametrize("raw", [b"", b"SNAPJRN2" + bytes(56), b"SNAPJRN1" + bytes(60)])
def test_a_journal_of_another_version_is_begun_anew(world: World, raw: bytes) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, "written")
    Path(world.paths.journal(world.tree_of(image))).write_bytes(raw)
    world.warm(image)
    assert check_right_or_absent(world, image)


def test_chunks_of_another_session_are_read_again(world: World) -> None:
    image = world.store.add(NODES)
    dies_at(world, image, "attributes")
    partial = Path(world.paths.partial(world.tree_of(image)))
    with (partial / "pages-1.img").open("r+b") as file:
        file.seek(4096)
        file.write(b"zeros, say")
    world.cache.session = bytes(16)
    report = world.warm(image)
    assert 0 < report.fetched_bytes < 3 * 1024 * 1024
    assert check_right_or_absent(world, image)
