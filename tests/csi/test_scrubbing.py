"""The driver reads its cache back by itself, and mends it from the stores that it may use."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from csi.config import CsiConfig
from csi.config_file import parse_config
from csi.scrubbing import Scrubber
from csi.stores import Stores
from tests.transfer.cache.support import World, snapshot
from tests.transfer.fixture_store import FixtureStore, contents, expected
from transfer.cache.damage import damaged_trees


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "cache", FixtureStore(tmp_path / "store"))


def config_of(store: str, interval_h: float) -> CsiConfig:
    raw = (
        f'{{"stores": {{"main": {{"url": "{store}"}}}},'
        f' "cache": {{"scrubIntervalHours": {interval_h}}}}}'
    )
    return parse_config(raw)


def scrubber(world: World, store: str, folder: Path, interval_h: float = 1.0) -> Scrubber:
    config = config_of(store, interval_h)
    folder.mkdir(exist_ok=True)
    return Scrubber(config, world.cache, Stores(config), str(folder))


def flip(path: Path) -> None:
    """A bit rots: the file's times stay."""
    there = path.stat()
    with path.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(there.st_atime_ns, there.st_mtime_ns))


def test_what_rotted_is_mended_when_it_is_time(world: World, tmp_path: Path) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    tree = world.tree(image)
    flip(tree / "pages-1.img")
    ours = scrubber(world, str(world.store.root), tmp_path / "state", 0.0000001)

    async def until_mended() -> None:
        task = asyncio.create_task(ours.run())
        while contents(tree) != expected(snapshot(1)) or damaged_trees(world.paths):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        task.cancel()

    asyncio.run(asyncio.wait_for(until_mended(), 60))


def test_it_is_not_time_right_after_the_driver_came_to_a_node(world: World, tmp_path: Path) -> None:
    ours = scrubber(world, str(world.store.root), tmp_path / "state")
    began_s = time.time()
    assert began_s - 1 <= ours._last_s() <= time.time()
    stamp = tmp_path / "state" / "scrubbed"
    os.utime(stamp, (began_s - 7200, began_s - 7200))
    assert ours._last_s() == pytest.approx(began_s - 7200, abs=1)
    os.utime(stamp, (began_s + 7200, began_s + 7200))  # the clock jumped back
    assert ours._last_s() <= time.time()
    asyncio.run(ours.scrub())
    assert stamp.stat().st_mtime == pytest.approx(time.time(), abs=60)


def test_a_store_of_a_pod_is_not_read_with_the_identity_of_the_driver(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image = world.store.add(snapshot(1))
    world.warm(image)
    flip(world.tree(image) / "pages-1.img")
    report = asyncio.run(scrubber(world, str(tmp_path / "other"), tmp_path / "state").scrub())
    assert report.mended == ()
    assert len(report.marked) == 1
    assert "none of the driver's" in " ".join(report.problems)


def test_it_can_be_turned_off(world: World, tmp_path: Path) -> None:
    ours = scrubber(world, str(world.store.root), tmp_path / "state", 0)
    asyncio.run(asyncio.wait_for(ours.run(), 10))
    assert not (tmp_path / "state" / "scrubbed").exists()
