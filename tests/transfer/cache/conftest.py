"""Fixtures: disks of the filesystems that matter, and a cache with a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.filesystems import Disk, disk
from tests.transfer.cache.support import World
from tests.transfer.fixture_store import FixtureStore


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Disk]:
    """An XFS that shares blocks."""
    with disk(tmp_path, "xfs") as made:
        yield made


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Disk]:
    """An ext4, which can't share blocks."""
    with disk(tmp_path, "ext4", 128) as made:
        yield made


@pytest.fixture(params=["xfs", "ext4", "btrfs"])
def any_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """Each kind of filesystem."""
    with disk(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    """A store."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.store.close()


@pytest.fixture
def make_world(store: FixtureStore) -> Callable[[Path], World]:
    """Makes a cache in a folder, for the store."""
    return lambda folder: World(folder / "cache", store)


@pytest.fixture
def world(tmp_path: Path, store: FixtureStore) -> World:
    """A cache on whatever filesystem the tests are on."""
    return World(tmp_path / "cache", store)
