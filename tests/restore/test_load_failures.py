"""Whichever way bytes take and whatever fails: it is reported, and nothing is leaked."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from imgfmt.errors import CorruptData, ImageError, OutOfResources
from restore import sources
from restore.direct_storage import DirectStorage
from restore.driver import DeviceFailed
from restore.load import Devices, FileRange, Loaded, load_ranges
from restore.load_config import Verify, Workers
from restore.sources import DirectorySource
from restore.testing.fake_driver import FakeDriver
from tests.restore.loading import (
    CONFIG,
    MIB,
    Content,
    content_of,
    load_directory,
    load_image,
    model,
    pushed,
)
from tests.restore.test_load import FakeFileApi, wired
from transfer.catalog import MemberContent
from transfer.store.posix import PosixStore
from transfer.threads import Threads

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Made:
    """A model, its store, and its tree."""

    root: Path
    content: Content
    place: Path
    checked: MemberContent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    content = model(root / "model")
    store = asyncio.run(pushed(root / "model", root / "store"))
    return Made(root / "model", content, root / "store", asyncio.run(content_of(store)))


Way = Callable[[Made, FakeDriver], Loaded | None]


def from_packs(made: Made, driver: FakeDriver) -> Loaded:
    return load_image(PosixStore(str(made.place)), driver, verify=Verify.DEVICE)


def from_the_wire(made: Made, driver: FakeDriver) -> Loaded:
    return load_image(wired(made.place), driver, devices=(0, 1))


def to_two_devices(made: Made, driver: FakeDriver) -> Loaded:
    return load_directory(
        made.root, driver, devices=(0, 1), checked=made.checked, verify=Verify.DEVICE
    )


def by_processes(made: Made, driver: FakeDriver) -> Loaded:
    config = replace(CONFIG, workers=Workers.PROCESSES)
    return load_directory(made.root, driver, checked=made.checked, verify=Verify.CPU, config=config)


def by_the_device(made: Made, driver: FakeDriver) -> Loaded:
    """With files that the device reads itself: see `gpudirect`."""
    config = replace(CONFIG, gpudirect=True)
    return load_directory(
        made.root, driver, checked=made.checked, verify=Verify.DEVICE, config=config
    )


def ranges(made: Made, driver: FakeDriver) -> None:
    async def work() -> None:
        pointer = driver.allocate(0, 3 * MIB)
        try:
            with Threads("test", 2) as threads:
                source = DirectorySource(str(made.root), threads)
                wanted = [FileRange("model-1.safetensors", 12_345, 2 * MIB + 1, pointer)]
                await load_ranges(source, wanted, Devices(driver, (0,)), threads, CONFIG)
        finally:
            driver.memory.pop(pointer)  # the caller's

    asyncio.run(work())


@pytest.fixture(autouse=True)
def gpudirect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeFileApi]:
    """A machine with the module; the cuFile of a test is made for its driver."""
    (tmp_path / "node").touch()
    apis: dict[str, FakeFileApi] = {}
    monkeypatch.setattr(
        sources, "DirectStorage",
        lambda make: DirectStorage(lambda: apis["api"], tmp_path / "node", tmp_path / "stats"),
    )  # fmt: skip
    return apis


WAYS: list[Way] = [
    from_packs, from_the_wire, to_two_devices, by_processes, by_the_device, ranges
]  # fmt: skip


def open_things() -> tuple[int, int]:
    """Open descriptors, and running threads but those of stores, which stay open here."""
    names = [thread.name for thread in threading.enumerate()]
    loading = [name for name in names if not name.startswith("snapcask-store")]
    return len(os.listdir("/proc/self/fd")), len(loading)


def attempt(
    way: Way, made: Made, driver: FakeDriver, gpudirect: dict[str, FakeFileApi], stats: Path
) -> str:
    """Load and drop; returns the error, or nothing."""
    gpudirect["api"] = FakeFileApi(driver, stats)
    try:
        way(made, driver)
    except ImageError as error:
        error.__traceback__ = None
        return str(error)
    finally:
        assert not gpudirect["api"].open_files
    return ""


@pytest.mark.parametrize("lost", [False, True], ids=["fails", "is lost"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("register", 1), ("create_event", 1), ("synchronize", 1), ("copy_to_device", 1),
        ("record", 2), ("wait", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_nothing_is_left_of_a_load_that_fails(
    made: Made,
    tmp_path: Path,
    gpudirect: dict[str, FakeFileApi],
    way: Way,
    name: str,
    call: int,
    lost: bool,
) -> None:
    gc.collect()
    before = open_things()
    driver = FakeDriver(2, fail_at={name: call})
    if lost:
        real = driver._enter

        def enter(name: str, device: int | None = None) -> None:
            try:
                real(name, device)
            except DeviceFailed:
                driver.lost.update((0, 1))
                raise

        driver._enter = enter  # type: ignore[method-assign]
    error = attempt(way, made, driver, gpudirect, tmp_path / "stats")
    gc.collect()
    if driver.calls[name] >= call and (name, way) != ("synchronize", by_the_device):
        assert f"{name} fails" in error or "is gone" in error
    if lost and error:
        assert not driver.registered  # what the device had is gone with it
    else:
        assert driver.leaks == []
    assert all(now <= then for now, then in zip(open_things(), before, strict=True))


def test_what_failed_is_told_and_not_what_a_lost_device_says_to_the_clean_up(
    made: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(fail_at={"wait": 2})
    real = driver.unregister

    def refuse(address: int) -> None:
        real(address)
        raise DeviceFailed("page-locked memory can't be let go")

    monkeypatch.setattr(driver, "unregister", refuse)
    with pytest.raises(DeviceFailed, match="wait fails"):
        load_directory(made.root, driver)
    assert "page-locked memory can't be let go" in caplog.text
    gc.collect()
    assert driver.leaks == []
    driver.fail_at.clear()
    with pytest.raises(DeviceFailed, match="let go"):  # where nothing failed before, it is told
        load_directory(made.root, driver)
    gc.collect()
    assert driver.leaks == []


def test_a_device_that_is_full_beside_the_tensors_says_what_to_do(made: Made) -> None:
    needed = sum(-(-len(data) // 256) * 256 for data in made.content.values())
    driver = FakeDriver(memory_bytes=needed + MIB)
    load = partial(load_directory, made.root, driver, checked=made.checked)
    with pytest.raises(OutOfResources, match=r"cuda:0 can't be had; .*verify=cpu"):
        load(verify=Verify.DEVICE)
    gc.collect()
    assert driver.leaks == []
    assert load(verify=Verify.CPU).report.verified


def test_the_second_device_is_asked_before_the_first_is_filled(made: Made) -> None:
    driver = FakeDriver(2, memory_bytes=1 << 40)
    taken = driver.allocate(1, (1 << 20))
    driver.memory_bytes = sum(map(len, made.content.values())) + (1 << 20)
    with pytest.raises(OutOfResources, match=r"cuda:1, .* are free there"):
        load_directory(made.root, driver, devices=(0, 1))
    driver.free(1, taken)
    assert driver.calls["allocate"] == 1
    assert driver.leaks == []


@pytest.mark.parametrize("way", [by_the_device, by_processes, from_the_wire])
def test_a_damaged_chunk_leaves_nothing_behind_either(
    tmp_path: Path, gpudirect: dict[str, FakeFileApi], way: Way
) -> None:
    content = model(tmp_path / "model")
    store = asyncio.run(pushed(tmp_path / "model", tmp_path / "store"))
    own = Made(tmp_path / "model", content, tmp_path / "store", asyncio.run(content_of(store)))
    needle = content["big"][3 * MIB : 3 * MIB + 64]
    for path in [*own.place.glob("packs/*/*"), *own.root.glob("*.safetensors")]:
        raw = bytearray(path.read_bytes())
        if needle in raw:
            raw[raw.index(needle)] ^= 1
            path.chmod(0o644)
            path.write_bytes(raw)
    gc.collect()
    before = open_things()
    driver = FakeDriver(2)
    gpudirect["api"] = FakeFileApi(driver, tmp_path / "stats")
    with pytest.raises(CorruptData, match="'big' is lost"):
        way(own, driver)
    gc.collect()
    assert driver.leaks == []
    assert all(now <= then for now, then in zip(open_things(), before, strict=True))
    assert not gpudirect["api"].open_files
