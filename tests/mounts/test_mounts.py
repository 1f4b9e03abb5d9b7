"""A mount of a tree is read-only for everybody, and plain files to who reads it."""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, InvalidInput, NotFound
from tests.filesystems import Disk, run
from tests.transfer.cache.support import World, config, snapshot
from tests.transfer.fixture_store import MIB, Node, contents, expected, noise
from transfer import mounts
from transfer.cache.evict import evict_all, is_needed
from transfer.cache.publish import mount_image, unmount_image
from transfer.cache.usage import pins_of
from transfer.mounts import Mounted, mount_tree, unmount

pytestmark = pytest.mark.root


def test_a_mount_has_the_files_and_its_source_tells_volume_and_tree(
    world: World, place: Path
) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    done = mount_image(world.cache, world.paths, image, str(place), volume="vol-1")
    assert contents(place) == expected(snapshot(1))
    tree = world.tree_of(image).hex
    assert done == [Mounted("vol-1", tree, str(place))]
    assert done[0] in mounts.mounts()
    assert f"snapcask:1:vol-1:{tree}" in Path("/proc/self/mountinfo").read_text()
    unmount_image(world.cache, str(place))
    assert os.listdir(place) == []
    assert done[0] not in mounts.mounts()


@pytest.mark.parametrize("old", [False, True])
def test_writes_and_remounting_fail_for_root_too(
    world: World, place: Path, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    if old:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSYS, "no such call")

        monkeypatch.setattr(mounts, "_mount_new", refuse)
    mount_image(world.cache, world.paths, image, str(place))
    script = f"""
        set -u
        cd {place}
        for command in "touch new" "rm empty" "truncate -s 0 empty" "chmod 777 empty" \
            "mount -o remount,rw {place}" "mount -o remount,rw,bind {place}; touch new"
        do
            if bash -c "$command" 2>/dev/null; then echo "done: $command"; fi
        done
    """
    for prefix in ([], ["unshare", "-m", "--propagation", "private"]):
        done = subprocess.run(
            [*prefix, "bash", "-c", script], capture_output=True, text=True, timeout=30, check=True
        )
        assert "touch" not in done.stdout, done.stdout
        assert "remount,rw {place}" not in done.stdout
    assert contents(place) == expected(snapshot(1))
    options = next(
        x
        for x in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - overlay snapcask" in x
    )
    assert options.rpartition(" - ")[2].split(" ")[2].split(",")[0] == "ro"


def test_direct_reads_and_mapping_work(world: World, place: Path) -> None:
    image = world.store.add({b"pages-1.img": Node(noise(4 * MIB))})
    world.warm(image, using=config(direct=True))
    mount_image(world.cache, world.paths, image, str(place))
    buffer = mmap.mmap(-1, MIB)
    descriptor = os.open(place / "pages-1.img", os.O_RDONLY | os.O_DIRECT)
    try:
        assert os.preadv(descriptor, [buffer], 2 * MIB) == MIB
    finally:
        os.close(descriptor)
    assert buffer[:] == noise(4 * MIB)[2 * MIB : 3 * MIB]
    with (place / "pages-1.img").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped[MIB : MIB + 100] == noise(4 * MIB)[MIB : MIB + 100]
        mapped.close()


def test_another_file_can_be_bound_over_one(world: World, place: Path, tmp_path: Path) -> None:
    image = world.store.add({b"files.img": Node(b"as stored"), b"inventory.img": Node(b"x")})
    world.warm(image)
    mount_image(world.cache, world.paths, image, str(place))
    mine = tmp_path / "files.img"
    mine.write_bytes(b"as wanted")
    run("mount", "--bind", mine, place / "files.img")
    try:
        assert (place / "files.img").read_bytes() == b"as wanted"
    finally:
        run("umount", place / "files.img")
    assert sorted(os.listdir(place)) == ["files.img", "inventory.img"]


def test_several_members_are_directories(world: World, place: Path) -> None:
    trees = [world.store.add_tree(snapshot(seed)) for seed in (1, 1, 2)]
    image = world.store.add_image(*trees, names=["a/b", "c", "d"])
    world.warm(image)
    done = mount_image(world.cache, world.paths, image, str(place))
    assert sorted(os.listdir(place)) == ["a+b", "c", "d"]
    assert contents(place / "d") == expected(snapshot(2))
    assert len(unmount_image(world.cache, str(place))) == len(done) == 3
    assert not is_needed(world.paths, trees[0])


