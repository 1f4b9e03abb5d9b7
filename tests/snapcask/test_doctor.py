"""What `doctor` says of GPUs: which disks each reads itself, and why not others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from imgfmt.errors import Unsupported
from restore import device_paths
from restore.testing.fake_driver import FakeDriver
from tests.restore.test_load import FakeFileApi
from tests.snapcask.conftest import Call
from tests.snapcask.test_docs import WORDS, keys_of
from transfer import doctor


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOCAL_BYTES", 4 << 20)
    monkeypatch.setattr(doctor, "_RANGE_BYTES", 1 << 20)


def with_gpus(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, tmp_path: Path) -> None:
    """Have the machine show the GPUs of a fake driver, and a cuFile that works."""
    (tmp_path / "node").touch()
    api = FakeFileApi(driver, tmp_path / "stats")
    look = partial(
        device_paths.device_paths,
        api=lambda: api, node=tmp_path / "node", statistics=tmp_path / "stats",
    )  # fmt: skip
    monkeypatch.setattr(device_paths, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(device_paths, "cuda_driver", lambda: driver)
    monkeypatch.setattr(device_paths, "device_paths", look)


def test_doctor_tells_which_path_each_gpu_and_disk_gets(
    call: Call, store: Path, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("push", snapshot, "a:1").code == 0
    driver = FakeDriver(2)
    with_gpus(monkeypatch, driver, tmp_path)
    line = ("doctor", "--directory", tmp_path, "--load-from", "/proc")
    shown = call(*line)
    assert shown.code == 0, shown
    (direct, bounced) = [text for text in shown.out.splitlines() if " cuda:1 " in text]
    assert "fake 1 gets files of" in direct
    assert str(tmp_path) in direct
    assert direct.endswith("by GPUDirect")
    assert "/proc" in bounced
    assert "through page-locked host memory: no file can be made there" in bounced
    document = call(*line, "--json").document
    assert [gpu["device"] for gpu in document["gpus"]] == ["cuda:0", "cuda:1"]
    first, second = document["gpus"][0]["disks"]
    assert (first["directory"], first["gpudirect"], first["why_not"]) == (str(tmp_path), True, "")
    assert (second["directory"], second["gpudirect"]) == ("/proc", False)
    assert second["why_not"]
    words = {word for phrase in WORDS for word in phrase.split()}
    rates = set(document["rates_gb_s"])
    assert set(keys_of(document)) - rates <= words
    assert driver.leaks == []


def test_doctor_tries_a_pack_of_a_store_that_is_a_directory(
    call: Call, store: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call("push", snapshot, "a:1").code == 0
    with_gpus(monkeypatch, FakeDriver(), tmp_path)
    document = call("doctor", "--directory", "/dev/shm", "--json").document
    disks = {disk["directory"]: disk for disk in document["gpus"][0]["disks"]}
    assert disks[str(store)]["gpudirect"] is True


def test_a_gpu_that_fails_is_bad(
    call: Call,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    driver = FakeDriver()
    driver.lost.add(0)
    with_gpus(monkeypatch, driver, tmp_path)
    with pytest.raises(SystemExit) as ended:
        call("doctor", "--directory", tmp_path)
    assert ended.value.code == 5
    assert "cuda:0 is gone" in capsys.readouterr().out


def test_doctor_says_so_where_there_is_no_gpu_and_nothing_without_the_extra(
    call: Call, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> FakeDriver:
        raise Unsupported("no GPU can be used here (there is none); use device cpu")

    monkeypatch.setattr(device_paths, "cuda_is_installed", lambda: True)
    monkeypatch.setattr(device_paths, "cuda_driver", no_gpu)
    shown = call("doctor", "--directory", tmp_path)
    assert shown.code == 0
    assert "no GPU can be used here" in shown.out
    monkeypatch.setattr(device_paths, "cuda_is_installed", lambda: False)
    document = call("doctor", "--directory", tmp_path, "--json").document
    assert document["gpus"] == []
    assert not any(f["check"] == "gpu" for f in document["findings"])
