"""Running plans: nothing unverified gets out, and one clear error ends a read."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from imgfmt import layout
from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import CorruptData, InvalidImage, NotFound, OutOfResources
from tests.transfer.fixture_store import (
    CONFIG,
    KIB,
    MIB,
    FixtureStore,
    Node,
    after,
    flip,
    noise,
    run,
    text,
)
from transfer.catalog import MemberContent
from transfer.config import TransferConfig
from transfer.execute import Executor, ReadStats, Strict
from transfer.plan import Numbers
from transfer.store.base import SizeCheck
from transfer.threads import Threads

NODES = {b"d/large": Node(noise(3 * MIB) + text(2 * MIB)), b"small": Node(text(5000, 1))}


class Collector(Strict):
    """Keeps a copy of all that it is given."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.found: dict[int, bytes] = {}
        self.lost: list[tuple[list[int], str]] = []

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        with self.lock:
            for number, view in zip(numbers.tolist(), views, strict=True):
                assert number not in self.found
                self.found[number] = bytes(view)


class Lenient(Collector):
    """Takes note of damage."""

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        self.lost.append((numbers.tolist(), str(error)))


def read(
    store: FixtureStore,
    sink: Collector,
    contents: Sequence[MemberContent],
    wanted: Numbers | None = None,
    config: TransferConfig = CONFIG,
) -> ReadStats:
    async def work() -> ReadStats:
        with Threads("test", config.n_threads) as threads:
            executor = Executor(store.catalog, contents, threads, config)
            return await executor.read(sink, wanted)

    return run(work())


def plain_chunks(content: MemberContent, nodes: dict[bytes, Node]) -> list[bytes]:
    """What each chunk of a tree must be."""
    tree = content.tree
    places = zip(
        tree.chunk_entry.tolist(),
        tree.chunk_offset.tolist(),
        tree.chunk_bytes.tolist(),
        strict=True,
    )
    return [(nodes[tree.path(e)].content or b"")[begin : begin + n] for e, begin, n in places]


@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_every_chunk_is_handed_on_once_with_its_own_bytes(tmp_path: Path, codec: int) -> None:
    store = FixtureStore(tmp_path, codec=codec)
    content = store.content(store.add_tree(NODES))
    sink = Collector()
    stats = read(store, sink, [content])
    store.close()
    assert [sink.found[i] for i in range(content.tree.n_chunks)] == plain_chunks(content, NODES)
    assert stats.plain_bytes == content.tree.logical_bytes
    assert stats.fetched_bytes == sum(size for _, _, size in store.store.reads)
    if codec == ZSTD:
        assert stats.fetched_bytes < stats.plain_bytes


def test_a_chunk_in_two_places_is_read_once_and_handed_on_twice(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path)
    nodes = {b"a": NODES[b"d/large"], b"b": NODES[b"d/large"]}
    content = store.content(store.add_tree(nodes))
    sink = Collector()
    stats = read(store, sink, [content])
    store.close()
    assert [sink.found[i] for i in range(content.tree.n_chunks)] == plain_chunks(content, nodes)
    assert stats.plain_bytes == 2 * stats.fetched_bytes == 10 * MIB


@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_any_flipped_chunk_is_named_with_its_pack_and_file(tmp_path: Path, codec: int) -> None:
    store = FixtureStore(tmp_path, codec=codec)
    content = store.content(store.add_tree(NODES))
    for plain in plain_chunks(content, NODES):
        digest = digest_of(plain)
        place = store.places[digest.raw]
        pack = store.pack_paths()[place.pack]
        at = place.offset + place.stored_bytes // 2
        flip(pack, at)
        sink = Collector()
        with pytest.raises(CorruptData) as caught:
            read(store, sink, [content])
        flip(pack, at)
        path = "small" if plain in (NODES[b"small"].content or b"") else "d/large"
        assert f"chunk {digest} of {path} in pack {pack.name} in store" in str(caught.value)
        assert plain not in sink.found.values()
    store.close()


def test_a_read_of_sound_chunks_does_not_see_damage_beside_them(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path)
    content = store.content(store.add_tree(NODES))
    plain = plain_chunks(content, NODES)
    place = store.places[digest_of(plain[0]).raw]
    flip(store.pack_paths()[place.pack], place.offset)
    sink, lenient = Collector(), Lenient()
    others = np.arange(1, content.tree.n_chunks)
    read(store, sink, [content], others)
    read(store, lenient, [content])
    store.close()
    assert sorted(sink.found) == others.tolist()
    assert [numbers for numbers, _ in lenient.lost] == [[0]]
    assert sorted(lenient.found) == list(range(1, content.tree.n_chunks))


