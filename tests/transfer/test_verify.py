"""Verifying: all that is damaged is told, each once, with what is lost by it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from imgfmt import layout, placement
from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import Digest, digest_of
from imgfmt.image import Variant, Variants
from imgfmt.reference import ReferenceRecord, TargetKind
from tests.transfer.fixture_store import (
    CONFIG,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    flip,
    noise,
    run,
    text,
)
from transfer.verify import Damage, DamagedFile, DamageKind, VerifyReport, verify, verify_all

NODES: Nodes = {
    b"d/large": Node(noise(2 * MIB) + text(MIB)),
    b"again": Node(noise(2 * MIB) + text(MIB)),
    b"link": Node(same_as=b"again"),
    b"small": Node(b"x"),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    made = FixtureStore(tmp_path / "store", chunks_a_pack=3)
    yield made
    made.close()


def verified(store: FixtureStore, *digests: Digest) -> VerifyReport:
    store.store.reads.clear()
    return run(verify(store.catalog, digests, config=CONFIG))


def verified_all(store: FixtureStore) -> VerifyReport:
    return run(verify_all(store.catalog, config=CONFIG))


def told(damages: Sequence[Damage]) -> set[tuple[DamageKind, str]]:
    assert len({(d.kind, d.name, d.pack) for d in damages}) == len(damages)
    return {(damage.kind, damage.name) for damage in damages}


def point(store: FixtureStore, name: str, target: Digest) -> None:
    record = ReferenceRecord(
        name, "latest", TargetKind.IMAGE, target, write_id=os.urandom(16), time_ns=0, who="test"
    )
    run(store.store.change_reference(record, None))


@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_a_sound_image_is_read_once_and_found_sound(tmp_path: Path, codec: int) -> None:
    store = FixtureStore(tmp_path, codec=codec)
    trees = [store.add_tree(NODES), store.add_tree({**NODES, b"more": Node(noise(MIB, 3))})]
    images = [store.add_image(trees[0]), store.add_image(*trees)]
    report = verified(store, *images)
    store.close()
    assert report.sound
    assert (report.images, report.trees, report.packs) == (2, 2, len(store.packs))
    payload = sum(place.stored_bytes for place in store.places.values())
    assert payload <= report.fetched_bytes <= payload + 100 * 4096
    assert list(report.seconds) == ["resolve", "verify", "packs", "total"]


def test_all_damaged_chunks_are_told_with_their_files(store: FixtureStore) -> None:
    tree = store.add_tree(NODES)
    images = [store.add_image(tree), store.add_image(tree, names=["other"])]
    shared = digest_of(NODES[b"small"].content or b"")
    large = [Digest(raw) for raw in store.places if raw != shared.raw]
    for digest in (shared, large[1], large[-1]):
        place = store.places[digest.raw]
        flip(store.pack_paths()[place.pack], place.offset)
    report = verified(store, *images)
    assert told(report.damages) == {
        (DamageKind.CHUNK, str(digest)) for digest in (shared, large[1], large[-1])
    }
    by_name = {damage.name: damage for damage in report.damages}
    assert set(by_name[str(shared)].files) == {
        DamagedFile(images[0], "main", b"small"),
        DamagedFile(images[1], "other", b"small"),
    }
    assert [file.path for file in by_name[str(large[1])].files if file.image == images[0]] == [
        b"again", b"link", b"d/large",
    ]  # fmt: skip
    place = store.places[large[1].raw]
    assert by_name[str(large[1])].pack == store.packs[place.pack].hex()
    assert "it hashes to blake3:" in by_name[str(large[1])].reason


def test_a_missing_pack_is_told_once_with_the_files_that_are_lost(store: FixtureStore) -> None:
    image = store.add(NODES)
    store.pack_paths()[1].unlink()
    report = verified(store, image)
    lost = [raw for raw, place in store.places.items() if place.pack == 1]
    [damage] = report.damages
    assert (damage.kind, damage.name) == (DamageKind.PACK, store.packs[1].hex())
    assert f"does not exist: {len(lost)} chunks" in damage.reason
    assert {file.path for file in damage.files} == {b"d/large", b"again", b"link"}


def test_verify_all_tells_segments_of_the_index_that_are_damaged(store: FixtureStore) -> None:
    store.add(NODES)
    segment = store.root / layout.INDEX / ("0" * 32)
    segment.parent.mkdir(exist_ok=True)
    segment.write_bytes(b"junk")
    assert told(verified_all(store).damages) == {(DamageKind.INDEX, f"index/{'0' * 32}")}


def test_a_short_pack_is_told_with_the_chunks_that_are_lost(store: FixtureStore) -> None:
    image = store.add(NODES)
    in_pack = {raw: place for raw, place in store.places.items() if place.pack == 1}
    cut = sorted(place.offset for place in in_pack.values())[1] + 1
    os.truncate(store.pack_paths()[1], cut)
    report = verified(store, image)
    lost = [raw for raw, place in in_pack.items() if place.offset + place.stored_bytes > cut]
    assert len(lost) == 2
    assert told(report.damages) == {
        (DamageKind.PACK, store.packs[1].hex()),
        *((DamageKind.CHUNK, str(Digest(raw))) for raw in lost),
    }


@pytest.mark.parametrize("offset", [0, 9, 40, -1, -20, -4000])
def test_a_pack_with_a_bad_header_table_or_footer_is_told(store: FixtureStore, offset: int) -> None:
    image = store.add(NODES)
    pack = store.pack_paths()[0]
    flip(pack, offset % pack.stat().st_size)
    assert told(verified(store, image).damages) == {(DamageKind.PACK, store.packs[0].hex())}


def test_a_pack_whose_table_does_not_tell_what_it_holds_is_told(store: FixtureStore) -> None:
    """A later push would trust the table and use the wrong chunk."""
    store.add({b"honest": Node(noise(MIB, 5))})
    store.lying = True
    image = store.add({b"honest": Node(noise(MIB, 5)), b"other": Node(b"x")})
    (damage,) = verified(store, image).damages
    assert (damage.kind, damage.name) == (DamageKind.PACK, store.packs[-1].hex())
    assert "does not have 1 of the chunks" in damage.reason


def test_a_placement_that_leads_astray_is_told(store: FixtureStore) -> None:
    """Every chunk is found where another lies."""
    store.add({b"x": Node(noise(MIB, 5))})
    places = list(store.places.values())
    store.places = dict(zip(store.places, reversed(places), strict=True))
    image = store.add_image(store.add_tree({b"x": Node(noise(MIB, 5))}))
    report = verified(store, image)
    assert {damage.kind for damage in report.damages} == {DamageKind.CHUNK}


def test_a_placement_that_names_no_possible_place_is_told(store: FixtureStore) -> None:
    trees = [store.add_tree({b"x": Node(noise(MIB, seed))}) for seed in (5, 6)]
    image = store.add_image(*trees)
    there = store.content(trees[0]).placement
    in_header = replace(there, run_offset=np.zeros_like(there.run_offset))
    pieces = placement.encode(in_header)
    run(store.store.put(layout.placement_key(trees[0]), pieces))
    report = verified(store, image)
    assert told(report.damages) == {(DamageKind.PLACEMENT, str(trees[0]))}
    assert report.chunks == store.content(trees[1]).tree.n_chunks


def test_trees_and_placements_that_are_damaged_or_missing_are_told(store: FixtureStore) -> None:
    trees = [store.add_tree({b"x": Node(b"%d" % i)}) for i in range(6)]
    image = store.add_image(*trees)
    flip(store.root / layout.tree_key(trees[0]), 300)
    (store.root / layout.tree_key(trees[1])).unlink()
    flip(store.root / layout.placement_key(trees[2]), 0)
    (store.root / layout.placement_key(trees[3])).unlink()
    (store.root / layout.placement_key(trees[4])).write_bytes(
        (store.root / layout.placement_key(trees[5])).read_bytes()
    )
    report = verified(store, image)
    assert told(report.damages) == {
        (DamageKind.TREE, str(trees[0])),
        (DamageKind.TREE, str(trees[1])),
        (DamageKind.PLACEMENT, str(trees[2])),
        (DamageKind.PLACEMENT, str(trees[3])),
        (DamageKind.PLACEMENT, str(trees[4])),
    }
    assert [d.files for d in report.damages] == [
        (DamagedFile(image, f"rank-{i}", b""),) for i in range(5)
    ]
    assert report.chunks == 1


def test_images_that_are_damaged_or_missing_are_told(store: FixtureStore) -> None:
    images = [store.add({b"x": Node(b"%d" % i)}) for i in range(3)]
    flip(store.root / layout.image_key(images[0]), 20)
    (store.root / layout.image_key(images[1])).unlink()
    report = verified(store, *images)
    assert told(report.damages) == {
        (DamageKind.IMAGE, str(images[0])),
        (DamageKind.IMAGE, str(images[1])),
    }
    assert (report.images, report.trees) == (3, 1)


def test_the_images_of_variants_are_verified_too(store: FixtureStore) -> None:
    images = [store.add({b"x": Node(b"%d" % i)}) for i in range(2)]
    digest = store.add_record(Variants(tuple(Variant(image) for image in images)))
    assert verified(store, digest).images == 3
    (store.root / layout.image_key(images[1])).unlink()
    assert told(verified(store, digest).damages) == {(DamageKind.IMAGE, str(images[1]))}


def test_a_store_is_verified_with_all_images_and_references(store: FixtureStore) -> None:
    images = [store.add({b"x": Node(b"%d" % i)}) for i in range(2)]
    point(store, "team/sound", images[0])
    report = verified_all(store)
    assert report.sound
    assert report.images == 2
    flip(store.pack_paths()[1], 4096)
    gone = digest_of(b"gone")
    point(store, "dangling", gone)
    point(store, "torn", images[0])
    flip(store.root / "refs/torn/latest/0000000000000001", 0)
    report = verified_all(store)
    assert told(report.damages) == {
        (DamageKind.REFERENCE, "dangling:latest"),
        (DamageKind.REFERENCE, "torn:latest"),
        (DamageKind.CHUNK, str(digest_of(b"1"))),
    }
    assert str(gone) in next(d.reason for d in report.damages if d.name == "dangling:latest")


def test_an_empty_store_is_sound(store: FixtureStore) -> None:
    report = verified_all(store)
    assert report.sound
    assert (report.images, report.trees, report.packs, report.chunks) == (0, 0, 0, 0)
    assert verified(store, store.add({b"empty": Node(b"")})).sound
