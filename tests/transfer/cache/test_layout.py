"""What can be a cache, and what is refused with the reason."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgfmt.errors import AccessDenied, Conflict, InvalidImage, InvalidInput, NotFound, Unsupported
from imgfmt.wire import encode_record
from tests.filesystems import Disk, disk, run
from tests.transfer.cache.support import World, snapshot
from tests.transfer.fixture_store import FixtureStore, contents, expected
from transfer.cache import folders, layout
from transfer.cache.build import Build
from transfer.cache.evict import evict_all
from transfer.cache.folders import make_folder
from transfer.cache.layout import CacheRoot, domain_name
from transfer.cache.locks import Lock, waited
from transfer.cache.owners import is_sound
from transfer.filesystems import filesystem_type
from transfer.plan import Numbers
from transfer.session import session_of

Make = Callable[[Path], World]


def test_a_new_cache_is_for_its_owner_alone(tmp_path: Path) -> None:
    cache = CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)
    assert stat.S_IMODE(os.stat(cache.path).st_mode) == 0o700
    CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)


def test_the_root_filesystem_is_refused_unless_allowed(tmp_path: Path) -> None:
    if os.stat(tmp_path).st_dev != os.stat("/").st_dev:
        pytest.skip("the tests' folder is not on the root filesystem")
    with pytest.raises(InvalidInput, match="root filesystem"):
        CacheRoot(str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_of_two_that_make_a_cache_at_once_both_use_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "cache")
    record, made = tmp_path / "cache/cache.msgpack", []

    def folder_comes(at: str) -> str:
        if at == str(tmp_path):
            os.mkdir(path, 0o700)
        return filesystem_type(at)

    def record_comes(at: str) -> Lock:
        monkeypatch.undo()
        CacheRoot(path, allow_root_filesystem=True)
        made.append(record.read_bytes())
        return waited(at)

    monkeypatch.setattr(folders, "filesystem_type", folder_comes)
    monkeypatch.setattr(layout, "waited", record_comes)
    CacheRoot(path, allow_root_filesystem=True)
    assert made == [record.read_bytes()]


def test_a_cache_whose_record_was_seen_too_late_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes it between the look at its record and the look at its names."""
    path = str(tmp_path / "cache")

    def made_by_another(*given: Any, **known: Any) -> None:
        make_folder(*given, **known)
        monkeypatch.setattr(layout, "read_file", absent_once)

    def absent_once(at: str) -> bytes | None:
        monkeypatch.undo()
        World(tmp_path / "cache", FixtureStore(tmp_path / "store"))
        (tmp_path / "cache/csi").mkdir()
        return None

    monkeypatch.setattr(layout, "make_folder", made_by_another)
    CacheRoot(path, allow_root_filesystem=True)


def test_a_cache_whose_making_was_cut_off_is_made_to_its_end(tmp_path: Path) -> None:
    for name in ("empty", "trash"):
        (tmp_path / name).mkdir()
    for name in ("plan.lock", ".new-0123-cache.msgpack"):
        (tmp_path / name).touch()
    CacheRoot(str(tmp_path), allow_root_filesystem=True)
    assert (tmp_path / "domains").is_dir()


@pytest.mark.parametrize("kind", ["nfs4", "fuse.sshfs", "overlay"])
def test_filesystems_without_dependable_locks_are_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "filesystem_type", lambda path: kind)
    monkeypatch.setattr(folders, "is_remote", lambda path: kind != "overlay")
    with pytest.raises(InvalidInput, match="local disk"):
        CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)


@pytest.mark.root
def test_a_real_overlay_is_refused(xfs: Disk) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (xfs.root / name).mkdir()
    options = ",".join(f"{n}dir={xfs.root / n}" for n in ("lower", "upper", "work"))
    run("mount", "-t", "overlay", "overlay", "-o", options, xfs.root / "merged")
    with pytest.raises(InvalidInput, match="overlayfs"):
        CacheRoot(str(xfs.root / "merged" / "cache"))


@pytest.mark.root
def test_a_read_only_filesystem_is_refused(xfs: Disk) -> None:
    CacheRoot(str(xfs.root / "cache"))
    run("mount", "-o", "remount,ro", xfs.root)
    with pytest.raises(AccessDenied, match="read-only"):
        CacheRoot(str(xfs.root / "cache"))


