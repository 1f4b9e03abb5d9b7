"""A pull that was killed, cancelled or cut off goes on with what it had verified."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, InvalidInput, StoreUnavailable
from tests.transfer.fixture_store import (
    CONFIG,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    contents,
    directory,
    expected,
    link,
    noise,
    run,
)
from tests.transfer.killing import forked, kill
from tests.transfer.privilege import modes_count
from transfer.catalog import open_catalog
from transfer.pull import PullReport, pull
from transfer.pulling import resume as resuming
from transfer.pulling import staging
from transfer.pulling.names import is_marker
from transfer.pulling.pull_plan import plan_pull
from transfer.pushing.scan import scan_directory
from transfer.store.posix import PosixStore

pytestmark = pytest.mark.slow

NODES: Nodes = {
    b"a.img": Node(noise(6 * MIB, 1) + bytes(MIB) + noise(6 * MIB, 2)),
    b"dir/small": Node(b"small", mode=0o444),
    b"dir/again": Node(mode=0o777, target=b"small"),
    b"e/hard": Node(same_as=b"dir/small"),
    b"empty": Node(b""),
    b"dir": Node(mode=0o555),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    """A store."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


def pulled(store: FixtureStore, image: Digest, target: Path, **given: Any) -> PullReport:
    """Pull with what was there before."""
    return run(pulling(store, image, target, **given))


async def pulling(store: FixtureStore, image: Digest, target: Path, **given: Any) -> PullReport:
    """The same, to be awaited."""
    given = {"resume": True, "facts": {}, "config": CONFIG, **given}
    return await pull(store.catalog, image, str(target), **given)


def cut_off(store: FixtureStore, image: Digest, target: Path, how: str, **given: Any) -> None:
    """A pull that is cut off from the store, or cancelled, after 5 MiB."""
    original, left = store.store.read_into, [5 * MIB]
    whole: list[asyncio.Task[Any]] = []

    async def read_into(key: str, offset: int, buffer: memoryview) -> None:
        left[0] -= len(buffer)
        if left[0] < 0:
            await asyncio.sleep(0.05)  # what was read before is written then
            if how == "cut":
                raise StoreUnavailable("cut")
            whole[0].cancel()
            await asyncio.sleep(60)
        await original(key, offset, buffer)

    async def work() -> None:
        whole.append(asyncio.ensure_future(pulling(store, image, target, **given)))
        await whole[0]

    store.store.read_into = read_into  # type: ignore[method-assign]
    try:
        with pytest.raises(StoreUnavailable if how == "cut" else asyncio.CancelledError):
            run(work())
    finally:
        store.store.read_into = original  # type: ignore[method-assign]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("how", ["cut", "cancelled"])
