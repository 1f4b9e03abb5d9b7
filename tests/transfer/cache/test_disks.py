"""Which directories can be disks of a cache, and what follows where one is not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, InvalidInput, NotFound
from tests.filesystems import Disk, disk, run
from tests.transfer.cache.several import hide, pages, parts, path_of, seen, world_on
from tests.transfer.cache.support import World
from tests.transfer.cache.test_scrub import scrubbed
from tests.transfer.fixture_store import MIB, FixtureStore, contents, expected
from transfer.cache.build import Build
from transfer.cache.disks import MAIN, NewDisk, forget_disk
from transfer.cache.evict import evict_all
from transfer.cache.layout import CacheRoot
from transfer.cache.listing import list_cache
from transfer.cache.owners import find_donors, is_sound
from transfer.cache.publish import mount_image, unmount_image
from transfer.plan import Numbers

pytestmark = pytest.mark.root


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Disk]]:
    """Two XFS."""
    with disk(tmp_path, "xfs", name="a") as one, disk(tmp_path, "xfs", name="b") as other:
        yield [one, other]


@pytest.fixture
def world(disks: list[Disk], store: FixtureStore) -> World:
    """A cache on them."""
    return world_on(disks, store)


def problem(world: World) -> str:
    """What the cache says of its only further disk."""
    world.reopen()
    (found,) = world.cache.disks
    return found.problem


def test_a_disk_is_known_to_who_opens_the_cache_without_naming_it(world: World) -> None:
    again = CacheRoot(str(world.root))
    assert [d.path for d in again.disks] == [str(world.disks[0])]
    assert [d.id for d in again.disks] == [d.id for d in world.cache.disks]
    assert os.stat(world.disks[0]).st_mode & 0o777 == 0o700


def test_the_root_filesystem_is_refused_unless_it_is_allowed_for_the_disk(
    disks: list[Disk], tmp_path: Path
) -> None:
    if os.stat(tmp_path).st_dev != os.stat("/").st_dev:
        pytest.skip("the tests' folder is not on the root filesystem")
    new = str(tmp_path / "part")
    with pytest.raises(InvalidInput, match=r"disk .*root filesystem.*--allow-root-disk"):
        CacheRoot(str(disks[0].root / "cache"), allow_root_filesystem=True, disks=[NewDisk(new)])
    assert not os.path.exists(new)
    cache = CacheRoot(str(disks[0].root / "cache"), disks=[NewDisk(new, on_root=True)])
    assert [d.problem for d in cache.disks] == [""]


def test_what_can_not_be_a_disk_is_refused_with_the_reason(
    world: World, disks: list[Disk], tmp_path: Path
) -> None:
    def refused(path: Path, why: str, root: Path = world.root) -> None:
        with pytest.raises(InvalidInput, match=why):
            CacheRoot(str(root), disks=[NewDisk(str(path))])

    refused(disks[0].root / "part", "same filesystem as .*cache")
    assert not (disks[0].root / "part").exists()
    refused(disks[1].root / "another", "same filesystem as .*part")
    refused(world.disks[0], "belongs to another cache", disks[0].root / "cache-2")
    with disk(tmp_path, "xfs", name="c") as third:
        (third.root / "thesis").mkdir()
        (third.root / "thesis" / "a.tex").touch()
        refused(third.root / "thesis", "not empty")
        with pytest.raises(NotFound, match="does not exist"):
            CacheRoot(str(world.root), disks=[NewDisk(str(third.root / "a" / "b"))])
    assert len(list(CacheRoot(str(world.root)).disks)) == 1


def test_a_disk_whose_adding_was_cut_off_is_taken_up(world: World) -> None:
    before = [d.id for d in world.cache.disks]
    (world.root / "disks.msgpack").unlink()
    world.reopen()
    assert [d.id for d in world.cache.disks] == before


def test_a_disk_that_is_not_there_is_told_of_in_one_line(
    world: World, disks: list[Disk], caplog: pytest.LogCaptureFixture
) -> None:
    disks[1].unmount()
    assert "is not there; mount it, or take it out" in problem(world)
    assert len(caplog.records) == 1
    assert str(world.disks[0]) in caplog.text
    assert os.listdir(disks[1].root) == []


def test_a_disk_that_is_hidden_is_told(world: World, disks: list[Disk]) -> None:
    hide(disks[1])
    world.disks[0].mkdir()
    assert "is hidden by another mount, or not mounted" in problem(world)
    assert os.listdir(world.disks[0]) == []


def test_a_disk_that_was_replaced_is_told(world: World, disks: list[Disk]) -> None:
    with_another = CacheRoot(
        str(disks[0].root / "cache-2"), disks=[NewDisk(str(disks[1].root / "other"))]
    )
    assert not [d.problem for d in with_another.disks if d.problem]
    os.rename(world.disks[0], disks[1].root / "away")
    os.rename(disks[1].root / "other", world.disks[0])
    assert "belongs to another cache" in problem(world)
    (world.disks[0] / "disk.msgpack").unlink()
    shutil.copy(disks[1].root / "away" / "disk.msgpack", world.disks[0] / "disk.msgpack")
    assert problem(world) == ""


def test_another_disk_of_the_same_cache_is_told(
    world: World, disks: list[Disk], tmp_path: Path
) -> None:
    with disk(tmp_path, "xfs", name="c") as third:
        CacheRoot(str(world.root), disks=[NewDisk(str(third.root / "part"))])
        raw = (third.root / "part" / "disk.msgpack").read_bytes()
        (world.disks[0] / "disk.msgpack").write_bytes(raw)
        world.reopen()
        first, second = world.cache.disks
        assert "is another disk than the one recorded" in first.problem
        assert not second.problem


@pytest.fixture
def image(world: World) -> Digest:
    """An image on both disks."""
    made = world.store.add(pages(1, files=4))
    world.warm(made)
    assert all(parts(world, made))
    return made


def test_an_empty_path_of_a_disk_is_refused(world: World) -> None:
    with pytest.raises(InvalidInput, match="has an empty path"):
        CacheRoot(str(world.root), allow_root_filesystem=True, disks=[NewDisk("")])


@pytest.mark.parametrize("how", ["unmounted", "hidden", "forgotten"])
def test_a_tree_with_a_part_on_a_missing_disk_is_not_used_and_is_built_again(
    world: World, disks: list[Disk], image: Digest, how: str, tmp_path: Path
) -> None:
    tree = world.tree_of(image)
    match how:
        case "unmounted":
            disks[1].unmount()
        case "hidden":
            hide(disks[1])
        case _:
            forget_disk(str(world.root), str(world.disks[0]))
            world.disks = ()
    world.reopen()
    assert not is_sound(world.paths, tree, world.cache.session)
    at = tmp_path / "at"
    at.mkdir()
    with pytest.raises(NotFound, match=r"has files on disk .*, which is not there"):
        mount_image(world.cache, world.paths, image, str(at))
    digests = world.store.content(tree).tree.chunk_digest
    assert find_donors(world.paths, world.cache.session, digests, but=frozenset()) == []
    found = scrubbed(world)
    assert not found.sound
    assert any("builds it again" in line for line in found.problems)
    assert [t.state.value for t in list_cache(world.cache).trees] == ["missing"]
    report = world.warm(image)
    assert 8 * MIB <= report.fetched_bytes < 9 * MIB  # what lay on the disk alone
    assert seen(world, image) == expected(pages(1, files=4))
    assert contents(world.tree(image)) == expected(pages(1, files=4))


def test_a_tree_is_whole_again_when_its_disk_is_back(
    world: World, disks: list[Disk], image: Digest
) -> None:
    tree = world.tree_of(image)
    disks[1].unmount()
    assert not is_sound(world.paths, tree, world.cache.session)
    disks[1].mount()
    assert is_sound(world.paths, tree, world.cache.session)  # the same process notices it
    assert world.warm(image).built == 0
    assert seen(world, image) == expected(pages(1, files=4))


def test_a_part_that_comes_back_after_its_tree_was_built_again_is_removed(
    world: World, disks: list[Disk], image: Digest
) -> None:
    disks[1].unmount()
    world.reopen()
    world.warm(image)
    disks[1].mount()
    world.reopen()
    stray = Path(world.paths.on(next(iter(world.cache.disks))).tree(world.tree_of(image)))
    assert stray.is_dir()
    assert seen(world, image) == expected(pages(1, files=4))
    other = world.store.add(pages(2, files=1))
    world.warm(other)
    assert len(evict_all(world.cache)) == 3
    assert not stray.exists()


def test_a_mounted_tree_stays_as_it_is_while_its_disk_is_missing(
    world: World, disks: list[Disk], image: Digest
) -> None:
    at = disks[0].root / "at"
    at.mkdir()
    mount_image(world.cache, world.paths, image, str(at))
    hide(disks[1])
    assert contents(at) == expected(pages(1, files=4))
    with pytest.raises(CorruptData, match="is mounted; unmount it"):
        world.warm(image)
    assert world.tree(image).is_dir()
    run("umount", disks[1].root)
    assert is_sound(world.paths, world.tree_of(image), world.cache.session)
    unmount_image(world.cache, str(at))


@pytest.mark.parametrize("raw", [None, b"", b"garbage"])
def test_the_record_of_the_places_is_found_again_by_looking(
    world: World, image: Digest, raw: bytes | None
) -> None:
    tree = world.tree_of(image)
    Path(world.paths.places(tree)).unlink()
    if raw is not None:
        Path(world.paths.places(tree)).write_bytes(raw)
    assert not is_sound(world.paths, tree, world.cache.session)
    report = world.warm(image)
    assert (report.built, report.fetched_bytes) == (0, 0)
    assert seen(world, image) == expected(pages(1, files=4))
    assert scrubbed(world).sound


def test_without_that_record_and_a_disk_all_is_fetched_again(
    world: World, disks: list[Disk], image: Digest
) -> None:
    Path(world.paths.places(world.tree_of(image))).unlink()
    disks[1].unmount()
    world.reopen()
    assert world.warm(image).fetched_bytes > 16 * MIB
    assert seen(world, image) == expected(pages(1, files=4))


def test_a_part_that_was_removed_is_built_again(world: World, image: Digest) -> None:
    part = Path(world.paths.on(next(iter(world.cache.disks))).tree(world.tree_of(image)))
    shutil.rmtree(part)
    report = world.warm(image)
    assert 8 * MIB <= report.fetched_bytes < 9 * MIB
    assert seen(world, image) == expected(pages(1, files=4))


def test_a_disk_that_is_hidden_in_the_middle_is_noticed_and_gets_nothing(
    world: World, disks: list[Disk], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world.store.add(pages(1, files=4))
    note, left = Build.note, [3]

    def then_hide(build: Build, numbers: Numbers) -> None:
        note(build, numbers)
        left[0] -= 1
        if not left[0]:
            hide(disks[1])
            world.disks[0].mkdir()

    monkeypatch.setattr(Build, "note", then_hide)
    with pytest.raises(Conflict, match=r"disk .*hidden by a later mount"):
        world.warm(made)
    assert os.listdir(world.disks[0]) == []
    assert not is_sound(world.paths, world.tree_of(made), world.cache.session)
    run("umount", disks[1].root)
    assert world.warm(made).fetched_bytes == 0
    assert seen(world, made) == expected(pages(1, files=4))


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_build_goes_on_without_a_disk_that_went_away(
    world: World, disks: list[Disk], monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    made = world.store.add(pages(1, files=4))
    with monkeypatch.context() as patched:
        patched.setattr("transfer.cache.fill.commit", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            world.warm(made)
    if comes_back:  # just after it was seen which disks are there
        monkeypatch.setattr(world.cache, "roots", lambda: {MAIN: world.cache.path})
    else:
        disks[1].unmount()
        world.reopen()
    report = world.warm(made)
    assert 8 * MIB <= report.fetched_bytes < 9 * MIB
    assert contents(world.tree(made)) == expected(pages(1, files=4))


def test_a_disk_that_another_process_added_is_found(disks: list[Disk], store: FixtureStore) -> None:
    early = World(disks[0].root / "cache", store)
    late = world_on(disks, store)
    made = late.store.add(pages(1, files=4))
    late.warm(made)
    assert list(early.cache.disks) == []
    assert is_sound(early.paths, early.tree_of(made), early.cache.session)
    assert early.warm(made).built == 0
    assert seen(early, made) == expected(pages(1, files=4))


def test_forgetting_what_is_no_disk_is_told(world: World) -> None:
    with pytest.raises(NotFound, match=r"is no disk of the cache, which has: .*part"):
        forget_disk(str(world.root), "/nowhere")


def test_files_of_one_inode_lie_on_one_disk(world: World, image: Digest) -> None:
    first = path_of(world, image, b"deep/er/pages-0.img").stat()
    for name in (b"deep/er/same.img", b"elsewhere/a/b/again.img"):
        assert os.path.samestat(path_of(world, image, name).stat(), first)
    assert first.st_nlink == 3
