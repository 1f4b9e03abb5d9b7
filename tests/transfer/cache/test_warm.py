"""An image that was asked for is there, whole and right, and costs what is new of it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, NotFound
from tests.filesystems import Disk
from tests.transfer.cache.support import (
    CountingStore,
    World,
    config,
    served_bytes,
    snapshot,
)
from tests.transfer.fixture_store import MIB, FixtureStore, Node, contents, expected, noise, run
from transfer.cache import claims, fill, flights, owners
from transfer.cache.build import commit
from transfer.cache.locks import lock
from transfer.cache.owners import Keys, is_sound
from transfer.catalog import open_catalog
from transfer.plan import U1

Make = Callable[[Path], World]


@pytest.mark.parametrize("direct", [False, True])
def test_the_files_are_those_of_the_image_without_what_lends_rights(
    any_disk: Disk, make_world: Make, direct: bool
) -> None:
    world = make_world(any_disk.root)
    nodes = snapshot(1)
    image = world.store.add(nodes)
    report = world.warm(image, using=config(direct=direct))
    assert contents(world.tree(image)) == expected(nodes)
    assert report.built == 1
    assert not (world.tree(image) / "bin/run").stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
    assert (world.tree(image) / "sub/dir").stat().st_mode & 0o777 == 0o500
    first, again = (world.tree(image) / name for name in ("bin/run", "sub/again"))
    assert first.stat().st_ino == again.stat().st_ino


def test_a_warm_image_costs_nothing_again(world: World) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    report = world.warm(image)
    assert (report.built, report.fetched_bytes) == (0, 0)


def test_zero_runs_are_holes(xfs: Disk, make_world: Make) -> None:
    world = make_world(xfs.root)
    image = world.store.add({b"a": Node(noise(MIB) + bytes(8 * MIB) + noise(MIB, 1))})
    world.warm(image)
    taken = (world.tree(image) / "a").stat().st_blocks * 512
    assert taken < 3 * MIB


def test_on_xfs_a_replica_takes_its_new_bytes_on_disk(xfs: Disk, make_world: Make) -> None:
    world = make_world(xfs.root)
    one, two = (world.store.add(snapshot(seed, mib=40)) for seed in (1, 2))
    world.warm(one)
    before = xfs.used_bytes()
    report = world.warm(two)
    grown = xfs.used_bytes() - before
    assert contents(world.tree(two)) == expected(snapshot(2, mib=40))
    assert report.copied_bytes == 0
    assert report.shared_bytes >= 19 * MIB
    assert 19 * MIB <= report.fetched_bytes <= 22 * MIB
    assert grown <= report.fetched_bytes + 2 * MIB, (grown, report)


def test_on_ext4_a_replica_is_copied_from_the_other(ext4: Disk, make_world: Make) -> None:
    world = make_world(ext4.root)
    one, two = (world.store.add(snapshot(seed)) for seed in (1, 2))
    world.warm(one)
    report = world.warm(two)
    assert contents(world.tree(two)) == expected(snapshot(2))
    assert (report.shared_bytes, report.copied_bytes >= 3 * MIB) == (0, True)
    assert report.fetched_bytes <= 6 * MIB


def test_a_chunk_that_a_tree_has_twice_is_fetched_once(any_disk: Disk, make_world: Make) -> None:
    world = make_world(any_disk.root)
    bytes_ = noise(4 * MIB)
    nodes = {b"a": Node(bytes_), b"b": Node(bytes_), b"c": Node(b"x" + bytes_)}
    nodes |= {b"small-%d" % i: Node(b"the same") for i in range(4)}
    image = world.store.add(nodes)
    report = world.warm(image)
    assert contents(world.tree(image)) == expected(nodes)
    assert report.fetched_bytes < 9 * MIB
    if any_disk.kind != "ext4":
        assert report.shared_bytes > 4 * MIB  # also on the disk it is there once


def test_all_members_are_one_plan_and_each_is_there(world: World) -> None:
    nodes = [snapshot(seed) for seed in (1, 2)]
    trees = [world.store.add_tree(n) for n in nodes]
    image = world.store.add_image(*trees)
    report = world.warm(image)
    assert report.built == 2
    for tree, of_tree in zip(trees, nodes, strict=True):
        assert contents(world.paths.tree(tree)) == expected(of_tree)
    assert report.fetched_bytes < 14 * MIB  # what they share once


def test_one_member_is_warmed_alone(world: World) -> None:
    trees = [world.store.add_tree(snapshot(seed)) for seed in (1, 2)]
    image = world.store.add_image(*trees)
    assert world.warm(image, member="rank-1").built == 1
    assert not os.path.exists(world.paths.tree(trees[0]))


def test_another_domain_gets_nothing_that_is_here(
    world: World, tmp_path: Path, store: FixtureStore
) -> None:
    image = store.add(snapshot(1))
    world.warm(image)
    log = tmp_path / "log"
    counting = run(open_catalog(CountingStore(str(store.root), log)))
    other = world.cache.domain(counting.record.uuid, "others", "elsewhere")
    report = world.warm(image, paths=other, catalog=counting)
    assert (report.built, report.shared_bytes, report.copied_bytes) == (1, 0, 0)
    assert served_bytes(log) >= 8 * MIB
    counting.store.close()  # type: ignore[attr-defined]


def test_another_domain_does_not_join_a_flight(world: World, store: FixtureStore) -> None:
    image = store.add(snapshot(1))
    other = world.cache.domain(bytes(16), "others", "elsewhere")
    tree = world.tree_of(image)
    with lock(world.paths.lock(tree)):  # type: ignore[union-attr]
        assert world.warm(image, paths=other).waited == 0


def test_a_damaged_tree_is_no_donor(world: World) -> None:
    one, two = (world.store.add(snapshot(seed)) for seed in (1, 2))
    world.warm(one)
    Path(world.paths.damage(world.tree_of(one))).touch()
    report = world.warm(two)
    assert (report.shared_bytes, report.copied_bytes) == (0, 0)


def test_a_donor_that_lost_its_files_only_costs_the_bytes(world: World) -> None:
    one, two = (world.store.add(snapshot(seed)) for seed in (1, 2))
    world.warm(one)
    (world.tree(one) / "pages-1.img").unlink()
    world.warm(two)
    assert contents(world.tree(two)) == expected(snapshot(2))


def test_a_broken_owners_table_is_made_again(world: World) -> None:
    one, two = (world.store.add(snapshot(seed)) for seed in (1, 2))
    world.warm(one)
    Path(world.paths.owners(world.tree_of(one))).write_bytes(b"SNAPTBL1 of another version")
    report = world.warm(two)
    assert report.shared_bytes + report.copied_bytes > 3 * MIB


def test_a_key_that_two_digests_share_is_not_taken_for_the_chunk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_keys(digests: U1) -> Keys:
        return (digests[:, 0] % 2).astype(np.uint64)

    for module in (owners, claims, flights):
        monkeypatch.setattr(module, "keys_of", same_keys)
    one, two = (world.store.add(snapshot(seed)) for seed in (1, 2))
    world.warm(one)
    world.warm(two)
    assert contents(world.tree(two)) == expected(snapshot(2))


def test_a_damaged_chunk_in_the_store_is_never_written_as_complete(world: World) -> None:
    image = world.store.add(snapshot(1))
    path = world.store.root / layout.pack_key(world.store.packs[0])
    raw = bytearray(path.read_bytes())
    raw[8192] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptData):
        world.warm(image)
    assert not is_sound(world.paths, world.tree_of(image), world.cache.session)


def test_a_tree_that_is_gone_after_each_build_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.store.add({b"a": Node(noise(MIB))})
    tree, builds = world.tree_of(image), []

    def undone(*given: Any, **known: Any) -> None:
        commit(*given, **known)
        builds.append(os.path.exists(world.paths.mark(tree)))
        os.unlink(world.paths.mark(tree))
        shutil.rmtree(world.paths.tree(tree))

    monkeypatch.setattr(fill, "commit", undone)
    with pytest.raises(Conflict, match=rf"{tree.short} does not stay: .* gone from the cache"):
        world.warm(image)
    assert builds == [True] * len(builds)
    assert 1 < len(builds) < 10
    monkeypatch.undo()
    assert world.warm(image).built == 1
    assert contents(world.tree(image))[b"a"] == noise(MIB)


def test_a_tree_that_was_not_synced_is_read_again_in_another_session(world: World) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image, using=config(fsync=False))
    assert is_sound(world.paths, world.tree_of(image), world.cache.session)
    world.cache.session = bytes(16)
    assert not is_sound(world.paths, world.tree_of(image), world.cache.session)
    path = world.tree(image) / "pages-1.img"
    with path.open("r+b") as file:
        file.seek(5 * MIB + MIB // 2)
        file.write(b"what a power cut left")
    report = world.warm(image)
    assert 0 < report.fetched_bytes < 4 * MIB
    assert contents(world.tree(image)) == expected(snapshot(1))
    assert is_sound(world.paths, world.tree_of(image), world.cache.session)


def test_a_tree_that_was_not_synced_and_is_right_costs_no_fetch(world: World) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image, using=config(fsync=False))
    world.cache.session = bytes(16)
    report = world.warm(image)
    assert report.fetched_bytes == 0
    assert is_sound(world.paths, world.tree_of(image), b"yet another")


def test_an_image_whose_store_is_gone_fails_by_name_and_stays(world: World) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    shutil.rmtree(world.store.root)
    with pytest.raises(NotFound):
        world.warm(Digest(bytes(32)))
    assert is_sound(world.paths, world.tree_of_kept(image), world.cache.session)