def test_an_interrupted_pull_goes_on_with_what_it_has(
    store: FixtureStore, tmp_path: Path, how: str, in_place: bool
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    target = home / "out"
    if in_place:
        target.mkdir()
    image = store.add(NODES)
    cut_off(store, image, target, how)
    report = pulled(store, image, target)
    assert report.fetched_bytes < 9 * MIB
    found = contents(target)
    found.pop(b".snapcask-complete", None)
    assert found == expected(NODES)
    assert os.listdir(home) == ["out"]
    assert (target / "dir").stat().st_mode & 0o777 == 0o555
    assert (target / "dir/small").stat().st_ino == (target / "e/hard").stat().st_ino


def test_several_members_go_on(store: FixtureStore, tmp_path: Path) -> None:
    trees = [store.add_tree({b"a": Node(noise(6 * MIB, seed))}) for seed in (3, 4)]
    image = store.add_image(*trees)
    cut_off(store, image, tmp_path / "out", "cut")
    assert pulled(store, image, tmp_path / "out").fetched_bytes < 9 * MIB
    assert contents(tmp_path / "out")[b"rank-1/a"] == noise(6 * MIB, 4)


def test_another_image_or_member_does_not_take_it(store: FixtureStore, tmp_path: Path) -> None:
    nodes = [{b"%03d" % i: Node(noise(65536, s + i)) for i in range(96)} for s in (1000, 2000)]
    image = store.add_image(*[store.add_tree(of_member) for of_member in nodes])
    cut_off(store, image, tmp_path / "out", "cut", member="rank-0")
    pulled(store, image, tmp_path / "out", member="rank-1")
    assert contents(tmp_path / "out") == expected(nodes[1])


def test_after_a_power_cut_only_what_is_right_counts(
    store: FixtureStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = store.add(NODES)
    cut_off(store, image, tmp_path / "out", "cut")
    (partial,) = tmp_path.glob(".out*[0-9a-f]")
    path = partial / "a.img"
    with path.open("r+b") as file:
        file.write(bytes(4096))
    monkeypatch.setattr(resuming, "session_of", lambda folder: b"of another mount")
    pulled(store, image, tmp_path / "out")
    assert contents(tmp_path / "out") == expected(NODES)


def test_without_resume_it_begins_anew_and_leaves_nothing(
    store: FixtureStore, tmp_path: Path
) -> None:
    image = store.add(NODES)
    cut_off(store, image, tmp_path / "out", "cut")
    assert pulled(store, image, tmp_path / "out", resume=False).fetched_bytes >= 12 * MIB
    other = tmp_path / "home"
    other.mkdir()
    cut_off(store, image, other / "out", "cut", resume=False)
    assert os.listdir(other) == []


def test_what_fails_for_good_leaves_nothing(store: FixtureStore, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    image = store.add(NODES)
    cut_off(store, image, home / "out", "cut")
    for path in store.pack_paths():
        raw = bytearray(path.read_bytes())
        for at in range(4096, len(raw), 65536):
            raw[at] ^= 1
        path.write_bytes(raw)
    with pytest.raises(CorruptData):
        pulled(store, image, home / "out")
    assert os.listdir(home) == []


PUBLISHED: Nodes = {
    b"": directory(0o110, mtime_ns=1_500_000_000_000_000_001),
    b"a": Node(noise(65536, 1) + bytes(65536) + noise(65536, 2), mode=0o400),
    b"d/e/deep": Node(noise(65536, 3)),
    b"d/other": Node(same_as=b"a"),
    b"link": link(b"/etc"),
    b"ro": directory(0o555),
}
_CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "ctypes.dlsym"}


class _Killing:
    """Progress that ends the process at one of the system's calls from a phase on."""

    def __init__(self, n_calls: int, begin: str, end: str) -> None:
        self._left = n_calls
        self._begin, self._end = begin, end

    def phase(self, name: str, total_bytes: int) -> None:
        if name == self._begin:
            sys.addaudithook(self._count)
        if name == self._end:
            os._exit(0)

    def advance(self, n_bytes: int) -> None:
        pass

    def _count(self, event: str, arguments: object) -> None:
        if event in _CHANGES:
            self._left -= 1
            if not self._left:
                kill()


def killed_between(
    store: FixtureStore, image: Digest, target: Path, n_calls: int, begin: str, end: str = ""
) -> bool:
    """Pull in a process that is killed at a call of a phase; False if it came to the end of it."""

    def work() -> None:
        catalog = run(open_catalog(PosixStore(store.store.root)))  # threads do not fork
        how = _Killing(n_calls, begin, end)
        run(pull(catalog, image, str(target), config=CONFIG, facts={}, progress=how, resume=True))

    return forked(work) != 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("owner", [0, 5])
def test_what_is_killed_anywhere_in_its_publish_phase_is_done_by_the_next_with_nothing_fetched(
    store: FixtureStore, tmp_path: Path, in_place: bool, owner: int
) -> None:
    root = replace(PUBLISHED[b""], uid=owner, gid=owner)
    image = store.add({**PUBLISHED, b"": root})
    n_calls = n_whole = 0
    while True:
        n_calls += 1
        home = tmp_path / f"home-{n_calls}"
        target = home / "out"
        (target if in_place else home).mkdir(parents=True)
        if not killed_between(store, image, target, n_calls, "publish"):
            break
        if in_place and (target / ".snapcask-complete").exists():
            whole = is_marker(os.fspath(target / ".snapcask-complete"))
        else:
            whole = not in_place and target.exists()
        if whole:
            n_whole += 1
        else:
            with nullcontext() if owner else modes_count():
                assert planned_bytes(store, image, target) == 0
                assert pulled(store, image, target).fetched_bytes == 0
            assert os.listdir(home) == ["out"]
        found = contents(target)
        for name in (b".snapcask-complete", *([b".snapcask-partial.moving"] * whole)):
            found.pop(name, None)
        found.pop(b".snapcask-partial.journal", None)
        assert found == expected(PUBLISHED)
        if not whole:
            assert target.stat().st_mode & 0o777 == 0o110
    assert n_calls > (12 if in_place else 3)
    assert n_whole < n_calls / 2


def planned_bytes(store: FixtureStore, image: Digest, target: Path) -> int:
    """What a dry run says would be fetched."""
    plan = plan_pull(store.catalog, image, str(target), config=CONFIG, facts={}, resume=True)
    return run(plan).fetch_bytes


def killed_in_move(store: FixtureStore, image: Digest, target: Path) -> None:
    """Pull to an existing directory, in a process that ends when all is moved up."""
    target.mkdir()

    def work() -> None:
        vars(staging)["sync_filesystem"] = lambda _: kill()
        catalog = run(open_catalog(PosixStore(store.store.root)))
        config = replace(CONFIG, fsync=True)
        run(pull(catalog, image, str(target), config=config, facts={}, resume=True))

    assert forked(work) != 0


@pytest.mark.slow
def test_what_is_killed_while_it_takes_back_what_was_moved_up_loses_nothing(
    store: FixtureStore, tmp_path: Path
) -> None:
    image = store.add(PUBLISHED)
    n_calls = 0
    while True:
        n_calls += 1
        target = tmp_path / f"out-{n_calls}"
        killed_in_move(store, image, target)
        if not killed_between(store, image, target, n_calls, "resolve", "fetch"):
            break
        assert pulled(store, image, target).fetched_bytes == 0
        found = contents(target)
        found.pop(b".snapcask-complete")
        assert found == expected(PUBLISHED)
    assert n_calls > 20


@pytest.mark.parametrize(
    "change", ["content", "one more", "one more deep", "one less", "all but hidden", "hole"]
)
def test_what_was_moved_up_and_changed_since_is_fetched_again(
    store: FixtureStore, tmp_path: Path, change: str
) -> None:
    image, target = store.add(PUBLISHED), tmp_path / "out"
    killed_in_move(store, image, target)
    match change:
        case "content":
            (target / "d/e/deep").write_bytes(b"mine")
        case "one more":
            (target / "d/mine").touch()
        case "one more deep":
            (target / "d/e/mine").touch()
        case "one less":
            (target / "a").unlink()
        case "all but hidden":
            for path in target.glob("[!.]*"):
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
        case "hole":
            with (target / "a").open("r+b") as file:
                file.seek(65536)
                file.write(b"mine")
    pulled(store, image, target)
    found = contents(target)
    found.pop(b".snapcask-complete")
    assert found == expected(PUBLISHED)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_a_journal_says_nothing_of_a_directory_that_was_removed(
    store: FixtureStore, tmp_path: Path, in_place: bool, resume: bool
) -> None:
    home = tmp_path / "home"
    target = home / "out"
    (target if in_place else home).mkdir(parents=True)
    image = store.add(NODES)
    whole = planned_bytes(store, image, target)
    cut_off(store, image, target, "cut")
    folder = target if in_place else home
    (partial,) = (p for p in folder.glob(".*snapcask-partial*") if p.is_dir())
    shutil.rmtree(partial)
    (journal,) = folder.glob(".*.journal")
    shutil.copy(journal, f"{journal}.new")
    assert planned_bytes(store, image, target) == whole
    pulled(store, image, target, resume=resume)
    found = contents(target)
    found.pop(b".snapcask-complete", None)
    assert found == expected(NODES)
    assert os.listdir(home) == ["out"]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_pull_left_is_not_pushed(
    store: FixtureStore, tmp_path: Path, in_place: bool
) -> None:
    home = tmp_path / "home"
    target = home / "out"
    (target if in_place else home).mkdir(parents=True)
    image = store.add(NODES)
    cut_off(store, image, target, "cut")
    for folder in (home, target) if in_place else (home,):
        with pytest.raises(InvalidInput, match="holds an unfinished pull"):
            scan_directory(os.fspath(folder))
    pulled(store, image, target)
    if in_place:
        assert (target / ".snapcask-complete").exists()
    assert len(scan_directory(os.fspath(target)).entries) == len(expected(NODES)) + 1


def test_what_a_pull_moved_up_is_not_pushed_by_half(store: FixtureStore, tmp_path: Path) -> None:
    target = tmp_path / "out"
    killed_in_move(store, store.add(PUBLISHED), target)
    with pytest.raises(InvalidInput, match=r"out holds an unfinished pull; .* or empty it"):
        scan_directory(os.fspath(target))
