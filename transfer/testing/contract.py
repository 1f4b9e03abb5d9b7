"""What every store must satisfy (SPEC.md sections 6.1 and 9): one test class, a subclass a store.

Other processes are started with `forkserver`, so the subclass must be importable by its name.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from imgfmt import layout
from imgfmt.digest import Digest, Octets
from imgfmt.errors import AccessDenied, Conflict, CorruptData, InvalidImage, NotFound
from imgfmt.reference import ReferenceRecord, TargetKind
from transfer.buffers import page_aligned
from transfer.store.base import UNCHECKED_BYTES, Store, StoredReference

PAGE = 4096
KEY = "trees/" + "0" * 64
OTHER = "trees/" + "1" * 64
PACK = layout.pack_key(bytes(16))
NAME, TAG = "team/llama", "v1"
LARGE_BYTES = 3 * 1024 * 1024 + 17

T = TypeVar("T")
Opener = Callable[[str], Store]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end."""
    return asyncio.run(work)


def record_of(
    number: int, seen: StoredReference | None = None, *, name: str = NAME, tag: str = TAG
) -> ReferenceRecord:
    """A record that points to the digest `number` and follows `seen`."""
    target, write_id = Digest(number.to_bytes(32, "big")), secrets.token_bytes(16)
    if seen is None:
        return ReferenceRecord(name, tag, TargetKind.IMAGE, target, write_id, 0, "me")
    return seen.record.replaced_by(TargetKind.IMAGE, target, write_id, number, "me")


def number_of(state: StoredReference | None) -> int:
    """The inverse of `record_of`; 0 where there is no reference."""
    if state is None or state.record.target is None:
        return 0
    return int.from_bytes(state.record.target.raw, "big")


def in_processes(n_processes: int, work: Callable[..., T], *args: object) -> list[T]:
    """Call `work(number, *args)` in `n_processes` processes at once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    given = (dict(os.environ),)  # the server of these processes may have been started without
    with ProcessPoolExecutor(n_processes, context, _take_environment, given) as pool:
        futures = [pool.submit(work, number, *args) for number in range(n_processes)]
        return [future.result() for future in futures]


def _take_environment(given: dict[str, str]) -> None:
    os.environ.update(given)


def create_many(number: int, opener: Opener, place: str, n_keys: int) -> list[bool]:
    """Try to create `n_keys` keys with the process's number as content."""

    async def work() -> list[bool]:
        store = opener(place)
        return [
            await store.create(f"leases/{key:032x}", [bytes([number]) * 100])
            for key in range(n_keys)
        ]

    return run(work())


def increment_many(number: int, opener: Opener, place: str, n_times: int) -> int:
    """Count a reference up `n_times`; returns how often someone else was first."""

    async def work() -> int:
        store, n_conflicts = opener(place), 0
        for _ in range(n_times):
            while True:
                seen = await store.read_reference(NAME, TAG)
                try:
                    await store.change_reference(record_of(number_of(seen) + 1, seen), seen)
                except Conflict:
                    n_conflicts += 1
                else:
                    break
        return n_conflicts

    return run(work())


def put_many(number: int, opener: Opener, place: str, n_times: int) -> bool:
    """Even numbers write an object again and again; odd ones read it and see it whole."""

    async def work() -> bool:
        store = opener(place)
        for i in range(n_times):
            if number % 2 == 0:
                await store.put(KEY, [bytes([number]) * (100_000 + i)])
            else:
                found = bytes(await store.get(KEY))
                if len(found) < 100_000 or len(set(found)) != 1:
                    return False
        return True

    return run(work())


