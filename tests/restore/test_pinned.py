"""The pool of page-locked memory: aligned, budgeted, poisoned, and given back whatever happens."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from imgfmt.errors import InvalidInput, OutOfResources
from restore import pinned
from restore.driver import DeviceFailed
from restore.host_driver import address_of
from restore.numa import cpus_near, parse_cpu_list
from restore.pinned import PAGE_BYTES, PinnedPool
from restore.slots import make_slots
from restore.testing.fake_driver import FakeDriver
from transfer.buffers import BufferPool

MIB = 1 << 20


def test_buffers_begin_on_pages_and_are_locked_once_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "PIECE_BYTES", MIB)
    driver = FakeDriver()
    with PinnedPool(driver, 3 * MIB - 1) as pool:
        assert sorted(driver.registered.values()) == [MIB, MIB, MIB]
        assert pool.setup_s >= 0
        for _ in range(2):
            with pool.lend() as arena:
                addresses = {address_of(arena.allocate(PAGE_BYTES + 1)) for _ in range(6)}
                assert len(addresses) == 6
                assert all(address % PAGE_BYTES == 0 for address in addresses)
        assert driver.calls["register"] == 3
    assert driver.leaks == []


def test_the_pool_never_grows() -> None:
    with PinnedPool(FakeDriver(), 8 * PAGE_BYTES) as pool, pool.lend() as arena:
        for _ in range(4):
            arena.allocate(2 * PAGE_BYTES)
        with pytest.raises(OutOfResources, match="allow more pinned memory"):
            arena.allocate(1)


def test_the_engine_receives_into_pinned_memory() -> None:
    driver = FakeDriver()

    async def use() -> None:
        with PinnedPool(driver, 4 * PAGE_BYTES) as pool, pool.lend() as arena:
            buffers = BufferPool(4, PAGE_BYTES, arena.allocate)
            leases = [await buffers.acquire() for _ in range(4)]
            (start,) = driver.registered
            assert all(0 <= address_of(lease.view) - start < 4 * PAGE_BYTES for lease in leases)
            for lease in leases:
                lease.release()

    asyncio.run(use())
    assert driver.leaks == []


def test_memory_is_poisoned_when_it_comes_back() -> None:
    with PinnedPool(FakeDriver(), 2 * PAGE_BYTES, poison=True) as pool:
        with pool.lend() as arena:
            arena.allocate(2 * PAGE_BYTES)[:] = b"x" * 2 * PAGE_BYTES
        with pool.lend() as arena:
            assert bytes(arena.allocate(2 * PAGE_BYTES)) == b"\xdb" * 2 * PAGE_BYTES


def test_a_second_holder_waits_for_the_first() -> None:
    order: list[str] = []
    with PinnedPool(FakeDriver(), PAGE_BYTES) as pool:

        def second() -> None:
            with pool.lend():
                order.append("second")

        thread = threading.Thread(target=second)
        with pool.lend():
            thread.start()
            order.append("first")
        thread.join()
    assert order == ["first", "second"]


def test_what_was_locked_is_unlocked_when_a_later_piece_can_not_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "PIECE_BYTES", MIB)
    driver = FakeDriver(fail_at={"register": 3})
    with pytest.raises(DeviceFailed):
        PinnedPool(driver, 4 * MIB)
    assert driver.leaks == []


def test_a_closed_pool_lends_nothing() -> None:
    pool = PinnedPool(FakeDriver(), PAGE_BYTES)
    pool.close()
    pool.close()
    with pytest.raises(InvalidInput), pool.lend():
        pass


def test_a_budget_beyond_the_container_is_refused_before_anything_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1048576\n")
    monkeypatch.setattr(pinned, "_CGROUP_LIMITS", (str(tmp_path / "memory.max"),))
    driver = FakeDriver()
    with pytest.raises(OutOfResources, match="container"):
        PinnedPool(driver, MIB)
    assert not driver.calls["register"]
    (tmp_path / "memory.max").write_text("max\n")
    PinnedPool(driver, MIB).close()


def test_the_cpus_near_a_device_are_found(tmp_path: Path) -> None:
    mine = min(os.sched_getaffinity(0))
    place = tmp_path / "bus/pci/devices/0000:1b:00.0"
    place.mkdir(parents=True)
    (place / "numa_node").write_text("1\n")
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{mine},9000-9003\n")
    assert cpus_near("0000:1b:00.0", tmp_path) == {mine}
    (place / "numa_node").write_text("-1\n")
    assert cpus_near("0000:1b:00.0", tmp_path) == frozenset()
    assert cpus_near("0000:ff:00.0", tmp_path) == frozenset()
    assert cpus_near("", tmp_path) == frozenset()


def test_cpu_lists_are_parsed() -> None:
    assert parse_cpu_list("0-2,5\n") == {0, 1, 2, 5}
    assert parse_cpu_list("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid"):
        parse_cpu_list("a")


def test_a_pool_of_whole_pieces_and_a_page_is_cut_into_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pinned, "PIECE_BYTES", MIB)
    driver = FakeDriver()
    with PinnedPool(driver, 2 * MIB + PAGE_BYTES) as pool, pool.lend() as arena:
        assert len(make_slots(driver, arena, MIB // 2, dict)) == 4
    with PinnedPool(driver, 2 * MIB) as pool, pool.lend() as arena:  # the page is of a piece
        assert len(make_slots(driver, arena, MIB // 2, dict)) == 3