@pytest.mark.root
def test_tmpfs_works(tmp_path: Path, make_world: Make) -> None:
    root = tmp_path / "memory"
    root.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", root)
    try:
        world = make_world(root)
        images = [world.store.add(snapshot(seed, mib=4)) for seed in (1, 2)]
        for image, seed in zip(images, (1, 2), strict=True):
            world.warm(image)
            assert contents(world.tree(image)) == expected(snapshot(seed, mib=4))
        assert len(evict_all(world.cache)) == 2
    finally:
        run("umount", root)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    with pytest.raises(AccessDenied, match="others can write"):
        CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)


@pytest.mark.root
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    (tmp_path / "cache").mkdir(mode=0o700)
    os.chown(tmp_path / "cache", 12345, 12345)
    with pytest.raises(AccessDenied, match="belongs to user 12345"):
        CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / "thesis.tex").touch()
    with pytest.raises(InvalidInput, match="not empty"):
        CacheRoot(str(tmp_path / "cache"), allow_root_filesystem=True)
    with pytest.raises(NotFound):
        CacheRoot(str(tmp_path / "none" / "cache"), allow_root_filesystem=True)


def test_folders_that_somebody_removed_are_made_again(world: World) -> None:
    world.warm(world.store.add(snapshot(1)))
    for name in ("empty", "trash"):
        (world.root / name).rmdir()
    shutil.rmtree(world.root / "domains")
    world.reopen()
    world.warm(world.store.add(snapshot(1)))
    assert sorted(path.name for path in world.root.iterdir() if path.is_dir()) == [
        "domains", "empty", "trash",
    ]  # fmt: skip


def test_a_damaged_record_is_told_with_the_way_out(world: World) -> None:
    (world.root / "cache.msgpack").write_bytes(b"junk")
    with pytest.raises(InvalidImage, match="empty the directory: all in it can be fetched again"):
        world.reopen()


def test_a_cache_of_a_newer_version_is_refused_and_not_touched(world: World) -> None:
    path = world.root / "cache.msgpack"
    raw = encode_record("cache", {"id": bytes(16)}, read=["delta-1"])
    path.write_bytes(raw)
    with pytest.raises(Unsupported, match="delta-1"):
        world.reopen()
    path.write_bytes(b"\x81garbage")
    with pytest.raises(InvalidImage):
        world.reopen()
    assert path.read_bytes() == b"\x81garbage"


def test_a_mark_of_a_newer_version_is_refused(world: World) -> None:
    image = world.store.add(snapshot(1, mib=4))
    world.warm(image)
    tree = world.tree_of(image)
    Path(world.paths.mark(tree)).write_bytes(encode_record("cache-mark", {}, read=["new"]))
    with pytest.raises(Unsupported):
        is_sound(world.paths, tree, world.cache.session)
    with pytest.raises(Unsupported):
        world.warm(image)
    assert world.tree(image).is_dir()


def test_a_cache_that_was_deleted_meanwhile_is_noticed(world: World) -> None:
    image = world.store.add(snapshot(1, mib=4))
    shutil.rmtree(world.root)
    with pytest.raises(Conflict, match="removed"):
        world.warm(image)
    assert not world.root.exists()


def test_a_cache_that_is_deleted_in_the_middle_of_a_download_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.store.add(snapshot(1, mib=4))
    note = Build.note

    def then_delete(build: Build, numbers: Numbers) -> None:
        note(build, numbers)
        shutil.rmtree(world.root, ignore_errors=True)

    monkeypatch.setattr(Build, "note", then_delete)
    with pytest.raises(Conflict, match="removed"):
        world.warm(image)
    assert not world.root.exists()


@pytest.mark.root
def test_a_cache_that_a_later_mount_hides_is_noticed(xfs: Disk, make_world: Make) -> None:
    world = make_world(xfs.root)
    image = world.store.add(snapshot(1, mib=4))
    run("mount", "-t", "tmpfs", "tmpfs", world.root)
    try:
        with pytest.raises(Conflict, match="hidden by a later mount"):
            world.warm(image)
        assert os.listdir(world.root) == []
    finally:
        run("umount", world.root)
    world.warm(image)


@pytest.mark.root
def test_a_session_ends_with_the_mount(tmp_path: Path) -> None:
    with disk(tmp_path, "ext4") as made:
        before = session_of(str(made.root))
        assert session_of(str(made.root)) == before
        made.unmount()
        made.mount()
        assert session_of(str(made.root)) != before


def test_domains_differ_by_store_and_by_scope() -> None:
    names = {domain_name(uuid, scope) for uuid in (bytes(16), b"1" * 16) for scope in ("a", "b")}
    assert len(names) == 4
