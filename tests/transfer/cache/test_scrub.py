"""A flipped bit is found; every tree that has the block is marked, and mended."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import CorruptData
from tests.filesystems import Disk, run
from tests.transfer.cache.support import CountingStore, World, config, snapshot
from tests.transfer.fixture_store import CONFIG, contents, expected
from transfer.cache import repair
from transfer.cache import warm as warming
from transfer.cache.damage import damaged_trees, read_damage
from transfer.cache.layout import DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import is_sound
from transfer.cache.publish import mount_image, unmount_image
from transfer.cache.scrub import ScrubReport, scrub
from transfer.catalog import Catalog, open_catalog

Make = Callable[[Path], World]
OFFSET = 1_000_000  # in what all snapshots share
HOLE_OFFSET = 2_500_000
OWN_OFFSET = 3_500_000  # in what each has alone


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Catalog]:
    """A store by its URL."""
    store = CountingStore(url, Path(f"{url}.log"))
    try:
        yield await open_catalog(store)
    finally:
        store.close()


def scrubbed(
    world: World, *, mend: bool = True, wanted: list[tuple[DomainPaths, Digest]] | None = None
) -> ScrubReport:
    """Check all, or these trees."""
    return asyncio.run(scrub(world.cache, wanted, CONFIG, open_store=opened if mend else None))


def replicas(world: World, *, mib: int = 4) -> list[Digest]:
    """Two images of which half is the same."""
    images = [world.store.add(snapshot(seed, mib=mib)) for seed in (1, 2)]
    for image in images:
        world.warm(image)
    return images


def flip_on_disk(disk: Disk, file: Path) -> None:
    """Change a byte of a file's block on the device, so that all that share it have it changed."""
    run("sync", "-f", disk.root)
    extents = run("xfs_io", "-r", "-c", "fiemap", file).splitlines()[1:]
    for line in extents:
        span, block = line.split("[")[1].split("]")[0].split(".."), line.split(": ")[2]
        low, high = (int(x) * 512 for x in span)
        if low <= OFFSET <= high + 511 and block[0].isdigit():
            place = int(block.split("..")[0]) * 512 + OFFSET - low
            break
    else:
        raise AssertionError(extents)
    disk.unmount()
    with open(disk.device, "r+b", buffering=0) as device:
        device.seek(place // 512 * 512)
        sector = bytearray(device.read(512))
        sector[place % 512] ^= 1
        device.seek(place // 512 * 512)
        device.write(sector)
        os.fsync(device.fileno())
    disk.mount()


@pytest.mark.root
def test_a_bit_that_flipped_on_disk_is_mended_in_all_trees_that_share_the_block(
    xfs: Disk, make_world: Make
) -> None:
    world = make_world(xfs.root)
    images = replicas(world)
    trees = sorted(world.tree_of(image) for image in images)
    flip_on_disk(xfs, world.tree(images[0]) / "pages-1.img")
    world.reopen()
    for image, seed in zip(images, (1, 2), strict=True):
        assert contents(world.tree(image)) != expected(snapshot(seed, mib=4))
    report = scrubbed(world, mend=False)
    assert (report.sound, list(report.marked)) == (False, trees)
    assert {path for _, path in report.wrong} == {b"pages-1.img"}
    assert not is_sound(world.paths, trees[0], world.cache.session)
    report = scrubbed(world)
    assert (report.sound, sorted(report.mended)) == (True, trees)
    reads = Path(f"{world.store.root}.log").read_text().split()
    assert len(reads) == 1  # the second tree has it from the first
    for image, seed in zip(images, (1, 2), strict=True):
        assert contents(world.tree(image)) == expected(snapshot(seed, mib=4))


def test_all_trees_are_marked_though_one_is_read(world: World) -> None:
    images = replicas(world)
    spoil(world.tree(images[0]) / "pages-1.img")
    wanted = [(world.paths, world.tree_of(images[0]))]
    report = scrubbed(world, mend=False, wanted=wanted)
    assert len(report.marked) == 2


def spoil(path: Path, offset: int = OFFSET) -> None:
    """Change a byte of a file; its times stay."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_mending_keeps_attributes_and_sound_trees(world: World) -> None:
    images = replicas(world)
    path = world.tree(images[0]) / "pages-1.img"
    before = path.stat()
    spoil(path)
    assert scrubbed(world).sound
    after = path.stat()
    assert (after.st_mtime_ns, after.st_mode, after.st_ino) == (
        before.st_mtime_ns, before.st_mode, before.st_ino,
    )  # fmt: skip
    assert damaged_trees(world.paths) == []
    assert contents(world.tree(images[0])) == expected(snapshot(1, mib=4))


def test_a_damaged_tree_is_mended_by_the_next_warm(world: World) -> None:
    image = replicas(world)[0]
    spoil(world.tree(image) / "pages-1.img")
    scrubbed(world, mend=False)
    report = world.warm(image)
    assert report.built == 0
    assert is_sound(world.paths, world.tree_of(image), world.cache.session)
    assert contents(world.tree(image)) == expected(snapshot(1, mib=4))


@pytest.mark.root
def test_a_mounted_tree_is_mended_in_place(xfs: Disk, make_world: Make) -> None:
    world = make_world(xfs.root)
    image = replicas(world)[0]
    at = xfs.root / "at"
    at.mkdir()
    mount_image(world.cache, world.paths, image, str(at))
    spoil(world.tree(image) / "pages-1.img")
    assert scrubbed(world).sound
    assert contents(at) == expected(snapshot(1, mib=4))
    unmount_image(world.cache, str(at))


def test_without_its_store_the_damage_stays_marked(world: World) -> None:
    trees = [world.tree_of(image) for image in replicas(world)]
    shutil.rmtree(world.store.root)
    for tree in trees:
        spoil(world.tree_of_path(tree) / "pages-1.img")
    report = scrubbed(world)
    assert not report.sound
    assert any("not mended" in problem for problem in report.problems)
    assert read_damage(world.paths, trees[0]) is not None


def test_what_another_tree_has_right_is_taken_from_there_without_the_store(world: World) -> None:
    folder = world.tree(replicas(world)[1])
    shutil.rmtree(world.store.root)
    spoil(folder / "pages-1.img")
    assert scrubbed(world).sound
    assert contents(folder) == expected(snapshot(2, mib=4))


@pytest.mark.parametrize("with_store", [True, False])
def test_a_tree_that_lacks_a_file_does_not_hinder_those_that_share_its_chunks(
    world: World, with_store: bool
) -> None:
    broken, sound = replicas(world)
    (world.tree(broken) / "pages-1.img").unlink()
    trees = [world.tree_of(broken), world.tree_of(sound)]
    if not with_store:
        shutil.rmtree(world.store.root)
    report = scrubbed(world)
    assert not report.sound
    assert damaged_trees(world.paths) == [trees[0]]
    assert is_sound(world.paths, trees[1], world.cache.session)


def test_a_tree_that_its_store_has_lost_does_not_hinder_another_from_being_mended(
    world: World,
) -> None:
    lost, other = replicas(world)
    for image in (lost, other):
        spoil(world.tree(image) / "pages-1.img", OWN_OFFSET)
    (world.store.root / layout.tree_key(world.tree_of(lost))).unlink()
    scrubbed(world, mend=False)
    assert world.warm(other).built == 0
    assert contents(world.tree(other)) == expected(snapshot(2, mib=4))
    spoil(world.tree(other) / "pages-1.img", OWN_OFFSET)
    report = scrubbed(world)
    assert report.mended == (world.tree_of(other),)
    assert any(world.tree_of(lost).short in problem for problem in report.problems)


def test_files_that_are_missing_too_many_or_changed_are_told(world: World) -> None:
    image = replicas(world)[0]
    root = world.tree(image)
    (root / "empty").unlink()
    (root / "extra").touch()
    (root / "bin/link").unlink()
    (root / "bin/link").symlink_to("elsewhere")
    (root / "core-1.img").chmod(0o666)
    report = scrubbed(world)
    assert not report.sound
    assert {path for _, path in report.wrong} == {b"empty", b"extra", b"bin/link", b"core-1.img"}
    assert not is_sound(world.paths, world.tree_of(image), world.cache.session)
    world.warm(image)
    assert contents(root) == expected(snapshot(1, mib=4))
    assert is_sound(world.paths, world.tree_of(image), world.cache.session)


def test_what_was_written_into_a_hole_is_found_and_mended(world: World) -> None:
    image = replicas(world)[0]
    spoil(world.tree(image) / "pages-1.img", HOLE_OFFSET)
    report = scrubbed(world, mend=False)
    assert {path for _, path in report.wrong} == {b"pages-1.img"}
    assert not report.sound
    assert scrubbed(world).sound
    assert contents(world.tree(image)) == expected(snapshot(1, mib=4))


def test_a_file_that_is_missing_is_built_again_and_the_rest_stays(world: World) -> None:
    image = replicas(world)[0]
    (world.tree(image) / "core-1.img").unlink()
    (world.tree(image) / "empty").unlink()
    scrubbed(world)
    report = world.warm(image)
    assert report.fetched_bytes < 200_000
    assert contents(world.tree(image)) == expected(snapshot(1, mib=4))


def test_a_tree_that_can_not_be_mended_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> repair.Mended:
        return repair.Mended([], {})

    image = replicas(world)[0]
    spoil(world.tree(image) / "pages-1.img")
    scrubbed(world, mend=False)
    monkeypatch.setattr(repair, "mend", nothing)
    monkeypatch.setattr(warming, "_TRIES", 3)
    with pytest.raises(CorruptData, match="stays damaged"):
        world.warm(image)


def test_a_tree_in_use_is_read_and_one_being_built_is_told(world: World) -> None:
    image = replicas(world)[0]
    path = world.paths.lock(world.tree_of(image))
    shared = lock(path, shared=True)
    assert shared is not None
    with shared:
        assert scrubbed(world).trees == 2
    held = lock(path)
    assert held is not None
    with held:
        report = scrubbed(world)
    assert (report.trees, len(report.problems)) == (1, 1)


def test_sound_trees_stay_as_they_are(world: World) -> None:
    world.warm(world.store.add(snapshot(1, mib=4)), using=config(direct=True))
    report = scrubbed(world)
    assert (report.sound, report.wrong, report.problems, report.trees) == (True, (), (), 1)
