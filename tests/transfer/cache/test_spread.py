"""The files of a tree lie on several disks, are seen as one, and are shared and freed on each."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, OutOfResources, Unsupported
from tests.filesystems import Disk, disk, run
from tests.transfer.cache.several import pages, parts, path_of, seen, world_on
from tests.transfer.cache.support import World, join, served_bytes, start
from tests.transfer.cache.test_scrub import scrubbed
from tests.transfer.fixture_store import MIB, FixtureStore, Node, contents, expected, noise
from transfer.cache import claims, fill, spread
from transfer.cache.build import commit
from transfer.cache.damage import damaged_trees
from transfer.cache.disks import MAIN, free_of
from transfer.cache.evict import Watermarks, apply_watermarks, evict_all, make_room
from transfer.cache.flights import OwnFlight
from transfer.cache.listing import list_cache
from transfer.cache.owners import is_sound, read_mark
from transfer.cache.publish import mount_image, mount_one, unmount_image
from transfer.cache.records import Flight
from transfer.mounts import mount_layers, source_of, unmount

pytestmark = pytest.mark.root


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    """Three XFS."""
    with ExitStack() as stack:
        yield [stack.enter_context(disk(tmp_path, "xfs", name=name)) for name in "abc"]


@pytest.fixture
def world(disks: list[Disk], store: FixtureStore) -> World:
    """A cache on them."""
    return world_on(disks, store)


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
    """Flights that this process states, as others read them."""
    found: list[Flight] = []
    state = OwnFlight.state

    def kept(own: OwnFlight, flight: Flight) -> None:
        found.append(Flight.decode(b"".join(flight.encode()), "flight"))
        state(own, flight)

    monkeypatch.setattr(OwnFlight, "state", kept)
    return found


def test_page_files_are_spread_and_a_mount_has_all_of_them(world: World) -> None:
    nodes = pages(1)
    image = world.store.add(nodes)
    world.warm(image)
    found = parts(world, image)
    assert [sum(b"pages" in name for name in part) for part in found] == [2, 2, 2]
    assert sum(map(len, found)) == len(set().union(*found))
    names = {b"deep/er/pages-0.img", b"deep/er/same.img", b"elsewhere/a/b/again.img"}
    assert [names & part for part in found if names & part] == [names]
    assert path_of(world, image, b"deep/er/pages-0.img").stat().st_nlink == 3
    assert seen(world, image) == expected(nodes)


def test_a_mount_of_several_disks_is_read_only_and_has_the_attributes(
    world: World, disks: list[Disk]
) -> None:
    nodes = pages(1)
    image = world.store.add(nodes)
    world.warm(image)
    at = disks[0].root / "at"
    at.mkdir()
    mount_image(world.cache, world.paths, image, str(at), volume="v")
    assert stat.S_IMODE((at / "shut").stat().st_mode) == 0o500
    assert stat.S_IMODE((at / "deep/er").stat().st_mode) == 0o755
    assert stat.S_IMODE((at / "core-1.img").stat().st_mode) == 0o444
    assert {(at / n).stat().st_mtime_ns for n in ("deep", "shut", "deep/er/pages-1.img")} == {
        nodes[b"shut"].mtime_ns
    }
    with pytest.raises(OSError, match="Read-only"):
        (at / "deep/er/pages-1.img").open("r+b")
    with pytest.raises(AssertionError):
        run("mount", "-o", "remount,rw", at)
    assert evict_all(world.cache) == []
    unmount_image(world.cache, str(at))
    (evicted,) = evict_all(world.cache)
    assert evicted.freed_bytes > 24 * MIB
    for root in (world.root, *world.disks):
        assert [f for f in root.rglob("*.img")] == []
        assert os.listdir(root / "trash") == []


def test_a_second_image_shares_on_each_disk(world: World, disks: list[Disk]) -> None:
    one, two = (world.store.add(pages(seed, own=1)) for seed in (1, 2))
    world.warm(one)
    used = [d.used_bytes() for d in disks]
    report = world.warm(two)
    assert report.shared_bytes >= 20 * MIB
    assert report.fetched_bytes < 4.2 * MIB
    assert report.copied_bytes == 0
    more = [d.used_bytes() - u for d, u in zip(disks, used, strict=True)]
    assert sum(more) < 6 * MIB, more
    for name in (b"deep/er/pages-%d.img" % i for i in range(1, 6)):
        assert (
            os.stat(path_of(world, one, name)).st_dev == os.stat(path_of(world, two, name)).st_dev
        )
    assert seen(world, two) == expected(pages(2, own=1))


def test_the_same_file_twice_in_a_tree_is_stored_once(world: World, disks: list[Disk]) -> None:
    same = noise(12 * MIB)
    image = world.store.add({b"a": Node(same), b"b": Node(same + b"x"), b"c": Node(same)})
    used = [d.used_bytes() for d in disks]
    report = world.warm(image)
    assert (report.copied_bytes, report.fetched_bytes // MIB) == (0, 12)
    assert sum(d.used_bytes() - u for d, u in zip(disks, used, strict=True)) < 16 * MIB


def test_a_full_disk_gets_nothing_and_small_files_go_where_most_is_free(
    world: World, disks: list[Disk]
) -> None:
    for at in disks[:2]:
        run("fallocate", "-l", "200M", at.root / "ballast")
    image = world.store.add({b"small-%d" % i: Node(noise(5000, i)) for i in range(5)})
    world.warm(image)
    assert [len(part) for part in parts(world, image)] == [0, 0, 5]
    big = world.store.add({b"big-%d" % i: Node(noise(40 * MIB, i)) for i in range(4)})
    world.warm(big)
    assert [len(part) for part in parts(world, big)][2] >= 3
    assert seen(world, big).keys() == {b"big-0", b"big-1", b"big-2", b"big-3"}


def test_between_disks_of_different_kinds_bytes_are_copied(
    tmp_path: Path, store: FixtureStore, stated: list[Flight]
) -> None:
    with disk(tmp_path, "xfs") as one, disk(tmp_path, "ext4", 320) as other:
        world = world_on([one, other], store)
        images = [world.store.add(pages(seed, own=1)) for seed in (1, 2)]
        for image in images:
            report = world.warm(image)
        assert report.fetched_bytes < 4.2 * MIB
        shareable = {b"deep/er/pages-%d.img" % i for i in range(1, 6)}
        assert report.copied_bytes + report.shared_bytes == 20 * MIB
        assert stated[-1].reserved_bytes >= report.copied_bytes + 4 * MIB
        assert report.shared_bytes == 4 * MIB * len(shareable & parts(world, images[0])[0])
        assert seen(world, images[1]) == expected(pages(2, own=1))


def test_two_processes_at_once_fetch_it_once(world: World, tmp_path: Path) -> None:
    nodes = pages(1)
    image = world.store.add(nodes)
    log = tmp_path / "log"
    processes = [start(world, image, log, delay_s=0.01) for _ in range(2)]
    assert join(processes) == [0, 0]
    assert served_bytes(log) < 26 * MIB
    assert seen(world, image) == expected(nodes)
    assert all(any(b"pages" in name for name in part) for part in parts(world, image))


def test_two_overlapping_images_at_once_fetch_what_they_share_once(
    world: World, tmp_path: Path
) -> None:
    images = [world.store.add(pages(seed, own=1)) for seed in (1, 2)]
    log = tmp_path / "log"
    processes = [start(world, image, log, delay_s=0.2) for image in images]
    assert join(processes) == [0, 0]
    assert served_bytes(log) < 30 * MIB
    for image, seed in zip(images, (1, 2), strict=True):
        assert seen(world, image) == expected(pages(seed, own=1))


def test_a_part_that_vanishes_after_each_build_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = pages(1)
    image = world.store.add(nodes)
    tree = world.tree_of(image)
    first = next(iter(world.cache.disks))

    def undone(*given: Any, **known: Any) -> None:
        commit(*given, **known)
        shutil.rmtree(world.paths.on(first).tree(tree))

    monkeypatch.setattr(fill, "commit", undone)
    with pytest.raises(Conflict, match=f"does not stay: .* lost its files on disk {first.path};"):
        world.warm(image)
    monkeypatch.undo()
    assert world.warm(image).fetched_bytes < 10 * MIB  # the other parts stayed
    assert seen(world, image) == expected(nodes)


def one_file(world: World, seed: int, at: int, disks: list[Disk]) -> None:
    """Warm an image of one page file that goes to a disk, as only there is much free."""
    ballast = [d.root / "ballast" for i, d in enumerate(disks) if i != at]
    for path in ballast:
        run("fallocate", "-l", "150M", path)
    world.warm(world.store.add({b"pages": Node(noise(20 * MIB, seed))}))
    for path in ballast:
        path.unlink()


def test_the_watermark_of_one_disk_evicts_only_what_lies_on_it(
    world: World, disks: list[Disk]
) -> None:
    for seed, at in ((1, 1), (2, 2), (3, 1)):
        one_file(world, seed, at, disks)
    on = {t: read_mark(world.paths, t).disks for t in world.paths.listed("marks")}  # type: ignore[union-attr]
    first, second = (disk.id for disk in world.cache.disks)
    assert sorted(on.values()) == sorted([(first,), (second,), (first,)])
    free, whole = free_of(str(world.disks[0]))
    run("fallocate", "-l", str(free - int(0.1 * whole)), disks[1].root / "ballast")
    evicted = apply_watermarks(world.cache, Watermarks(0.12, 0.14))
    assert [on[e.tree] for e in evicted] == [(first,)]
    assert evicted[0].freed_bytes >= 20 * MIB
    assert sorted(on[t] for t in world.paths.listed("marks")) == sorted([(first,), (second,)])


def test_a_tree_that_frees_nothing_on_that_disk_stays(world: World, disks: list[Disk]) -> None:
    same = noise(20 * MIB, 1)
    one_file(world, 1, 1, disks)
    older = {b"pages": Node(same), b"own": Node(noise(20 * MIB, 9))}
    for at in (0, 1):  # what is its own goes to the third disk
        run("fallocate", "-l", "150M", disks[at].root / "ballast")
    world.warm(world.store.add(older))
    for at in (0, 1):
        (disks[at].root / "ballast").unlink()
    one_file(world, 2, 1, disks)
    first, second = list(world.cache.disks)
    needed = {first.id: free_of(first.path)[0] + MIB}
    (evicted,) = make_room(world.cache, needed)
    assert evicted.tree == world.tree_of(world.store.add({b"pages": Node(noise(20 * MIB, 2))}))
    assert make_room(world.cache, {MAIN: free_of(str(world.root))[0] + MIB}) == []
    assert second.is_there()


def test_what_was_not_finished_elsewhere_stays(world: World, disks: list[Disk]) -> None:
    partial = Path(world.paths.partial(Digest(bytes(32))))
    partial.mkdir()
    (partial / "a").write_bytes(noise(MIB))
    first = next(iter(world.cache.disks))
    assert make_room(world.cache, {first.id: free_of(first.path)[0] + MIB}) == []
    (evicted,) = make_room(world.cache, {MAIN: free_of(str(world.root))[0] + MIB})
    assert evicted.partial


def test_a_flight_says_what_it_reserves_on_each_disk(
    world: World, disks: list[Disk], stated: list[Flight]
) -> None:
    image = world.store.add(pages(1))
    world.warm(image)
    assert sorted(stated[0].by_disk) == sorted(world.cache.roots())
    assert min(stated[0].by_disk.values()) >= 8 * MIB
    assert sum(stated[0].by_disk.values()) == stated[0].reserved_bytes
    alone = World(disks[0].root / "alone", world.store)
    alone.warm(image)
    assert (stated[1].by_disk, stated[1].reserved_bytes) == ({}, stated[0].reserved_bytes)


def test_what_is_reserved_on_a_disk_is_not_free_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = list(world.cache.disks)[1]
    taken = {second.id: free_of(second.path)[0] - MIB}
    monkeypatch.setattr(spread, "reserved", lambda root, own: taken)
    image = world.store.add(pages(1))
    world.warm(image)
    assert not any(b"pages" in name for name in parts(world, image)[2])
    monkeypatch.undo()
    monkeypatch.setattr(claims, "reserved", lambda root, own: taken)
    with pytest.raises(OutOfResources, match=rf"on disk {second.path}; .* reserved by other"):
        world.warm(world.store.add(pages(2)))


def test_room_is_made_on_the_disk_that_lacks_it(world: World, disks: list[Disk]) -> None:
    for seed, at in ((1, 0), (2, 2)):
        one_file(world, seed, at, disks)
    second = list(world.cache.disks)[1]
    evicted = make_room(world.cache, {second.id: free_of(second.path)[0] + MIB})
    assert len(evicted) == 1
    assert len(world.paths.listed("marks")) == 1
    assert list(world.disks[1].rglob("pages")) == []


def test_a_bad_chunk_on_another_disk_is_found_and_mended(world: World) -> None:
    nodes = pages(1)
    image = world.store.add(nodes)
    world.warm(image)
    name = sorted(n for n in parts(world, image)[1] if b"pages" in n)[-1]
    path = path_of(world, image, name)
    with path.open("r+b") as file:
        file.seek(MIB)
        file.write(b"rot")
    os.utime(path, ns=(0, nodes[b"deep/er/pages-1.img"].mtime_ns))
    report = scrubbed(world, mend=False)
    assert {found for _, found in report.wrong} == {name}
    assert not report.sound
    assert not is_sound(world.paths, world.tree_of(image), world.cache.session)
    assert scrubbed(world).sound
    assert damaged_trees(world.paths) == []
    assert seen(world, image) == expected(nodes)


def test_a_file_that_is_missing_or_on_two_disks_is_told(world: World) -> None:
    image = world.store.add(pages(1))
    world.warm(image)
    name = sorted(n for n in parts(world, image)[1] if b"pages" in n)[-1]
    path = path_of(world, image, name)
    stray = world.tree(image) / os.fsdecode(name)
    stray.write_bytes(b"twice")
    assert {found for _, found in scrubbed(world, mend=False).wrong} == {name}
    stray.unlink()
    path.unlink()
    assert name in {found for _, found in scrubbed(world, mend=False).wrong}
    assert world.warm(image).fetched_bytes < 5 * MIB
    assert seen(world, image) == expected(pages(1))


def test_who_mounts_in_a_way_of_his_own_gets_all_parts_in_one_folder(
    world: World, disks: list[Disk]
) -> None:
    image = world.store.add(pages(1))
    world.warm(image)
    tree = world.tree_of(image)
    at, layer = disks[0].root / "at", disks[0].root / "layer"
    at.mkdir()
    layer.mkdir()

    def mount(folder: str) -> None:
        mount_layers([str(layer), folder, world.cache.empty], source_of("v", tree.hex), str(at))

    mount_one(world.cache, world.paths, tree, str(at), "v", mount=mount)
    assert contents(at) == expected(pages(1))
    assert os.listdir(world.root / "merged") == []
    assert "snapcask-merged" not in Path("/proc/self/mountinfo").read_text()
    assert evict_all(world.cache) == []
    unmount(str(at))
    with pytest.raises(Unsupported, match="several disks"):
        mount_one(world.cache, world.paths, tree, str(at), "w", mount=mount, in_table=False)


def test_the_listing_has_each_disk(world: World) -> None:
    image = world.store.add(pages(1))
    world.warm(image)
    listed = list_cache(world.cache)
    assert [d.path for d in listed.disks] == [str(path) for path in world.disks]
    assert all(d.size_bytes >= 8 * MIB and not d.problem for d in listed.disks)
    assert listed.trees[0].exclusive_bytes >= 24 * MIB
    assert listed.trees[0].state.value == "complete"


def test_one_disk_is_laid_out_as_ever(disks: list[Disk], store: FixtureStore) -> None:
    world = World(disks[0].root / "alone", store)
    image = world.store.add(pages(1))
    world.warm(image)
    assert os.listdir(Path(world.paths.folder) / "places") == []
    assert not (world.root / "disks.msgpack").exists()
    mark = Path(world.paths.mark(world.tree_of(image))).read_bytes()
    assert b"disks" not in mark
    assert contents(world.tree(image)) == expected(pages(1))
    with tempfile.TemporaryDirectory() as at:
        mount_image(world.cache, world.paths, image, at)
        unmount_image(world.cache, at)
