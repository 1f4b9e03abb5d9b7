"""The store in a directory: the contract of all stores, and what is its own."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from imgfmt import layout
from imgfmt.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    InvalidImage,
    InvalidInput,
    NotFound,
    OutOfResources,
    StoreUnavailable,
    Unsupported,
)
from imgfmt.reference import TargetKind
from tests.transfer.privilege import modes_count
from transfer.buffers import page_aligned
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.testing.contract import (
    KEY,
    NAME,
    PACK,
    PAGE,
    TAG,
    StoreContract,
    number_of,
    record_of,
    run,
)


class TestPosixStore(StoreContract):
    @staticmethod
    def open_store(place: str) -> Store:
        return PosixStore(place)

    def truncate(self, place: str, key: str, size_bytes: int) -> None:
        os.truncate(os.path.join(place, key), size_bytes)

    @contextmanager
    def denied(self, place: str, key: str) -> Iterator[None]:
        os.chmod(os.path.join(place, key), 0o200)
        with modes_count():
            yield

    def unfinished(self, place: str) -> Sequence[str]:
        folder = os.path.join(place, layout.TMP)
        return os.listdir(folder) if os.path.isdir(folder) else []


class TestPosixStoreOnTmpfs(TestPosixStore):
    """A filesystem that may have no O_DIRECT."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[str]:
        folder = f"/dev/shm/{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
        os.mkdir(folder)
        yield f"{folder}/store"
        for where, _, names in os.walk(folder, topdown=False):
            for name in names:
                os.unlink(f"{where}/{name}")
            os.rmdir(where)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(str(tmp_path / "store"))


def generations(store: PosixStore) -> list[int]:
    folder = Path(store.root) / layout.reference_prefix(NAME, TAG)
    return sorted(int(path.name) for path in folder.iterdir())


def failing(code: int) -> Any:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_store_names_itself_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert PosixStore("here").url == str(tmp_path / "here")


def test_nothing_is_made_before_the_first_write(store: PosixStore) -> None:
    with pytest.raises(NotFound):
        run(store.get(KEY))
    assert not os.path.exists(store.root)


def test_an_object_is_on_disk_before_it_has_its_name(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for name in ("fsync", "rename", "link"):
        monkeypatch.setattr(os, name, _noted(steps, name, getattr(os, name)))

    async def pack() -> None:
        sink = await store.open_pack(PACK)
        await sink.write(0, [page_aligned(PAGE)])
        await sink.commit()

    run(store.put(KEY, [b"make the folders"]))
    run(pack())
    for work in (store.put(KEY, [b"x"]), store.create("trees/" + "2" * 64, [b"y"]), pack()):
        steps.clear()
        run(work)
        assert steps in (["file", "rename", "folder"], ["file", "link", "folder"])


def _noted(steps: list[str], name: str, call: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        if name == "fsync":
            target = os.readlink(f"/proc/self/fd/{args[0]}")
            steps.append("folder" if os.path.isdir(target) else "file")
        else:
            steps.append(name)
        return call(*args, **kwargs)

    return noted


def test_a_folder_that_is_made_is_made_durable(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    monkeypatch.setattr("transfer.store.files._sync_folder", synced.add)
    run(store.put(PACK, [b"x"]))
    root = store.root
    assert {os.path.dirname(root), root, f"{root}/packs", f"{root}/packs/00"} <= synced


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, OutOfResources),
        (errno.EDQUOT, OutOfResources),
        (errno.EIO, StoreUnavailable),
        (errno.EROFS, AccessDenied),
    ],
)
@pytest.mark.parametrize("call", ["pwritev", "fsync", "rename", "link"])
def test_a_write_that_fails_leaves_nothing_and_names_the_object(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch, call: str, code: int, kind: type[Exception]
) -> None:
    async def pack() -> None:
        sink = await store.open_pack(PACK)
        try:
            await sink.write(0, [page_aligned(PAGE)])
            await sink.commit()
        finally:
            await sink.abort()

    run(store.put("trees/other", [b"x"]))
    monkeypatch.setattr(os, call, failing(code))
    works = {KEY: store.create(KEY, [b"x"])} if call == "link" else {
        KEY: store.put(KEY, [b"x"]), PACK: pack()
    }  # fmt: skip
    for key, work in works.items():
        with pytest.raises(kind, match=rf"^{key} in store {store.root}: "):
            run(work)
    monkeypatch.undo()
    assert os.listdir(f"{store.root}/tmp") == []
    assert [facts.key for facts in run(store.list_objects("trees/"))] == ["trees/other"]
    assert run(store.list_objects("packs/")) == []


