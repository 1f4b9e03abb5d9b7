"""However many processes ask, one download runs; whoever is killed, the others go on."""

from __future__ import annotations

import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from imgfmt.digest import Digest
from imgfmt.errors import StoreUnavailable
from tests.transfer.cache.support import (
    IN_FLIGHT_BYTES,
    World,
    join,
    served_bytes,
    snapshot,
    start,
)
from tests.transfer.fixture_store import MIB, Node, contents, expected, noise, run
from transfer.cache import warm as warming
from transfer.cache.disks import MAIN
from transfer.cache.flights import Builder, OwnFlight, live_flights, read_builder, reserved
from transfer.cache.locks import is_held, lock
from transfer.cache.owners import is_sound
from transfer.cache.records import Flight


def test_16_processes_fetch_an_image_once(world: World, tmp_path: Path) -> None:
    image = world.store.add({b"a": Node(noise(12 * MIB)), b"b": Node(b"small")})
    log = tmp_path / "log"
    processes = [start(world, image, log, delay_s=0.02) for _ in range(16)]
    assert join(processes) == [0] * 16
    assert 12 * MIB <= served_bytes(log) < 12 * MIB + MIB
    assert contents(world.tree(image))[b"a"] == noise(12 * MIB)


def kill_builder(world: World, tree: Digest) -> bool:
    """Kill -9 who builds a tree, if somebody does."""
    path = world.paths.lock(tree)
    builder = read_builder(path) if os.path.exists(path) and is_held(path) else None
    if builder is None:
        return False
    os.kill(builder.pid, signal.SIGKILL)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_when_the_downloader_is_killed_another_goes_on(
    world: World, tmp_path: Path, seed: int
) -> None:
    """At most what was in flight is served again."""
    size = 16 * MIB
    image = world.store.add({b"a": Node(noise(size, seed)), b"b": Node(b"small")})
    tree, log = world.tree_of(image), tmp_path / "log"
    processes = [start(world, image, log, delay_s=0.01) for _ in range(3)]
    until = time.monotonic() + 20
    threshold = random.Random(seed).uniform(0, size)
    while served_bytes(log) < threshold and time.monotonic() < until:
        time.sleep(0.002)
    killed = kill_builder(world, tree)
    codes = join(processes)
    assert sorted(c or 0 for c in codes) == [-9 if killed else 0, 0, 0]
    assert contents(world.tree(image)) == {b"a": noise(size, seed), b"b": b"small"}
    assert served_bytes(log) <= size + IN_FLIGHT_BYTES + MIB
    assert is_sound(world.paths, tree, world.cache.session)


@pytest.mark.parametrize("seed", range(3))
def test_when_all_are_killed_the_next_continues(world: World, tmp_path: Path, seed: int) -> None:
    size = 16 * MIB
    image = world.store.add({b"a": Node(noise(size, seed))})
    log = tmp_path / "log"
    process = start(world, image, log, delay_s=0.02)
    until = time.monotonic() + 20
    while served_bytes(log) < 8 * MIB and time.monotonic() < until:
        time.sleep(0.002)
    process.kill()
    process.join()
    first = served_bytes(log)
    assert join([start(world, image, log)]) == [0]
    assert served_bytes(log) <= size + IN_FLIGHT_BYTES + MIB
    assert served_bytes(log) - first < size - MIB
    assert contents(world.tree(image))[b"a"] == noise(size, seed)


def test_two_images_that_overlap_fetch_what_they_share_once(world: World, tmp_path: Path) -> None:
    images = [world.store.add(snapshot(seed, mib=16)) for seed in (1, 2)]
    log = tmp_path / "log"
    processes = [start(world, image, log, delay_s=0.05) for image in images]
    assert join(processes) == [0, 0]
    for image, seed in zip(images, (1, 2), strict=True):
        assert contents(world.tree(image)) == expected(snapshot(seed, mib=16))
    assert served_bytes(log) < 24 * MIB + MIB