class StoreContract(ABC):
    """Subclass it as `TestXStore`; every method named `test_` is one thing that a store must do."""

    @staticmethod
    @abstractmethod
    def open_store(place: str) -> Store:
        """The store at `place`, a directory of this test alone. Called in other processes too."""

    @abstractmethod
    def truncate(self, place: str, key: str, size_bytes: int) -> None:
        """Cut an object short behind the store's back."""

    @abstractmethod
    def denied(self, place: str, key: str) -> AbstractContextManager[object]:
        """While it is entered, stores that are opened may not read this object."""

    @abstractmethod
    def unfinished(self, place: str) -> Sequence[str]:
        """What the store keeps that is no object: temporary files, parts of uploads."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> str:
        """Where the store of one test lies."""
        return str(tmp_path / "store")

    @pytest.fixture
    def store(self, place: str) -> Store:
        """The store of one test."""
        return self.open_store(place)

    @pytest.mark.parametrize(
        "pieces",
        [
            [],
            [b""],
            [b"one"],
            [b"one", bytearray(b"two"), b"", memoryview(b"three")],
            [b"x"] * 5000,
            [bytes(range(256)) * (LARGE_BYTES // 256), b"tail"],
        ],
        ids=["nothing", "empty", "one", "several", "very many", "large"],
    )
    def test_what_was_put_is_read_back(self, store: Store, pieces: list[bytes]) -> None:
        async def work() -> None:
            await store.put(KEY, pieces)
            found = await store.get(KEY)
            assert bytes(found) == b"".join(pieces)
            facts = await store.facts(KEY)
            assert facts is not None
            assert (facts.key, facts.size_bytes) == (KEY, len(found))

        run(work())

    def test_put_replaces_what_is_there(self, store: Store, place: str) -> None:
        async def work() -> None:
            await store.put(KEY, [b"long before"])
            before = await store.facts(KEY)
            await store.put(KEY, [b"after"])
            after = await store.facts(KEY)
            assert bytes(await store.get(KEY)) == b"after"
            assert before is not None
            assert after is not None
            assert after.size_bytes == 5
            assert after.written_ns >= before.written_ns

        run(work())
        assert not self.unfinished(place)

    def test_what_is_missing_is_not_found(self, store: Store) -> None:
        async def work() -> None:
            assert await store.facts(KEY) is None
            assert await store.list_objects("trees/") == []
            with pytest.raises(NotFound, match=KEY):
                await store.get(KEY)
            with pytest.raises(NotFound, match=KEY):
                await store.read_into(KEY, 0, memoryview(bytearray(1)))
            await store.delete(KEY)

        run(work())

    def test_what_was_deleted_is_missing(self, store: Store) -> None:
        async def work() -> None:
            await store.put(KEY, [b"x"])
            await store.put(OTHER, [b"y"])
            await store.delete(KEY)
            assert await store.facts(KEY) is None
            assert [facts.key for facts in await store.list_objects("trees/")] == [OTHER]
            assert await store.create(KEY, [b"again"])

        run(work())

    @pytest.mark.parametrize("size_bytes", [10, LARGE_BYTES])
    def test_a_view_outlives_the_object(self, store: Store, size_bytes: int) -> None:
        async def work() -> None:
            for outlived in (store.put(KEY, [b"b" * size_bytes]), store.delete(KEY)):
                await store.put(KEY, [b"a" * size_bytes])
                view = await store.get(KEY)
                await outlived
                assert bytes(view) == b"a" * size_bytes

        run(work())

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 0), (0, 1), (7, 100), (4095, 2), (LARGE_BYTES - 9, 9), (0, LARGE_BYTES)],
    )
    def test_a_range_is_read_into_memory_of_the_caller(
        self, store: Store, offset: int, length: int
    ) -> None:
        async def work() -> None:
            raw = bytes(i * i % 251 for i in range(LARGE_BYTES))
            await store.put(KEY, [raw])
            buffer = bytearray(b"." * (length + 2))
            await store.read_into(KEY, offset, memoryview(buffer)[1:-1])
            assert buffer == b"." + raw[offset : offset + length] + b"."

        run(work())

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (2**40, 1)])
    def test_a_range_beyond_the_end_is_corrupt_data(
        self, store: Store, offset: int, length: int
    ) -> None:
        async def work() -> None:
            await store.put(KEY, [b"0123456789"])
            with pytest.raises(CorruptData, match=rf"{KEY} .*byte {offset + length}"):
                await store.read_into(KEY, offset, memoryview(bytearray(length)))

        run(work())

    def test_an_object_that_was_cut_short_is_corrupt_data(self, store: Store, place: str) -> None:
        async def work() -> None:
            await store.put(KEY, [bytes(LARGE_BYTES)])
            self.truncate(place, KEY, 5000)
            await store.read_into(KEY, 0, memoryview(bytearray(5000)))
            with pytest.raises(CorruptData, match=KEY):
                await store.read_into(KEY, 4000, memoryview(bytearray(1001)))

        run(work())

    def test_an_object_that_may_not_be_read_is_denied(self, store: Store, place: str) -> None:
        async def work() -> None:
            await store.put(KEY, [b"secret"])
            with self.denied(place, KEY):
                other = self.open_store(place)
                with pytest.raises(AccessDenied, match=KEY):
                    await other.get(KEY)
                with pytest.raises(AccessDenied, match=KEY):
                    await other.read_into(KEY, 0, memoryview(bytearray(1)))

        run(work())

    def test_a_listing_has_the_objects_below_its_prefix_in_order(self, store: Store) -> None:
        async def work() -> None:
            keys = [layout.pack_key(bytes([i]) + bytes(15)) for i in (9, 255, 0, 10)]
            keys += ["index/" + "b" * 32, "index/" + "a" * 32, "doomed/" + "c" * 32 + ".verdict"]
            for number, key in enumerate(keys):
                await store.put(key, [bytes(number)])
            packs = await store.list_objects("packs/")
            assert [facts.key for facts in packs] == sorted(keys[:4])
            assert [facts.size_bytes for facts in packs] == [2, 0, 3, 1]
            assert [await store.facts(facts.key) for facts in packs] == packs
            assert [f.key for f in await store.list_objects("index/")] == [keys[5], keys[4]]
            assert [f.key for f in await store.list_objects("doomed/")] == [keys[6]]
            assert await store.list_objects("leases/") == []

        run(work())

    def test_a_key_is_created_once(self, store: Store, place: str) -> None:
        async def work() -> None:
            assert await store.create(KEY, [b"first", b"!"])
            assert not await store.create(KEY, [b"second"])
            assert bytes(await store.get(KEY)) == b"first!"
            await store.delete(KEY)
            assert await store.create(KEY, [b"third"])

        run(work())
        assert not self.unfinished(place)

    def test_a_key_is_created_once_by_many_tasks(self, store: Store) -> None:
        async def work() -> None:
            made = await asyncio.gather(*(store.create(KEY, [bytes([i])]) for i in range(20)))
            assert sum(made) == 1
            assert bytes(await store.get(KEY)) == bytes([made.index(True)])

        run(work())

    @pytest.mark.slow
    def test_a_key_is_created_once_among_processes(self, store: Store, place: str) -> None:
        made = in_processes(4, create_many, self.open_store, place, 25)
        for key, answers in enumerate(zip(*made, strict=True)):
            assert sum(answers) == 1
            content = bytes(run(store.get(f"leases/{key:032x}")))
            assert content == bytes([answers.index(True)]) * 100

    @pytest.mark.slow
    def test_an_object_that_is_replaced_is_always_whole(self, store: Store, place: str) -> None:
        run(store.put(KEY, [bytes([0]) * 100_000]))
        assert in_processes(4, put_many, self.open_store, place, 40) == [True] * 4

    def test_a_pack_appears_whole_and_only_when_committed(self, store: Store, place: str) -> None:
        async def work() -> None:
            sink = await store.open_pack(PACK)
            pages = [page_aligned(n_pages * PAGE) for n_pages in (1, 600, 2)]
            for i, page in enumerate(pages):
                page[:] = bytes([i + 1]) * len(page)
            await asyncio.gather(sink.write(601 * PAGE, pages[2:]), sink.write(0, pages[:2]))
            assert await store.facts(PACK) is None
            assert await store.list_objects("packs/") == []
            await sink.commit()
            assert bytes(await store.get(PACK)) == b"".join(pages)
            await sink.abort()
            assert len(await store.get(PACK)) == 603 * PAGE

        run(work())
        assert not self.unfinished(place)

    def test_a_pack_takes_very_many_pieces_at_once(self, store: Store) -> None:
        async def work() -> None:
            whole = page_aligned(3000 * PAGE)
            whole[:] = bytes(i % 253 for i in range(len(whole)))
            sink = await store.open_pack(PACK)
            await sink.write(0, [whole[i : i + PAGE] for i in range(0, len(whole), PAGE)])
            await sink.commit()
            assert bytes(await store.get(PACK)) == whole

        run(work())

    def test_a_pack_that_is_aborted_leaves_nothing(self, store: Store, place: str) -> None:
        async def work() -> None:
            for n_pages in (0, 1):
                sink = await store.open_pack(PACK)
                if n_pages:
                    await sink.write(0, [page_aligned(PAGE)])
                await sink.abort()
                await sink.abort()
            assert await store.list_objects("packs/") == []

        run(work())
        assert not self.unfinished(place)

    def test_a_reference_is_read_back(self, store: Store) -> None:
        async def work() -> None:
            assert await store.read_reference(NAME, TAG) is None
            first = record_of(1)
            await store.change_reference(first, None)
            seen = await store.read_reference(NAME, TAG)
            assert seen is not None
            assert seen.record == first
            second = record_of(2, seen)
            await store.change_reference(second, seen)
            seen = await store.read_reference(NAME, TAG)
            assert seen is not None
            assert seen.record == second
            assert [past.target for past in seen.record.history] == [first.target]

        run(work())

    def test_a_deleted_reference_is_known_and_can_be_set_again(self, store: Store) -> None:
        async def work() -> None:
            await store.change_reference(record_of(1), None)
            seen = await store.read_reference(NAME, TAG)
            assert seen is not None
            gone = seen.record.replaced_by(TargetKind.NONE, None, bytes(16), 5, "me")
            await store.change_reference(gone, seen)
            with pytest.raises(Conflict, match=f"{NAME}:{TAG}"):
                await store.change_reference(record_of(2), None)
            seen = await store.read_reference(NAME, TAG)
            assert seen is not None
            assert seen.record == gone
            assert [state.record for state in await store.list_references()] == [gone]
            await store.change_reference(record_of(3, seen), seen)
            assert number_of(await store.read_reference(NAME, TAG)) == 3

        run(work())

    def test_a_change_from_a_state_that_is_past_is_a_conflict(self, store: Store) -> None:
        async def work() -> None:
            await store.change_reference(record_of(1), None)
            first = await store.read_reference(NAME, TAG)
            await store.change_reference(record_of(2, first), first)
            for stale in (None, first):
                with pytest.raises(Conflict, match=f"{NAME}:{TAG}"):
                    await store.change_reference(record_of(9, stale), stale)
            assert number_of(await store.read_reference(NAME, TAG)) == 2

        run(work())

    def test_a_change_from_a_state_that_is_long_past_is_a_conflict(self, store: Store) -> None:
        async def work() -> None:
            await store.change_reference(record_of(1), None)
            first = seen = await store.read_reference(NAME, TAG)
            for number in range(2, 72):
                await store.change_reference(record_of(number, seen), seen)
                seen = await store.read_reference(NAME, TAG)
            for number in (20, 1000):  # a target that is in the history, and one that is new
                for stale in (None, first):
                    with pytest.raises(Conflict, match=f"{NAME}:{TAG}"):
                        await store.change_reference(record_of(number, stale), stale)
            seen = await store.read_reference(NAME, TAG)
            assert seen is not None
            assert number_of(seen) == 71
            assert [number_of(replace(seen, record=replace(seen.record, target=past.target)))
                    for past in seen.record.history] == list(range(70, 6, -1))  # fmt: skip

        run(work())

    def test_a_change_whose_answer_was_lost_is_no_conflict(self, store: Store) -> None:
        async def work() -> None:
            first = record_of(1)
            for _ in range(2):
                await store.change_reference(first, None)
            seen = await store.read_reference(NAME, TAG)
            second = record_of(2, seen)
            await store.change_reference(second, seen)
            await store.change_reference(second, seen)
            newest = await store.read_reference(NAME, TAG)
            await store.change_reference(record_of(3, newest), newest)
            await store.change_reference(second, seen)  # it happened, and was replaced since
            with pytest.raises(Conflict):
                await store.change_reference(replace(second, write_id=bytes(16)), seen)
            assert number_of(await store.read_reference(NAME, TAG)) == 3

        run(work())

    @pytest.mark.parametrize("raw", [b"", b"junk", bytes(300_000), bytes(LARGE_BYTES)])
    def test_a_damaged_reference_can_be_changed_and_others_are_listed(
        self, store: Store, raw: bytes
    ) -> None:
        async def work() -> None:
            await store.change_reference(record_of(5, name="other"), None)
            seen = None
            for number in (1, 2):
                await store.change_reference(record_of(number, seen), seen)
                seen = await store.read_reference(NAME, TAG)
            key = (await store.list_objects("refs/"))[-1].key
            await store.put(key, [raw])
            with pytest.raises((CorruptData, InvalidImage), match=re.escape(key)):
                await store.read_reference(NAME, TAG)
            other, damaged = await store.list_references()
            assert (number_of(other), other.problem) == (5, None)
            assert damaged.record.target is None
            assert key in (damaged.problem or "")
            first, late = [await store.reference_to_change(NAME, TAG) for _ in range(2)]
            assert first is not None
            assert first.problem
            mended = record_of(3, first)
            for _ in range(2):  # the second as if an answer was lost
                await store.change_reference(mended, first)
            with pytest.raises(Conflict):
                await store.change_reference(record_of(4, late), late)
            assert number_of(await store.read_reference(NAME, TAG)) == 3
            now = await store.reference_to_change(NAME, TAG)
            assert now is not None
            assert (now.record, now.problem) == (mended, None)

        run(work())

    def test_a_size_is_checked_before_memory_is_taken(self, store: Store) -> None:
        asked: list[tuple[int, int]] = []

        def check(size_bytes: int, beginning: Octets) -> None:
            asked.append((size_bytes, len(beginning)))
            raise InvalidImage("too large")

        async def work() -> None:
            await store.put(KEY, [bytes(LARGE_BYTES)])
            await store.put(OTHER, [b"small"])
            assert bytes(await store.get(OTHER, check)) == b"small"
            with pytest.raises(InvalidImage, match="too large"):
                await store.get(KEY, check)
            assert asked == [(LARGE_BYTES, UNCHECKED_BYTES)]

        run(work())

    def test_references_are_listed_by_name_and_tag(self, store: Store) -> None:
        async def work() -> None:
            names = [("b", "x"), ("a", "z"), ("a", "Y.1"), ("a/b", "x"), ("_volumes/v1", "x")]
            assert await store.list_references() == []
            for number, (name, tag) in enumerate(names):
                await store.change_reference(record_of(number + 1, name=name, tag=tag), None)
            listed = await store.list_references()
            assert [(s.record.name, s.record.tag) for s in listed] == sorted(names)
            for state in listed:
                assert await store.read_reference(state.record.name, state.record.tag) == state
            assert await store.read_reference("a", "x") is None

        run(work())

    @pytest.mark.slow
    def test_no_change_of_a_reference_is_lost_among_processes(
        self, store: Store, place: str
    ) -> None:
        n_processes, n_times = 4, 20
        in_processes(n_processes, increment_many, self.open_store, place, n_times)
        seen = run(store.read_reference(NAME, TAG))
        assert number_of(seen) == n_processes * n_times