@pytest.mark.parametrize("what", ["link", "file"])
def test_a_link_or_file_in_the_place_of_a_member_is_refused_and_nothing_stays(
    world: World, place: Path, tmp_path: Path, what: str
) -> None:
    image = world.store.add_image(*[world.store.add_tree(snapshot(seed)) for seed in (1, 2)])
    world.warm(image)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    in_the_way = place / "rank-1"
    in_the_way.symlink_to(elsewhere) if what == "link" else in_the_way.touch()
    with pytest.raises(InvalidInput, match="rank-1 is in the way"):
        mount_image(world.cache, world.paths, image, str(place))
    assert os.listdir(place) == ["rank-1"]
    assert os.listdir(elsewhere) == []
    assert not [m for m in mounts.mounts() if m.directory.startswith(str(place))]


def test_one_member_is_the_directory(world: World, place: Path) -> None:
    image = world.store.add_image(*[world.store.add_tree(snapshot(seed)) for seed in (1, 2)])
    world.warm(image)
    mount_image(world.cache, world.paths, image, str(place), member="rank-1")
    assert contents(place) == expected(snapshot(2))


def test_a_mounted_tree_is_pinned_and_not_removed(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    tree = world.tree_of(image)
    mount_image(world.cache, world.paths, image, str(place), volume="v")
    assert pins_of(world.paths, tree, [("v", tree.hex)]) == ["mount-v"]
    assert evict_all(world.cache) == []
    unmount_image(world.cache, str(place))
    assert pins_of(world.paths, tree, []) == []
    assert [found.tree for found in evict_all(world.cache)] == [tree]


def test_a_mount_without_pin_is_enough_to_keep_a_tree(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    mount_tree(str(world.tree(image)), world.cache.empty, "v", str(place))
    assert evict_all(world.cache) == []
    unmount(str(place))


def test_what_is_incomplete_is_not_mounted(world: World, place: Path) -> None:
    image = world.store.add_image(*[world.store.add_tree(snapshot(seed)) for seed in (1, 2)])
    world.warm(image, member="rank-0")
    with pytest.raises(NotFound, match="prefetch"):
        mount_image(world.cache, world.paths, image, str(place))
    assert [m for m in mounts.mounts() if m.directory.startswith(str(place))] == []


def test_what_is_damaged_or_doubtful_is_not_mounted(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image, using=config(fsync=False))
    damage = Path(world.paths.damage(world.tree_of(image)))
    damage.touch()
    with pytest.raises(CorruptData):
        mount_image(world.cache, world.paths, image, str(place))
    damage.unlink()
    world.cache.session = bytes(16)
    with pytest.raises(NotFound, match="without fsync"):
        mount_image(world.cache, world.paths, image, str(place))


def test_nothing_is_mounted_from_another_domain(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    other = world.cache.domain(bytes(16), "others", "elsewhere")
    with pytest.raises(NotFound):
        mount_image(world.cache, other, image, str(place))


def test_a_mount_in_use_is_not_undone(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    mount_image(world.cache, world.paths, image, str(place))
    with (place / "pages-1.img").open("rb"), pytest.raises(Conflict, match="in use"):
        unmount_image(world.cache, str(place))
    assert is_needed(world.paths, world.tree_of(image))
    unmount_image(world.cache, str(place))


@pytest.mark.parametrize("old", [False, True])
def test_odd_paths_of_cache_and_directory_work(
    xfs: Disk, world: World, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old:
        monkeypatch.setattr(mounts, "_mount_new", mounts._mount_old)
    folder = xfs.root / "odd, name: with \\ and a blank"
    (folder / "at x").mkdir(parents=True)
    odd = World(folder / "cache:,\\", world.store)
    image = world.store.add(snapshot(1))
    odd.warm(image)
    mount_image(odd.cache, odd.paths, image, str(folder / "at x"), volume="v")
    assert contents(folder / "at x") == expected(snapshot(1))
    assert [m.directory for m in mounts.mounts() if m.volume == "v"] == [str(folder / "at x")]
    unmount_image(odd.cache, str(folder / "at x"))


def test_a_path_that_is_too_long_for_the_new_calls_works(xfs: Disk, world: World) -> None:
    folder = xfs.root / ("long" * 40)
    (folder / "at").mkdir(parents=True)
    long = World(folder / "cache", world.store)
    image = world.store.add(snapshot(1))
    long.warm(image)
    mount_image(long.cache, long.paths, image, str(folder / "at"))
    assert contents(folder / "at") == expected(snapshot(1))
    unmount_image(long.cache, str(folder / "at"))


def test_bad_names_and_places_are_told(world: World, place: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    with pytest.raises(InvalidInput):
        mount_image(world.cache, world.paths, image, str(place), volume="a:b")
    with pytest.raises(NotFound, match="no directory"):
        mount_image(world.cache, world.paths, image, str(place / "none"))
    with pytest.raises(NotFound, match="nothing of snapcask"):
        unmount_image(world.cache, str(place))
    assert not is_needed(world.paths, world.tree_of(image))


def test_a_place_that_would_hide_the_cache_is_refused(
    world: World, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    inside = world.root / "trash"
    link = place.parent / "link"
    link.symlink_to(world.root.parent)
    for at in ("/", str(world.root), str(world.root.parent), str(inside), str(link)):
        with pytest.raises(InvalidInput, match="would hide the cache"):
            mount_image(world.cache, world.paths, image, at)
    monkeypatch.chdir(place)
    with pytest.raises(InvalidInput, match="no directory to mount at is given"):
        mount_image(world.cache, world.paths, image, "")
    assert not is_needed(world.paths, world.tree_of(image))


def test_a_mount_that_is_undone_in_a_copied_namespace_keeps_its_tree(
    world: World, place: Path
) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    mount_image(world.cache, world.paths, image, str(place))
    run(
        "unshare", "-m", "--propagation", "private", sys.executable, "-m", "snapcask", "umount",
        place, "--cache", world.root, "--allow-root-filesystem",
    )  # fmt: skip
    script = f"""
        from transfer.cache.evict import evict_all
        from transfer.cache.layout import CacheRoot
        evict_all(CacheRoot({str(world.root)!r}, allow_root_filesystem=True))
    """
    command = ["unshare", "-m", sys.executable, "-c", textwrap.dedent(script)]
    run("unshare", "-m", "--propagation", "private", "sh", "-c",
        f"umount {place} && exec {shlex.join(command)}")  # fmt: skip
    assert contents(place) == expected(snapshot(1))
    unmount_image(world.cache, str(place))
    assert pins_of(world.paths, world.tree_of(image), ()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_warm_mount_of_many_files_beside_2000_others_costs_like_one_alone(
    world: World, place: Path, xfs: Disk
) -> None:
    small, image = (world.store.add(snapshot(seed, files=n)) for seed, n in ((2, 1), (1, 4000)))
    world.warm(small)
    world.warm(image)
    alone = _mount_seconds(world, small, place)
    many = xfs.root / "many"
    for i in range(2000):
        (many / str(i)).mkdir(parents=True)
    try:
        for i in range(2000):
            at = str(many / str(i))
            assert mounts._call(165, *_pointers("tmpfs", at, "tmpfs"), 0, 0) == 0
        took = _mount_seconds(world, image, place)
        print("warm mount, seconds:", [round(t, 4) for t in took])
        assert min(took) < 10 * min(alone), (took, alone)
    finally:
        for i in range(2000):
            mounts._call(166, *_pointers(str(many / str(i))), 2)


def _mount_seconds(world: World, image: Digest, place: Path) -> list[float]:
    took = []
    for _ in range(7):
        begun = time.perf_counter()
        mount_image(world.cache, world.paths, image, str(place))
        took.append(time.perf_counter() - begun)
        unmount_image(world.cache, str(place))
    return took


def _pointers(*texts: str) -> list[Any]:
    import ctypes

    return [ctypes.c_char_p(os.fsencode(text)) for text in texts]


def test_many_mounts_of_one_tree_share_one_page_cache(world: World, xfs: Disk) -> None:
    image = world.store.add({b"pages-1.img": Node(noise(32 * MIB))})
    world.warm(image)
    places = [xfs.root / f"at-{i}" for i in range(100)]
    for at in places:
        at.mkdir()
        mount_image(world.cache, world.paths, image, str(at))
    run("sync", "-f", xfs.root)
    Path("/proc/sys/vm/drop_caches").write_text("1\n")
    assert _resident(places[0] / "pages-1.img") < MIB
    (places[0] / "pages-1.img").read_bytes()
    for at in places[1:]:
        assert _resident(at / "pages-1.img") == 32 * MIB  # without having been read there
    for at in places:
        unmount_image(world.cache, str(at))


def _resident(path: Path) -> int:
    """Bytes of a file that are in the page cache, by mincore(2)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = path.stat().st_size
    with path.open("rb") as file:
        args = None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0
        address = libc.mmap(*args)
        pages = (ctypes.c_ubyte * -(-size // 4096))()
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return sum(page & 1 for page in pages) * 4096