def test_what_a_killed_flight_did_not_bring_is_fetched(world: World, tmp_path: Path) -> None:
    images = [world.store.add(snapshot(seed, mib=16)) for seed in (1, 2)]
    log = tmp_path / "log"
    first = start(world, images[0], log, delay_s=0.1)
    until = time.monotonic() + 20
    while served_bytes(log) < 2 * MIB and time.monotonic() < until:
        time.sleep(0.002)
    second = start(world, images[1], log, delay_s=0.01)
    while len(os.listdir(world.paths.flights)) < 3 and time.monotonic() < until:
        time.sleep(0.002)
    first.kill()
    assert join([first, second]) == [-9, 0]
    assert contents(world.tree(images[1])) == expected(snapshot(2, mib=16))


def test_a_flight_ends_with_its_process_and_its_claims_too(world: World) -> None:
    flight = OwnFlight(world.paths)
    digests = np.frombuffer(bytes(range(64)), np.uint8).reshape(2, 32)
    zeros = np.zeros(2, "u4")
    flight.state(Flight((Digest(bytes(32)),), 1000, digests, zeros, zeros))
    flight.advance(300, 1000)
    other = OwnFlight(world.paths)
    (found,) = live_flights(world.paths, other)
    assert found.find(digests).tolist() == [0, 1]
    assert found.find(digests[::-1] + np.uint8(1)).tolist() == [-1, -1]
    assert reserved(world.cache.path, other) == {MAIN: 700}
    flight.close()
    assert not found.alive
    assert live_flights(world.paths, other) == []
    assert os.listdir(world.paths.flights) == []


def test_what_the_dead_left_in_flights_is_removed(world: World) -> None:
    for name in ("dead", "dead.progress", ".new-half"):
        Path(world.paths.flights, name).write_bytes(b"anything")
    assert live_flights(world.paths, None) == []
    assert os.listdir(world.paths.flights) == []


def test_a_builder_that_hangs_is_told_of(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    image = world.store.add(snapshot(1))
    monkeypatch.setattr(warming, "_STALLED_S", 0.05)
    held = lock(world.paths.lock(world.tree_of(image)))
    assert held is not None
    with held:
        held.write(Builder.of_this(OwnFlight(world.paths)).encode())
        with pytest.raises(StoreUnavailable, match=f"process {os.getpid()} is fetching"):
            world.warm(image)


def test_who_waits_sees_the_progress_of_who_fetches(world: World) -> None:
    import asyncio

    image = world.store.add({b"a": Node(noise(8 * MIB))})
    tree = world.tree_of(image)
    seen: list[tuple[str, int]] = []

    class Shown:
        def phase(self, name: str, total_bytes: int) -> None:
            seen.append((name, total_bytes))

        def advance(self, n_bytes: int) -> None:
            seen.append(("advance", n_bytes))

    async def both() -> None:
        held = lock(world.paths.lock(tree))
        flight = OwnFlight(world.paths)
        zeros = np.zeros(0, "u4")
        flight.state(Flight((tree,), 0, np.zeros((0, 32), np.uint8), zeros, zeros))
        assert held is not None
        held.write(Builder.of_this(flight).encode())
        async with asyncio.TaskGroup() as group:
            group.create_task(world.warming(image, progress=Shown()))
            for done in (100, 900):
                await asyncio.sleep(0.01)
                flight.advance(done, 5000)
                until = time.monotonic() + 5
                while ("advance", done) not in seen and time.monotonic() < until:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            held.close()
        flight.close()

    run(both())
    assert ("wait", 5000) in seen
    assert ("advance", 900) in seen
    assert contents(world.tree(image))[b"a"] == noise(8 * MIB)


def test_locks_are_not_inherited_by_forked_children(tmp_path: Path) -> None:
    held = lock(str(tmp_path / "lock"))
    assert held is not None
    (read, write), (ready, tell) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.write(tell, b"1")
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    os.read(ready, 1)
    held.close()
    try:
        assert not is_held(str(tmp_path / "lock"))
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_who_waited_for_a_lock_whose_file_was_removed_gets_the_new_one(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    first = lock(path)
    assert first is not None
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(lock, path)
        until = time.monotonic() + 10
        while not _waits_for(path) and time.monotonic() < until:
            time.sleep(0.001)
        first.remove()
        first.close()
        second = waiting.result()
    assert second is not None
    assert is_held(path)
    second.close()


def _waits_for(path: str) -> bool:
    """Whether somebody waits for the lock of a file."""
    inode = f":{os.stat(path).st_ino} "
    return any(
        "->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()
    )
