"""The Python API: the same calls blocking and as coroutines, and reading from an open image."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import snapcask
from snapcask import aio
from tests.snapcask.support import contents, make_snapshot


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A new store, which nothing but the argument names."""
    snapcask.init_store(tmp_path / "store", pack_bytes=1 << 20)
    return tmp_path / "store"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A small directory to push."""
    return make_snapshot(tmp_path / "snapshot")


def test_push_and_pull_take_paths_and_return_reports(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    pushed = snapcask.push(snapshot, "a:1", store=store, annotations={"k": "v"})
    assert isinstance(pushed, snapcask.PushReport)
    assert pushed.reference == "a:1"
    pulled = snapcask.pull("a:1", tmp_path / "out", store=f"file://{store}")
    assert isinstance(pulled, snapcask.PullReport)
    assert pulled.digest == pushed.digest
    assert contents(tmp_path / "out") == contents(snapshot)
    assert snapcask.verify(store=store).sound
    assert snapcask.verify(["a:1"], store=store).images == 1


def test_a_pull_can_be_planned_blocking_and_as_a_coroutine(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    planned = snapcask.plan_pull("a:1", tmp_path / "out", store=store)
    assert isinstance(planned, snapcask.PullPlan)
    assert asyncio.run(aio.plan_pull("a:1", tmp_path / "out", store=store)) == planned
    assert not (tmp_path / "out").exists()
    pulled = snapcask.pull("a:1", tmp_path / "out", store=store)
    assert (planned.digest, planned.fetch_bytes) == (pulled.digest, pulled.fetched_bytes)


def test_an_image_without_a_reference_has_its_digest(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    pushed = snapcask.push(snapshot, None, store=store)
    assert pushed.reference is None
    assert snapcask.pull(str(pushed.digest), tmp_path / "o", store=store).digest == pushed.digest


def test_members_are_directories_or_stored(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    members: dict[str, Path | snapcask.MemberSource] = {
        "r0": snapshot,
        "r1": snapcask.MemberSource(image="a:1", role="rank"),
        "r2": snapcask.MemberSource(os.fspath(snapshot), facts={"gpu.count": "1"}),
    }
    pushed = snapcask.push(None, "b:1", store=store, members=members)
    assert pushed.counts.new_bytes == 0
    with snapcask.open_image("b:1", store=store, member="r1") as image:
        assert image.read("sub/more") == b"more"
    with pytest.raises(snapcask.InvalidInput, match="r0, r1, r2"):
        snapcask.open_image("b:1", store=store)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: snapcask.push(s, "a:1", store=None),
        lambda s: snapcask.push(None, "a:1", store=s),
        lambda s: snapcask.push(s, "a:1", store=s, members={"x": s}),
        lambda s: snapcask.push(s, "a@blake3:0123456789", store=s),
        lambda s: snapcask.push(s, "a:1", store=s, require=["?"]),
        lambda s: snapcask.push(s, 3, store=s),  # type: ignore[arg-type]
        lambda s: snapcask.pull(b"a:1", s, store=s),  # type: ignore[arg-type]
        lambda s: snapcask.open_image(3, store=s),  # type: ignore[arg-type]
        lambda s: snapcask.push(s, "a:1", store=s, facts={"k": "\udce9"}),
        lambda s: snapcask.push(s, "a:1", store=s, annotations={"k": "v" * 200_000}),
        lambda s: snapcask.push(s, "a:1", store=s, max_memory_bytes=1000),
        lambda s: snapcask.init_store(s / "x", codec="lz4"),
        lambda s: snapcask.MemberSource(),
        lambda s: snapcask.MemberSource(s, image="a:1"),
        lambda s: snapcask.MemberSource(s, image_member="x"),
        lambda s: snapcask.MemberSource(s, facts={"a": ""}),
        lambda s: snapcask.MemberSource(image="a:1", facts={"a": "b"}),
    ],
)
def test_what_makes_no_sense_is_invalid_input(store: Path, call: Callable[[Path], Any]) -> None:
    before = sorted(store.rglob("*"))
    with pytest.raises(snapcask.InvalidInput):
        call(store)
    assert [path for path in sorted(store.rglob("*")) if path.is_file()] == [
        path for path in before if path.is_file()
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"facts": {"k": ""}}, "fact 'k' is empty"),
        ({"facts": {"": "v"}}, "fact '' is empty"),
        ({"facts": {"k": 3}}, "'k' is not UTF-8 text"),
        ({"annotations": {"k": 3}}, "'k' is not UTF-8 text"),
        ({"annotations": {"k": b"v"}}, "'k' is not UTF-8 text"),
    ],
)
def test_a_push_publishes_nothing_that_no_reader_would_take(
    store: Path, snapshot: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(snapcask.InvalidInput, match=message):
        snapcask.push(snapshot, "a:1", store=store, **given)
    assert not list(store.glob("refs/*"))


def test_the_environment_is_not_read(
    store: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SNAPCASK_STORE", str(store))
    with pytest.raises(snapcask.InvalidInput, match="store="):
        snapcask.push(snapshot, "a:1", store=None)


def test_ranges_read_from_an_image_are_those_of_the_file(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    whole = (snapshot / "pages.img").read_bytes()
    chance = random.Random(7)
    with snapcask.open_image("a:1", store=store) as image:
        assert image.read("pages.img") == whole
        for _ in range(60):
            offset = chance.randrange(len(whole) + 10)
            length = chance.choice([0, 1, 4096, chance.randrange(len(whole))])
            assert image.read("pages.img", offset, length) == whole[offset : offset + length]
            buffer = bytearray(b"?" * length)
            n_read = image.read_into("pages.img", offset, buffer)
            wanted = whole[offset : offset + length]
            assert n_read == len(wanted)
            assert buffer == wanted + b"?" * (length - n_read)
        assert image.read("pages.img", len(whole) - 3) == b"end"
        assert image.read("empty") == b""
        assert image.read("pages.img", len(whole) + 5) == b""


def test_a_read_fetches_only_the_chunks_that_cover_it(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    whole = (snapshot / "pages.img").read_bytes()
    n_damaged = 0
    for pack in (store / "packs").glob("*/*"):
        raw = pack.read_bytes()
        n_damaged += whole[-500:] in raw
        pack.write_bytes(raw.replace(whole[-500:], bytes(500)))
    assert n_damaged == 1
    with snapcask.open_image("a:1", store=store) as image:
        assert image.read("pages.img", 0, 1 << 20) == whole[: 1 << 20]
        with pytest.raises(snapcask.CorruptData, match=r"pages\.img"):
            image.read("pages.img", len(whole) - 1, 1)


def test_stat_and_paths_are_those_of_the_directory(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    with snapcask.open_image("a:1", store=store) as image:
        paths = [os.fsdecode(path) for path in contents(snapshot)]
        assert sorted(image.paths()) == sorted(paths)
        for path in paths:
            found, there = image.stat(path), (snapshot / path).lstat()
            assert found.mode == there.st_mode & 0o7777
            assert found.mtime_ns == there.st_mtime_ns
            assert (found.uid, found.gid) == (there.st_uid, there.st_gid)
            if found.type is not snapcask.EntryType.DIRECTORY:
                assert found.size_bytes == there.st_size
        assert image.stat("sub/small-again").size_bytes == 100
        assert image.stat("link").link_target == "sub/more"
        assert image.stat("").type is snapcask.EntryType.DIRECTORY
        with pytest.raises(snapcask.NotFound):
            image.stat("nothing")
        with pytest.raises(snapcask.InvalidInput):
            image.read("sub")
        with pytest.raises(snapcask.InvalidInput):
            image.read("pages.img", -1)
        with pytest.raises(snapcask.InvalidInput):
            image.read_into("pages.img", 0, b"read-only")


def test_a_closed_image_says_so_and_leaves_no_thread(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    before = threading.active_count()
    image = snapcask.open_image("a:1", store=store)
    image.read("empty")
    image.close()
    image.close()
    with pytest.raises(snapcask.InvalidInput, match="closed"):
        image.read("empty")
    with pytest.raises(snapcask.NotFound):
        snapcask.open_image("b:1", store=store)
    assert threading.active_count() == before


def test_an_image_may_be_read_from_several_threads(store: Path, snapshot: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store)
    whole = (snapshot / "pages.img").read_bytes()
    found: list[bool] = []
    with snapcask.open_image("a:1", store=store) as image:

        def read(seed: int) -> None:
            offset = random.Random(seed).randrange(len(whole))
            found.append(image.read("pages.img", offset, 300_000) == whole[offset:][:300_000])

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [True] * 8


def test_blocking_calls_work_where_a_loop_is_running(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    async def cell() -> None:
        snapcask.push(snapshot, "a:1", store=store)
        snapcask.pull("a:1", tmp_path / "out", store=store)
        with snapcask.open_image("a:1", store=store) as image:
            assert image.read("sub/more") == b"more"

    asyncio.run(cell())
    assert contents(tmp_path / "out") == contents(snapshot)


def test_the_same_calls_are_coroutines(store: Path, snapshot: Path, tmp_path: Path) -> None:
    async def program() -> None:
        async with asyncio.TaskGroup() as group:
            for n in range(3):
                group.create_task(aio.push(snapshot, f"a:{n}", store=store))
        await aio.pull("a:1", tmp_path / "out", store=store)
        assert (await aio.verify(store=store)).sound
        async with aio.open_image("a:2", store=store) as image:
            parts = await asyncio.gather(*(image.read("pages.img", n, 1) for n in range(5)))
            assert b"".join(parts) == (snapshot / "pages.img").read_bytes()[:5]

    asyncio.run(program())
    assert contents(tmp_path / "out") == contents(snapshot)


class Recorder:
    """A progress that notes what it is told, and does something when a phase begins."""

    def __init__(self, when: str = "", do: Callable[[], object] = lambda: None) -> None:
        self.phases: list[str] = []
        self.n_bytes = 0
        self._when = when
        self._do = do

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases.append(name)
        if name == self._when:
            self._do()

    def advance(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes


def test_progress_is_told_of_phases_and_bytes(store: Path, snapshot: Path, tmp_path: Path) -> None:
    pushing, pulling = Recorder(), Recorder()
    report = snapcask.push(snapshot, "a:1", store=store, progress=pushing)
    assert pushing.phases[-1] == "publish"
    assert pushing.n_bytes == report.logical_bytes - report.zero_bytes
    snapcask.pull("a:1", tmp_path / "out", store=store, progress=pulling)
    assert pulling.n_bytes == pushing.n_bytes


def test_a_push_that_loses_its_reference_to_another_is_told_and_loses_nothing(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    other = make_snapshot(tmp_path / "other", 2)
    rival = Recorder("publish", lambda: snapcask.push(other, "a:1", store=store))
    with pytest.raises(snapcask.Conflict, match="snapcask tag blake3:"):
        snapcask.push(snapshot, "a:1", store=store, progress=rival)
    with snapcask.open_image("a:1", store=store) as image:
        assert image.read("small.img") == (other / "small.img").read_bytes()
    assert snapcask.push(snapshot, "a:2", store=store).counts.new_bytes == 0


def test_names_of_one_symbolic_link_come_back_as_one(
    store: Path, snapshot: Path, tmp_path: Path
) -> None:
    os.symlink("nowhere", snapshot / "a-link")
    os.link(snapshot / "a-link", snapshot / "sub" / "z-link", follow_symlinks=False)
    pushed = snapcask.push(snapshot, "a:1", store=store)
    snapcask.pull("a:1", tmp_path / "out", store=store)
    found = [os.lstat(tmp_path / "out" / name) for name in ("a-link", "sub/z-link")]
    assert found[0].st_ino == found[1].st_ino
    assert found[0].st_nlink == 2
    assert contents(tmp_path / "out") == contents(snapshot)
    with snapcask.open_image("a:1", store=store) as image:
        assert image.stat("sub/z-link").link_target == "nowhere"
        assert image.stat("sub/z-link").size_bytes == 7
    assert snapcask.push(tmp_path / "out", store=store, reference=None).digest == pushed.digest


def test_warnings_about_a_malformed_dump_do_not_stop_a_push(store: Path, snapshot: Path) -> None:
    (snapshot / "inventory.img").write_bytes(b"nonsense")
    (snapshot / "pstree.img").write_bytes(b"nonsense")
    report = snapcask.push(snapshot, "a:1", store=store)
    assert len(report.warnings) == 1
    assert "inventory.img" in report.warnings[0]


def test_little_memory_is_enough(store: Path, snapshot: Path, tmp_path: Path) -> None:
    snapcask.push(snapshot, "a:1", store=store, max_memory_bytes=6 << 20)
    snapcask.pull("a:1", tmp_path / "out", store=store, max_memory_bytes=6 << 20)
    assert contents(tmp_path / "out") == contents(snapshot)
