"""Processes that read and verify: the same tensors, the same errors, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgfmt.errors import CorruptData, Internal, NotFound
from restore import engine
from restore.load_config import Verify, Workers
from restore.process_fillers import ProcessFillers
from restore.testing.fake_driver import FakeDriver
from tests.restore.loading import CONFIG, MIB, Content, checked_model, held, load_directory
from transfer.catalog import MemberContent

Made = tuple[Path, Content, MemberContent]


@pytest.fixture(autouse=True)
def made_by_processes(monkeypatch: pytest.MonkeyPatch) -> list[ProcessFillers]:
    """Processes work from the first byte on; what was made is told."""
    made: list[ProcessFillers] = []

    class Noted(ProcessFillers):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(engine, "PROCESSES_FROM_BYTES", 1)
    monkeypatch.setattr(engine, "ProcessFillers", Noted)
    return made


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return checked_model(tmp_path)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_processes_bring_the_same_tensors(
    made: Made, made_by_processes: list[ProcessFillers]
) -> None:
    root, content, checked = made
    driver = FakeDriver()
    before = open_descriptors()
    loaded = load_directory(root, driver, checked=checked, verify=Verify.CPU)
    assert held(loaded) == content
    assert loaded.report.verified
    assert loaded.report.cpu_checked_bytes > 8 * MIB
    (fillers,) = made_by_processes
    assert all(process.returncode is not None for process in fillers._processes)
    made_by_processes.clear()
    del loaded, fillers
    gc.collect()
    assert driver.leaks == []
    assert open_descriptors() <= before + 1


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.DEVICE, Verify.OFF])
def test_processes_may_leave_verifying_to_the_device(made: Made, verify: Verify) -> None:
    root, content, checked = made
    driver = FakeDriver()
    config = replace(CONFIG, workers=Workers.PROCESSES)
    loaded = load_directory(root, driver, checked=checked, verify=verify, config=config)
    assert held(loaded) == content
    assert (loaded.report.cpu_checked_bytes > 0) is (verify is Verify.AUTO)
    assert (loaded.report.device_checked_bytes > 0) is (verify is Verify.DEVICE)


@pytest.mark.parametrize(
    ("damage", "error", "reason"),
    [
        (lambda raw: raw[: 5 * MIB] + b"?" + raw[5 * MIB + 1 :], CorruptData, "'big' is lost"),
        (lambda raw: raw[:-MIB], CorruptData, "cut short"),
        (lambda raw: raw[:-1], CorruptData, "cut short"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(
    made: Made, damage: Any, error: type[Exception], reason: str
) -> None:
    root, _, checked = made
    file = root / "model-1.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    driver = FakeDriver()
    with pytest.raises(error, match=reason):
        load_directory(root, driver, checked=checked, verify=Verify.CPU)
    gc.collect()
    assert driver.leaks == []


def test_a_file_that_can_not_be_opened_is_told(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _, checked = made
    real = ProcessFillers.give

    def give(self: ProcessFillers, slot: Any) -> None:
        (root / "model-2.safetensors").unlink(missing_ok=True)
        real(self, slot)

    monkeypatch.setattr(ProcessFillers, "give", give)
    with pytest.raises(NotFound, match="model-2"):
        load_directory(root, FakeDriver(), checked=checked, verify=Verify.CPU)


def test_a_process_that_is_killed_ends_the_load(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, checked = made
    real = ProcessFillers.next

    def following(self: ProcessFillers, timeout_s: float) -> Any:
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return real(self, timeout_s)

    monkeypatch.setattr(ProcessFillers, "next", following)
    driver = FakeDriver()
    with pytest.raises(Internal, match="ended"):
        load_directory(root, driver, checked=checked, verify=Verify.CPU)
    gc.collect()
    assert driver.leaks == []


def test_threads_do_it_where_no_process_can_be_started(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, checked = made

    def refuse(*args: object, **given: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = open_descriptors()
    loaded = load_directory(root, FakeDriver(), checked=checked, verify=Verify.CPU)
    assert held(loaded) == content
    assert open_descriptors() <= before + 1
