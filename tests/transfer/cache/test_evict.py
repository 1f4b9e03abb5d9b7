"""What goes when room is needed, and what never goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, InvalidInput, OutOfResources
from tests.filesystems import Disk
from tests.transfer.cache.support import World, snapshot
from tests.transfer.fixture_store import MIB, Node, contents, noise
from transfer.cache import claims
from transfer.cache.disks import MAIN
from transfer.cache.evict import (
    Watermarks,
    apply_watermarks,
    evict_all,
    free_bytes,
    make_room,
    remove_image,
    size_bytes,
)
from transfer.cache.listing import list_cache
from transfer.cache.locks import lock
from transfer.cache.owners import find_donors, read_mark
from transfer.cache.usage import add_pin, exclusive_bytes, new_pin, pins_of, remove_pin, touch

Make = Callable[[Path], World]


def fill(world: World, n: int, mib: int = 4) -> list[Digest]:
    """Images of `mib` MiB that share nothing, warmed one after the other; their trees."""
    images = [world.store.add({b"a": Node(noise(mib * MIB, 50 + i))}) for i in range(n)]
    for image in images:
        world.warm(image)
    return [world.tree_of(image) for image in images]


def there(world: World, trees: list[Digest]) -> list[bool]:
    """Which trees are complete."""
    return [read_mark(world.paths, tree) is not None for tree in trees]


def test_the_least_recently_used_goes_first(world: World) -> None:
    trees = fill(world, 3)
    touch(world.paths, trees[0])
    evicted = apply_watermarks(world.cache, _at_most(9 * MIB))
    assert [e.tree for e in evicted] == [trees[1]]
    assert not os.path.exists(world.paths.tree(trees[1]))


def _at_most(n_bytes: int) -> Watermarks:
    return Watermarks(begin_free=0.0, end_free=0.0, max_bytes=n_bytes, low_share=1.0)


def test_a_clock_that_jumps_back_does_not_change_the_order(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = fill(world, 2)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000_000)
    touch(world.paths, trees[0])
    (evicted,) = apply_watermarks(world.cache, _at_most(5 * MIB))
    assert evicted.tree == trees[1]


def test_eviction_begins_at_one_mark_and_ends_at_the_other(xfs: Disk, make_world: Make) -> None:
    world = make_world(xfs.root)
    trees = fill(world, 6, mib=8)
    free, whole = free_bytes(world.cache)
    here = free / whole
    assert apply_watermarks(world.cache, Watermarks(here - 0.01, here + 0.04)) == []
    evicted = apply_watermarks(world.cache, Watermarks(here + 0.001, here + 0.04))
    assert [e.tree for e in evicted] == trees[: len(evicted)]
    assert free_bytes(world.cache)[0] >= (here + 0.03) * whole
    assert len(evicted) < 6


@pytest.mark.parametrize("n_shared", [0, 1])
def test_a_tree_counts_by_what_it_alone_has(xfs: Disk, make_world: Make, n_shared: int) -> None:
    world = make_world(xfs.root)
    one, two = (world.store.add(snapshot(seed, mib=16)) for seed in (1, 2))
    world.warm(one)
    trees = [world.tree_of(one)]
    if n_shared:
        world.warm(two)
        trees.append(world.tree_of(two))
    alone = exclusive_bytes(world.paths, trees, shares={MAIN: True})[trees[0]][MAIN]
    assert abs(alone - (16 - 8 * n_shared) * MIB) < MIB
    assert exclusive_bytes(world.paths, trees, shares={MAIN: False})[trees[0]][MAIN] > 16 * MIB
    assert abs(size_bytes(world.cache) - (16 + 8 * n_shared) * MIB) < MIB


def test_a_tree_that_would_free_nothing_stays_while_another_would(
    xfs: Disk, make_world: Make
) -> None:
    world = make_world(xfs.root)
    same = noise(4 * MIB)
    images = [
        world.store.add({b"a": Node(same)}),
        world.store.add({b"b": Node(same)}),
        world.store.add({b"c": Node(noise(4 * MIB, 9))}),
    ]
    for image in images:
        world.warm(image)
    trees = [world.tree_of(image) for image in images]
    evicted = make_room(world.cache, {MAIN: free_bytes(world.cache)[0] + 1})
    assert [e.tree for e in evicted] == [trees[2]]
    freed = [e.freed_bytes for e in evict_all(world.cache)]
    assert freed == [0, 4 * MIB]


def test_nothing_goes_where_all_of_it_would_not_do(world: World) -> None:
    trees = fill(world, 3)
    free, whole = free_bytes(world.cache)
    assert make_room(world.cache, {MAIN: whole}) == []
    assert there(world, trees) == [True, True, True]
    partial = Path(world.paths.partial(Digest(bytes(32))))
    partial.mkdir()
    (partial / "a").write_bytes(noise(MIB))
    assert make_room(world.cache, {MAIN: whole}) == []
    assert partial.exists()
    assert make_room(world.cache, {MAIN: free + MIB}) != []


def test_an_image_that_is_pinned_or_mounted_is_not_removed(world: World) -> None:
    image = world.store.add({b"a": Node(noise(MIB))})
    world.warm(image)
    tree = world.tree_of(image)
    for pin_id, said in (("ci", "unpin --id ci"), ("mount-v", "mounted elsewhere, by pin mount-v")):
        add_pin(world.paths, tree, pin_id, new_pin("kept"), fsync=True)
        with pytest.raises(Conflict, match=said):
            remove_image(world.cache, world.paths, image, frozenset({tree}))
        assert world.paths.listed("images") == [image]
        remove_pin(world.paths, tree, pin_id)
    assert len(remove_image(world.cache, world.paths, image, frozenset({tree}))) == 1
    assert world.paths.listed("images") == []


def test_what_is_pinned_stays(world: World) -> None:
    trees = fill(world, 2)
    add_pin(world.paths, trees[0], "user", new_pin("kept"), fsync=True)
    evict_all(world.cache)
    assert there(world, trees) == [True, False]
    remove_pin(world.paths, trees[0], "user")
    evict_all(world.cache)
    assert there(world, trees) == [False, False]


def test_a_pin_of_another_version_holds(world: World) -> None:
    trees = fill(world, 1)
    add_pin(world.paths, trees[0], "mount-x", new_pin("kept", directory="/at"), fsync=True)
    Path(world.paths.pins(trees[0]), "mount-x").write_bytes(b"from the future")
    assert pins_of(world.paths, trees[0], []) == ["mount-x"]


def test_a_mount_pin_of_another_boot_is_stale(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer.cache import usage

    trees = fill(world, 1)
    add_pin(world.paths, trees[0], "mount-x", new_pin("m", directory="/at"), fsync=True)
    assert pins_of(world.paths, trees[0], []) == ["mount-x"]  # it may be about to be mounted
    monkeypatch.setattr(usage, "boot_id", lambda: bytes(range(16)))
    monkeypatch.setattr(usage, "_MOUNTING_NS", -1)
    assert pins_of(world.paths, trees[0], []) == []


def test_a_mount_pin_of_another_namespace_holds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer.cache import usage

    trees = fill(world, 1)
    add_pin(world.paths, trees[0], "mount-x", new_pin("m", directory="/at"), fsync=True)
    monkeypatch.setattr(usage, "_MOUNTING_NS", -1)
    monkeypatch.setattr(usage, "namespace_id", lambda: 1)
    assert pins_of(world.paths, trees[0], []) == ["mount-x"]


def test_a_donor_of_a_running_plan_stays(world: World) -> None:
    trees = fill(world, 1)
    image = world.store.add({b"x": Node(noise(4 * MIB, 50) + b"more")})
    content = world.store.content(world.tree_of(image)).tree
    (donor,) = find_donors(world.paths, world.cache.session, content.chunk_digest, but=frozenset())
    evict_all(world.cache)
    assert there(world, trees) == [True]
    donor.lock.close()
    evict_all(world.cache)
    assert there(world, trees) == [False]


def test_what_is_being_built_stays_and_what_was_left_goes(world: World) -> None:
    tree = Digest(bytes(range(32)))
    partial = Path(world.paths.partial(tree))
    partial.mkdir()
    (partial / "a").write_bytes(noise(MIB))
    held = lock(world.paths.lock(tree))
    assert held is not None
    with held:
        assert evict_all(world.cache) == []
    (evicted,) = evict_all(world.cache)
    assert evicted.partial
    assert evicted.freed_bytes >= MIB
    assert not partial.exists()


def test_room_is_made_before_a_download(ext4: Disk, make_world: Make) -> None:
    world = make_world(ext4.root)
    trees = fill(world, 2, mib=40)
    image = world.store.add({b"big": Node(noise(40 * MIB, 99))})
    world.warm(image)
    assert there(world, trees) == [False, True]
    assert contents(world.tree(image)) == {b"big": noise(40 * MIB, 99)}


def test_what_can_never_fit_fails_with_the_numbers_and_writes_nothing(
    ext4: Disk, make_world: Make
) -> None:
    world = make_world(ext4.root)
    image = world.store.add({b"big": Node(noise(160 * MIB, 99))})
    with pytest.raises(OutOfResources, match=r"needs 1677\d+ bytes; its filesystem has \d+ free"):
        world.warm(image)
    partial = Path(world.paths.partial(world.tree_of(image)))
    assert sum(f.stat().st_blocks for f in partial.rglob("big")) == 0


def test_what_another_download_has_reserved_is_not_free(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = world.store.add(snapshot(1))
    free = free_bytes(world.cache)[0]
    monkeypatch.setattr(claims, "reserved", lambda root, own: {MAIN: free - MIB})
    with pytest.raises(OutOfResources, match="reserved by other downloads"):
        world.warm(image)


def test_a_disk_that_fills_up_in_the_middle_evicts_once(
    ext4: Disk, make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(ext4.root)
    trees = fill(world, 2, mib=40)
    image = world.store.add({b"big": Node(noise(40 * MIB, 99))})
    monkeypatch.setattr(claims.Claimant, "_check_space", lambda self, n: None)
    world.warm(image)
    assert there(world, trees) == [False, True]
    assert contents(world.tree(image)) == {b"big": noise(40 * MIB, 99)}


def test_a_disk_that_stays_full_fails_and_what_was_written_stays(
    ext4: Disk, make_world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(ext4.root)
    image = world.store.add({b"big": Node(noise(160 * MIB, 99))})
    monkeypatch.setattr(claims.Claimant, "_check_space", lambda self, n: None)
    with pytest.raises(OutOfResources):
        world.warm(image)
    assert os.path.exists(world.paths.journal(world.tree_of(image)))


def test_watermarks_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInput):
        Watermarks(begin_free=0.5, end_free=0.4)


def test_the_listing_tells_what_each_tree_takes_and_what_keeps_it(world: World) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    add_pin(world.paths, world.tree_of(image), "user", new_pin("x"), fsync=True)
    listed = list_cache(world.cache)
    (tree,) = listed.trees
    assert (tree.state.value, tree.pins) == ("complete", ("user",))
    assert listed.size_bytes >= tree.exclusive_bytes > 8 * MIB
    assert listed.images[0].complete
