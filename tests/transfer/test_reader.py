"""Reading ranges of files straight from an image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, InvalidInput, NotFound
from imgfmt.image import Rule, Variant, Variants
from imgfmt.tree import EntryType
from tests.transfer.fixture_store import (
    CONFIG,
    KIB,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    flip,
    link,
    noise,
    run,
    text,
)
from transfer.reader import ImageReader, open_reader

LARGE = noise(MIB) + bytes(MIB) + text(MIB + 77) + bytes(300 * KIB)
NODES: Nodes = {
    b"d/large": Node(LARGE),
    b"d/\xff": Node(same_as=b"d/large"),
    b"empty": Node(b""),
    b"hole": Node(bytes(2 * MIB)),
    b"link": link(b"d/large"),
    b"small": Node(b"0123456789", mode=0o640),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    made = FixtureStore(tmp_path / "store", chunks_a_pack=2)
    yield made
    made.close()


async def opened(
    store: FixtureStore, digest: Digest, member: str | None = None, gpu: str = ""
) -> ImageReader:
    return await open_reader(store.catalog, digest, member, config=CONFIG, facts={"gpu": gpu})


def read(store: FixtureStore, digest: Digest, path: str | bytes, offset: int, length: int) -> bytes:
    async def work() -> bytes:
        with await opened(store, digest) as reader:
            return await reader.read(path, offset, length)

    return run(work())


@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_any_range_of_a_file_is_read(tmp_path: Path, codec: int) -> None:
    store = FixtureStore(tmp_path, codec=codec)
    digest = store.add(NODES)
    edges = [0, 1, 4095, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 5, len(LARGE) - 1, len(LARGE)]
    lengths = [0, 1, 4096, MIB, len(LARGE), 2 * len(LARGE)]

    async def work() -> None:
        with await opened(store, digest) as reader:
            for path in (b"d/large", b"d/\xff", "hole", "small", "empty"):
                node = NODES[path.encode() if isinstance(path, str) else path]
                whole = (NODES[node.same_as] if node.same_as else node).content
                assert whole is not None
                for offset in edges:
                    for length in lengths:
                        found = await reader.read(path, offset, length)
                        assert found == whole[offset : offset + length]

    run(work())
    store.close()


def test_a_buffer_is_filled_and_what_follows_it_stays(store: FixtureStore) -> None:
    digest = store.add(NODES)

    async def work() -> None:
        with await opened(store, digest) as reader:
            buffer = bytearray(b"?" * (MIB + 100))
            assert await reader.read_into("d/large", MIB - 10, memoryview(buffer)) == len(buffer)
            assert buffer == LARGE[MIB - 10 :][: len(buffer)]
            buffer = bytearray(b"?" * 20)
            assert await reader.read_into("small", 4, memoryview(buffer)) == 6
            assert buffer == b"456789" + b"?" * 14

    run(work())


def test_only_chunks_that_cover_the_range_are_read(store: FixtureStore) -> None:
    digest = store.add(NODES)
    largest = max(place.stored_bytes for place in store.places.values())
    store.store.reads.clear()
    assert read(store, digest, "d/large", 500_000, 10) == LARGE[500_000:500_010]
    assert [size <= largest for _, _, size in store.store.reads] == [True]
    store.store.reads.clear()
    assert read(store, digest, "d/large", MIB + 5, 1000) == bytes(1000)
    assert store.store.reads == []


def test_a_damaged_chunk_is_not_given_out(store: FixtureStore) -> None:
    digest = store.add({b"x": Node(noise(MIB))})
    for place in store.places.values():
        flip(store.pack_paths()[place.pack], place.offset)
    with pytest.raises(CorruptData, match="of x in pack"):
        read(store, digest, "x", 5000, 1)


def test_reads_may_run_at_once(store: FixtureStore) -> None:
    digest = store.add(NODES)

    async def work() -> None:
        with await opened(store, digest) as reader:
            offsets = range(0, len(LARGE), 100_000)
            found = await asyncio.gather(
                *(reader.read("d/large", offset, 100_000) for offset in offsets)
            )
        assert b"".join(found) == LARGE

    run(work())


def test_paths_and_entries_are_those_of_the_tree(store: FixtureStore) -> None:
    digest = store.add(NODES)

    async def work() -> None:
        with await opened(store, digest) as reader:
            assert sorted(reader.paths()) == sorted([b"", b"d", *NODES])
            assert reader.stat("d").type is EntryType.DIRECTORY
            assert reader.stat(b"").type is EntryType.DIRECTORY
            assert reader.stat("link").target == b"d/large"
            assert (reader.stat("small").size_bytes, reader.stat("small").mode) == (10, 0o640)
            for path in ("nothing", "d/large/x", "link/x"):
                with pytest.raises(NotFound, match=f"the image has no {path}"):
                    reader.stat(path)

    run(work())


@pytest.mark.parametrize("path", ["d", "link", ""])
def test_what_is_no_file_can_not_be_read(store: FixtureStore, path: str) -> None:
    with pytest.raises(InvalidInput, match="is not a regular file"):
        read(store, store.add(NODES), path, 0, 1)


def test_an_offset_below_zero_is_refused(store: FixtureStore) -> None:
    with pytest.raises(InvalidInput, match="offset -1 is negative"):
        read(store, store.add(NODES), "small", -1, 1)


def test_the_member_must_be_named_where_there_are_several(store: FixtureStore) -> None:
    digest = store.add_image(*(store.add_tree({b"x": Node(b"%d" % i)}) for i in range(2)))

    async def work() -> None:
        with await opened(store, digest, "rank-1") as reader:
            assert await reader.read("x", 0, 9) == b"1"
        with pytest.raises(InvalidInput, match="name one of rank-0, rank-1"):
            await opened(store, digest)
        with pytest.raises(NotFound, match="no member 'rank-2'"):
            await opened(store, digest, "rank-2")

    run(work())


def test_facts_choose_the_variant_that_is_read(store: FixtureStore) -> None:
    images = [store.add({b"x": Node(b"%d" % i)}) for i in range(2)]
    rules = [(Rule.parse(f"gpu={i}"),) for i in range(2)]
    listed = tuple(Variant(image, when) for image, when in zip(images, rules, strict=True))
    digest = store.add_record(Variants(listed))

    async def work() -> None:
        with await opened(store, digest, gpu="1") as reader:
            assert await reader.read("x", 0, 9) == b"1"

    run(work())