def test_a_link_whose_answer_was_lost_has_created_the_key(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network filesystem does when it sends a request twice."""
    link = os.link

    def link_twice(existing: str, new: str) -> None:
        link(existing, new)
        link(existing, new)

    monkeypatch.setattr(os, "link", link_twice)
    assert run(store.create(KEY, [b"mine"]))
    run(store.change_reference(record_of(1), None))
    assert number_of(run(store.read_reference(NAME, TAG))) == 1
    assert not run(store.create(KEY, [b"other"]))


def test_a_writer_keeps_the_newest_32_generations(store: PosixStore) -> None:
    async def work() -> None:
        for number in range(1, 41):
            seen = await store.read_reference(NAME, TAG)
            await store.change_reference(record_of(number, seen), seen)

    run(work())
    assert generations(store) == list(range(9, 41))


def test_a_generation_in_a_gap_is_no_state_of_the_reference(store: PosixStore) -> None:
    """A writer that was asleep while the generation after the one it saw came and went."""

    async def work() -> None:
        await store.change_reference(record_of(1), None)
        stale = seen = await store.read_reference(NAME, TAG)
        for number in range(2, 50):
            await store.change_reference(record_of(number, seen), seen)
            seen = await store.read_reference(NAME, TAG)
        for number in (30, 1000):
            with pytest.raises(Conflict):
                await store.change_reference(record_of(number, stale), stale)
        assert await store.read_reference(NAME, TAG) == seen
        await store.change_reference(record_of(50, seen), seen)

    run(work())
    assert generations(store) == list(range(19, 51))


def test_what_is_no_generation_is_no_state_of_a_reference(store: PosixStore) -> None:
    run(store.change_reference(record_of(1), None))
    folder = Path(store.root) / layout.reference_prefix(NAME, TAG)
    for name in ("9", "0000000000000009.tmp", "000000000000000x", ".nfs0001"):
        (folder / name).write_bytes(b"")
    (Path(store.root) / "refs" / "stray").write_bytes(b"")
    assert number_of(run(store.read_reference(NAME, TAG))) == 1
    assert len(run(store.list_references())) == 1


def test_a_generation_of_another_reference_is_refused(store: PosixStore) -> None:
    raw = record_of(1, name="other").encode()
    run(store.create(layout.generation_key(NAME, TAG, 1), [raw]))
    with pytest.raises(InvalidImage, match="is a record of other:v1"):
        run(store.read_reference(NAME, TAG))


def test_a_reference_that_loses_generations_while_it_is_read_is_read_again(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store.change_reference(record_of(1), None))
    lists = [[7], [1]]
    monkeypatch.setattr("transfer.store.generations._generations", lambda folder: lists.pop(0))
    assert number_of(run(store.read_reference(NAME, TAG))) == 1
    monkeypatch.setattr("transfer.store.generations._generations", lambda folder: [7])
    with pytest.raises(Conflict, match=f"{NAME}:{TAG} .* try again"):
        run(store.read_reference(NAME, TAG))


def test_a_deleted_reference_keeps_its_history(store: PosixStore) -> None:
    async def work() -> None:
        await store.change_reference(record_of(1), None)
        seen = await store.read_reference(NAME, TAG)
        assert seen is not None
        gone = seen.record.replaced_by(TargetKind.NONE, None, bytes(16), 5, "me")
        await store.change_reference(gone, seen)

    run(work())
    state = run(store.read_reference(NAME, TAG))
    assert state is not None
    assert state.record.target is None
    assert state.record.history[0].target == record_of(1).target


def test_unfinished_objects_are_never_listed(store: PosixStore) -> None:
    async def work() -> None:
        sink = await store.open_pack(PACK)
        await sink.write(0, [page_aligned(PAGE)])
        for prefix in ("packs/", "trees/", "images/", "refs/", "index/"):
            assert await store.list_objects(prefix) == []
        await sink.abort()

    run(work())


def test_a_file_where_a_folder_should_be_is_an_error_that_names_it(store: PosixStore) -> None:
    run(store.put(KEY, [b"x"]))
    Path(store.root, "packs").write_bytes(b"")
    with pytest.raises((NotFound, InvalidInput), match=PACK):
        run(store.put(PACK, [b"x"]))
    with pytest.raises(CorruptData, match=r"packs/ in store .* where a folder belongs"):
        run(store.list_objects("packs/"))


def test_a_folder_that_may_not_be_listed_is_denied(store: PosixStore) -> None:
    run(store.put(PACK, [b"x"]))
    os.chmod(Path(store.root, "packs", "00"), 0o300)
    with modes_count():
        other = PosixStore(store.root)
        with pytest.raises(AccessDenied, match="packs/ in store"):
            run(other.list_objects("packs/"))


def test_a_symbolic_link_is_no_object(store: PosixStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    run(store.put("trees/x", [b"x"]))
    os.symlink(tmp_path / "secret", Path(store.root, KEY))
    with pytest.raises(CorruptData, match="symbolic link"):
        run(store.get(KEY))
    with pytest.raises(CorruptData, match="symbolic link"):
        run(store.read_into(KEY, 0, memoryview(bytearray(1))))
    listed = run(store.list_objects("trees/"))
    assert [(facts.key, facts.is_object) for facts in listed] == [(KEY, False), ("trees/x", True)]


def put_in_place(path: Path, what: str) -> None:
    """Something that is no object where one is to be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match what:
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to("nowhere")
        case "loop":
            path.symlink_to(path.name)
        case "folder":
            path.symlink_to("/")
        case "pipe":
            os.mkfifo(path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["directory", "dangling", "loop", "folder", "pipe"])
@pytest.mark.parametrize("key", [KEY, PACK, layout.segment_key(bytes(16))])
def test_what_is_no_file_is_corrupt_data_and_is_listed(
    store: PosixStore, key: str, what: str
) -> None:
    put_in_place(Path(store.root, key), what)

    async def work() -> None:
        listed = await store.list_objects(f"{key.split('/')[0]}/")
        assert [(facts.key, facts.is_object) for facts in listed] == [(key, False)]
        for _ in range(2):
            for call in (
                store.get(key),
                store.facts(key),
                store.read_into(key, 0, memoryview(bytearray(1))),
            ):
                with pytest.raises(CorruptData, match=rf"{key} in store .* where a file belongs"):
                    await call
        if what != "directory":
            await store.put(key, [b"mended"])
            assert bytes(await store.get(key)) == b"mended"
            return
        for change in (store.put(key, [b"x"]), store.delete(key)):
            with pytest.raises(CorruptData, match=rf"{key} in store .* move it away"):
                await change

    run(work())
    assert not os.listdir(Path(store.root, "tmp"))


def test_folders_may_lie_on_another_disk(store: PosixStore, tmp_path: Path) -> None:
    run(store.put(PACK, [b"pack"]))
    run(store.change_reference(record_of(1), None))
    for folder in ("packs/00", "refs/team+llama"):
        path = Path(store.root, folder)
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    listed = run(store.list_objects("packs/"))
    assert [(facts.key, facts.is_object) for facts in listed] == [(PACK, True)]
    assert [number_of(state) for state in run(store.list_references())] == [1]


@pytest.mark.parametrize("folder", ["refs/team+llama", "refs/team+llama/v1"])
def test_a_folder_of_references_that_is_gone_is_no_empty_one(
    store: PosixStore, folder: str
) -> None:
    put_in_place(Path(store.root, folder), "dangling")
    if folder.endswith(TAG):
        (state,) = run(store.list_references())
        assert "where a folder belongs" in (state.problem or "")
        with pytest.raises(CorruptData, match="where a folder belongs"):
            run(store.read_reference(NAME, TAG))
    else:
        with pytest.raises(CorruptData, match=re.escape(folder)):
            run(store.list_references())


@pytest.mark.parametrize("n_damaged", [1, 2])
@pytest.mark.parametrize("what", ["empty", "cut", "directory", "dangling"])
def test_a_new_generation_over_damaged_ones_keeps_the_history_that_can_be_read(
    store: PosixStore, what: str, n_damaged: int
) -> None:
    seen = None
    for number in range(1, 5):
        run(store.change_reference(record_of(number, seen), seen))
        seen = run(store.read_reference(NAME, TAG))
    for generation in range(5 - n_damaged, 5):
        path = Path(store.root, layout.generation_key(NAME, TAG, generation))
        if what in ("empty", "cut"):
            os.truncate(path, 0 if what == "empty" else 70)
        else:
            path.unlink()
            put_in_place(path, what)
    seen = run(store.reference_to_change(NAME, TAG))
    assert seen is not None
    assert seen.problem
    mended = record_of(9, seen)
    run(store.change_reference(mended, seen))
    now = run(store.read_reference(NAME, TAG))
    assert now is not None
    assert (now.record, now.version) == (mended, 5)
    kept = [int.from_bytes(p.target.raw, "big") if p.target else 0 for p in now.record.history]
    assert kept == [*[0] * n_damaged, *range(4 - n_damaged, 0, -1)]
    with pytest.raises(Conflict):
        run(store.change_reference(record_of(10, seen), seen))


def test_a_reference_of_a_newer_version_is_not_written_over(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imgfmt.wire.VERSION", 2)
    run(store.change_reference(record_of(1), None))
    monkeypatch.undo()
    with pytest.raises(Unsupported):
        run(store.reference_to_change(NAME, TAG))
    (listed,) = run(store.list_references())
    assert "version 2" in (listed.problem or "")


def test_a_store_on_a_remote_filesystem_maps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.store.posix.is_remote", lambda path: True)
    store = PosixStore(str(tmp_path))
    run(store.put(KEY, [bytes(2 << 20)]))
    monkeypatch.setattr("mmap.mmap", failing(errno.EIO))
    assert len(run(store.get(KEY))) == 2 << 20


def test_a_cancelled_write_is_whole_or_absent(store: PosixStore) -> None:
    async def work() -> None:
        for delay in range(12):
            task = asyncio.ensure_future(store.put(KEY, [bytes(1000)]))
            for _ in range(delay):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            facts = await store.facts(KEY)
            assert facts is None or facts.size_bytes == 1000

    run(work())
    assert os.listdir(f"{store.root}/tmp") == []


def test_the_time_of_an_object_is_that_of_its_last_write(store: PosixStore) -> None:
    run(store.put(KEY, [b"x"]))
    os.utime(Path(store.root, KEY), ns=(1, 1))
    facts = run(store.facts(KEY))
    assert facts is not None
    assert facts.written_ns == 1
    run(store.put(KEY, [b"x"]))
    facts = run(store.facts(KEY))
    assert facts is not None
    assert facts.written_ns > 1


def test_a_key_is_created_while_others_make_the_folder(tmp_path: Path) -> None:
    async def work() -> None:
        stores = [PosixStore(str(tmp_path / "store")) for _ in range(6)]
        made = await asyncio.gather(*(store.create(PACK, [b"x"]) for store in stores))
        assert sum(made) == 1

    run(work())
