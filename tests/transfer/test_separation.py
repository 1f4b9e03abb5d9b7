"""A store in what is pushed, or around what is pulled, is refused in so many words."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgfmt.errors import InvalidInput
from tests.transfer.fixture_store import CONFIG, FixtureStore, Node, run
from tests.transfer.pushes import new_store, pushed, write_files
from transfer.pull import pull
from transfer.pulling.pull_plan import plan_pull
from transfer.store.posix import PosixStore


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A directory that holds a store."""
    return write_files(tmp_path / "sample", {"x": b"x"})


@pytest.fixture
def inner(sample: Path) -> PosixStore:
    """That store."""
    return new_store(sample / "deep" / "store")


@pytest.mark.parametrize("pushed_name", ["sample", "sample/deep", "sample/deep/store", "link"])
def test_a_directory_that_holds_the_store_is_not_pushed(
    tmp_path: Path, inner: PosixStore, pushed_name: str
) -> None:
    (tmp_path / "link").symlink_to("sample")
    source = tmp_path / pushed_name
    said = f"^the store {re.escape(inner.root)} lies in {re.escape(str(source))}; "
    with pytest.raises(InvalidInput, match=said):
        pushed(inner, source)
    assert run(inner.list_references()) == []
    assert os.listdir(f"{inner.root}/tmp") == []


def test_a_store_that_is_named_by_a_link_is_found_too(
    tmp_path: Path, sample: Path, inner: PosixStore
) -> None:
    (tmp_path / "store").symlink_to(inner.root)
    with pytest.raises(InvalidInput, match="lies in"):
        pushed(PosixStore(str(tmp_path / "store")), sample)


def test_a_directory_in_the_store_is_not_pushed(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    source = write_files(tmp_path / "store" / "mine", {"x": b"x"})
    with pytest.raises(InvalidInput, match=f"^{source} lies in the store {store.root}; push"):
        pushed(store, source)


def test_a_store_beside_and_a_link_to_it_are_no_obstacle(tmp_path: Path, sample: Path) -> None:
    store = new_store(tmp_path / "sample-store")
    (sample / "link").symlink_to(store.root)
    pushed(store, sample)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    """A store to pull from."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


@pytest.mark.parametrize("name", ["store/out", "store/empty", "store", "link/out", "store/no/out"])
def test_nothing_is_pulled_into_the_store(store: FixtureStore, tmp_path: Path, name: str) -> None:
    image = store.add({b"x": Node(b"x")})
    (tmp_path / "store" / "empty").mkdir()
    (tmp_path / "link").symlink_to("store")
    before = sorted(tmp_path.rglob("*"))
    target = str(tmp_path / name)
    said = f"^{re.escape(target)} lies in the store {re.escape(store.store.root)}; pull to"
    with pytest.raises(InvalidInput, match=said):
        run(pull(store.catalog, image, target, config=CONFIG, facts={}))
    with pytest.raises(InvalidInput, match=said):
        run(plan_pull(store.catalog, image, target, config=CONFIG, facts={}))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_directory_beside_the_store_is_pulled_to(store: FixtureStore, tmp_path: Path) -> None:
    image = store.add({b"x": Node(b"x")})
    run(pull(store.catalog, image, str(tmp_path / "store-out"), config=CONFIG, facts={}))
    assert (tmp_path / "store-out" / "x").read_bytes() == b"x"
