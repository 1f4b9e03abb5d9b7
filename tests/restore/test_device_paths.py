"""Which way files of each disk take to each device, and why, is told by trying."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from restore import device_paths as module
from restore.device_paths import DevicePaths, Place, device_paths, paths_here
from restore.direct_storage import FileApi
from restore.testing.fake_driver import FakeDriver
from tests.restore.test_load import FakeFileApi

Look = Callable[..., list[DevicePaths]]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver(2)


@pytest.fixture
def api(driver: FakeDriver, tmp_path: Path) -> FakeFileApi:
    return FakeFileApi(driver, tmp_path / "stats")


@pytest.fixture
def look(tmp_path: Path, api: FakeFileApi) -> Look:
    """On a machine that has the module."""
    (tmp_path / "node").touch()
    (tmp_path / "disk").mkdir()
    return partial(
        device_paths, api=lambda: api, node=tmp_path / "node", statistics=tmp_path / "stats"
    )


def test_a_device_that_reads_a_trial_itself_gets_its_files_so(
    look: Look, driver: FakeDriver, api: FakeFileApi, tmp_path: Path
) -> None:
    found = look(driver, [Place(str(tmp_path / "disk"))])
    assert [device.device for device in found] == ["cuda:0", "cuda:1"]
    for device in found:
        assert device.name.startswith("fake")
        (disk,) = device.disks
        assert disk.directory == str(tmp_path / "disk")
        assert disk.filesystem
        assert not disk.why_not_direct
    assert api.n_reads == 2
    assert not api.open_files
    assert driver.leaks == []
    assert os.listdir(tmp_path / "disk") == []


def test_a_device_gets_files_through_host_memory_where_its_trial_fails(
    look: Look, driver: FakeDriver, tmp_path: Path
) -> None:
    failing = FakeFileApi(driver, tmp_path / "stats", fails_at=2)
    first, second = look(driver, [Place(str(tmp_path / "disk"))], api=lambda: failing)
    assert not first.disks[0].why_not_direct
    assert "returned -5" in second.disks[0].why_not_direct
    assert driver.leaks == []


def test_each_filesystem_is_tried_once_and_a_sample_that_is_there_is_taken(
    look: Look, driver: FakeDriver, api: FakeFileApi, tmp_path: Path
) -> None:
    sample = tmp_path / "pack"
    sample.write_bytes(os.urandom(8192))
    places = [Place("/proc"), Place(str(tmp_path), str(sample)), Place(str(tmp_path / "disk"))]
    first, _ = look(driver, places)
    assert [disk.directory for disk in first.disks] == ["/proc", str(tmp_path)]
    assert "no file can be made there" in first.disks[0].why_not_direct
    assert not first.disks[1].why_not_direct
    assert sorted(os.listdir(tmp_path)) == ["disk", "node", "pack", "stats"]


def test_without_the_module_nothing_is_written_and_cufile_is_not_opened(
    driver: FakeDriver, tmp_path: Path
) -> None:
    def never() -> FileApi:
        raise AssertionError("cuFile was opened")

    places = [Place(str(tmp_path)), Place("/proc")]
    found = device_paths(driver, places, api=never, node=tmp_path / "node")
    for device in found:
        assert len(device.disks) == 2
        assert all("nvidia-fs is not loaded" in disk.why_not_direct for disk in device.disks)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", ["allocate", "synchronize"])
def test_a_device_that_is_lost_is_told_of_and_the_others_are_looked_at(
    look: Look, driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real = getattr(driver, call)

    def lose(*given: object) -> object:
        if given[0] == 0 or getattr(given[0], "device", None) == 0:
            driver.lost.add(0)
        return real(*given)

    monkeypatch.setattr(driver, call, lose)
    lost, other = look(driver, [Place(str(tmp_path / "disk"))])
    assert "cuda:0 is gone" in lost.problem
    assert lost.disks == ()
    assert not other.problem
    assert not other.disks[0].why_not_direct


def test_where_the_extra_is_not_installed_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cuda_is_installed", lambda: False)
    assert paths_here([Place(".")]) is None