def test_what_lies_before_the_cut_of_a_short_pack_is_saved(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path, chunks_a_pack=1000)
    content = store.content(store.add_tree(NODES))
    digests = [Digest(row.tobytes()) for row in content.tree.chunk_digest]
    cut = store.places[digests[3].raw].offset + 1
    os.truncate(store.pack_paths()[0], cut)
    whole = [n for n, d in enumerate(digests) if store.places[d.raw].offset + 1 < cut]
    lenient = Lenient()
    read(store, lenient, [content])
    with pytest.raises(CorruptData, match="is cut short"):
        read(store, Collector(), [content])
    store.close()
    assert sorted(lenient.found) == whole
    assert len(whole) == 3
    assert len(lenient.lost) == content.tree.n_chunks - 3


def test_a_missing_pack_makes_the_placement_be_read_once_more(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path)
    tree = store.add_tree(NODES)
    old = store.content(tree)
    first_packs = store.pack_paths()
    store.add_tree(NODES, fresh=True)  # as a compaction would: new packs, a new placement
    for pack in first_packs[1:]:
        pack.unlink()
    sink = Collector()
    read(store, sink, [old])
    store.close()
    assert [sink.found[i] for i in range(old.tree.n_chunks)] == plain_chunks(old, NODES)


def test_a_pack_that_stays_missing_is_named_after_one_more_look(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path)
    tree = store.add_tree(NODES)
    content = store.content(tree)
    missing = store.pack_paths()[0]
    missing.unlink()
    placements: list[str] = []
    get = store.store.get

    async def spy(key: str, check: SizeCheck | None = None) -> object:
        placements.append(key)
        return await get(key, check)

    store.store.get = spy  # type: ignore[method-assign, assignment]
    pattern = f"chunk blake3:[0-9a-f]{{64}} of [a-z/]+ in pack {missing.name} .* does not exist"
    with pytest.raises(NotFound, match=pattern):
        read(store, Collector(), [content])
    lenient = Lenient()
    read(store, lenient, [content])
    store.close()
    assert placements == [layout.placement_key(tree)] * 2
    assert len(lenient.lost) == 8
    assert sorted(lenient.found) == list(range(8, content.tree.n_chunks))


def test_the_first_error_of_a_sink_is_raised_alone(tmp_path: Path) -> None:
    class Full(Collector):
        def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
            raise OutOfResources("no space left")

    store = FixtureStore(tmp_path)
    content = store.content(store.add_tree(NODES))
    with pytest.raises(OutOfResources, match="no space left"):
        read(store, Full(), [content])
    store.close()


def test_the_least_memory_allowed_is_enough(tmp_path: Path) -> None:
    config = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=6 * MIB, n_threads=2)
    for codec in (RAW, ZSTD):
        store = FixtureStore(tmp_path / str(codec), codec=codec, chunks_a_pack=100)
        content = store.content(store.add_tree(NODES))
        sink = Collector()
        read(store, sink, [content], config=config)
        store.close()
        assert len(sink.found) == content.tree.n_chunks


def test_what_a_range_decodes_to_may_be_much_longer_than_the_range(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path, codec=ZSTD, chunks_a_pack=100)
    nodes = {b"x": Node(text(12 * MIB))}
    content = store.content(store.add_tree(nodes))
    sink = Collector()
    store.store.reads.clear()
    stats = read(store, sink, [content], config=TransferConfig(n_threads=2))
    store.close()
    assert len(store.store.reads) == 1
    assert stats.plain_bytes == 12 * MIB
    assert [sink.found[i] for i in range(content.tree.n_chunks)] == plain_chunks(content, nodes)


def test_ranges_in_memory_never_exceed_what_is_allowed(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path, codec=ZSTD, chunks_a_pack=1)
    content = store.content(store.add_tree({b"x": Node(text(10 * MIB))}))
    config = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=20 * MIB, n_threads=8)
    most = waiting = 0

    async def wait() -> None:
        nonlocal most, waiting
        waiting += 1
        most = max(most, waiting)
        await asyncio.sleep(0.002)
        waiting -= 1

    store.store.before_read = wait
    read(store, Collector(), [content], config=config)
    store.close()
    decoded_bytes = 4 * MIB
    assert most == 20 * MIB // (2 * MIB + decoded_bytes)


def test_a_cancelled_read_leaves_no_thread_at_work(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path, chunks_a_pack=1)
    content = store.content(store.add_tree(NODES))
    sink = Collector()

    async def work() -> int:
        begun = asyncio.Event()
        store.store.before_read = after(8, begun)
        with Threads("test", 4) as threads:
            executor = Executor(store.catalog, [content], threads, CONFIG)
            task = asyncio.create_task(executor.read(sink))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            seen = len(sink.found)
            assert executor.pool.n_free == executor.pool.n_slots
            await asyncio.sleep(0.01)
            return seen

    seen = run(work())
    store.close()
    assert len(sink.found) == seen


def test_a_placement_that_does_not_fit_its_tree_is_refused(tmp_path: Path) -> None:
    store = FixtureStore(tmp_path)
    large = store.content(store.add_tree({b"x": Node(noise(2 * MIB))}))
    small = store.content(store.add_tree({b"x": Node(noise(4 * KIB))}))
    with pytest.raises(InvalidImage):
        read(store, Collector(), [MemberContent(large.tree, small.placement)])
    store.close()
