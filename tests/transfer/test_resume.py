"""A pull that was killed, cancelled or cut off goes on with what it had verified."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, StoreUnavailable
from tests.transfer.fixture_store import (
    CONFIG,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    contents,
    expected,
    noise,
    run,
)
from transfer import resume as resuming
from transfer.pull import PullReport, pull

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
