"""Fixtures: a cache on an XFS, with one image in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.filesystems import Disk, disk
from tests.transfer.cache.support import World
from tests.transfer.fixture_store import FixtureStore


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Disk]:
    """An XFS. Whatever is mounted below it, or in `tmp_path`, is taken down in the end."""
    with disk(tmp_path, "xfs") as made:
        yield made


@pytest.fixture
def world(xfs: Disk, tmp_path: Path) -> Iterator[World]:
    """A cache on it."""
    store = FixtureStore(tmp_path / "store")
    yield World(xfs.root / "cache", store)
    store.store.close()


@pytest.fixture
def place(xfs: Disk) -> Path:
    """Where to mount."""
    made = xfs.root / "at"
    made.mkdir()
    return made
