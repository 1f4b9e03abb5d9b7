"""Reads by the C library: the right bytes, errors told, and nobody writes once they were closed."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgfmt.errors import CorruptData, Internal, NotFound
from restore import libc_fillers, libc_reads
from restore.checkers import Checkers
from restore.files import Files, Route
from restore.fillers import Filler
from restore.host_driver import address_of
from restore.lanes import Target
from restore.libc_reads import LibcReads, can_read
from restore.load_config import Verify
from restore.load_plan import Copy, LoadPlan, Read
from restore.testing.fake_driver import FakeDriver
from tests.restore.loading import (
    CONFIG,
    MIB,
    Content,
    checked_model,
    held,
    load_directory,
    noise,
)
from transfer.catalog import MemberContent


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Content, MemberContent]:
    return checked_model(tmp_path)


def finished(reads: LibcReads, number: int) -> int:
    """How much a read brought, once it has ended."""
    while (found := reads.result(number)) is None:
        reads.wait(1.0)
    return found


def test_many_reads_at_a_time_bring_the_right_bytes(tmp_path: Path) -> None:
    assert can_read()
    raw = noise(8 * MIB + 5, 1)
    (tmp_path / "f").write_bytes(raw)
    memory = memoryview(mmap.mmap(-1, 8 * MIB))
    descriptors = [os.open(tmp_path / "f", os.O_RDONLY) for _ in range(8)]
    reads = LibcReads(8)
    for number, descriptor in enumerate(descriptors):
        at = address_of(memory[number * MIB :])
        reads.begin(number, descriptor, number * MIB + 5, at, MIB)
    assert [finished(reads, number) for number in range(8)] == [MIB] * 8
    reads.close()
    assert memory.tobytes() == raw[5:]
    for descriptor in descriptors:
        os.close(descriptor)


def test_the_end_of_a_file_and_errors_are_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    memory = memoryview(mmap.mmap(-1, 4096))
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    reads = LibcReads(1)
    reads.begin(0, descriptor, 1, address_of(memory), 100)
    assert finished(reads, 0) == 2
    reads.begin(0, descriptor, 3, address_of(memory), 100)
    assert finished(reads, 0) == 0
    reads.begin(0, descriptor, 0, 8, 3)  # nobody's memory
    with pytest.raises(OSError, match="address") as failed:
        finished(reads, 0)
    assert failed.value.errno == errno.EFAULT
    os.close(descriptor)
    reads.begin(0, descriptor, 0, address_of(memory), 3)
    with pytest.raises(OSError, match="descriptor"):
        finished(reads, 0)
    reads.close()


def test_after_closing_nobody_writes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\1" * 64 * MIB)
    memory = memoryview(mmap.mmap(-1, 64 * MIB))
    descriptors = [os.open(tmp_path / "f", os.O_RDONLY) for _ in range(16)]
    reads = LibcReads(16)
    for number, descriptor in enumerate(descriptors):
        reads.begin(number, descriptor, 0, address_of(memory[number * 4 * MIB :]), 4 * MIB)
    reads.close()
    memory[:] = bytes(len(memory))
    time.sleep(0.2)
    assert not any(memory)
    for descriptor in descriptors:
        os.close(descriptor)


def test_short_answers_are_gone_on_with(
    made: tuple[Path, Content, MemberContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, checked = made
    real = LibcReads.begin
    asked: list[int] = []

    def begin(self: LibcReads, number: int, fd: int, offset: int, at: int, n_bytes: int) -> None:
        asked.append(n_bytes)
        real(self, number, fd, offset, at, min(n_bytes, 300_000))

    monkeypatch.setattr(LibcReads, "begin", begin)
    driver = FakeDriver()
    assert held(load_directory(root, driver, checked=checked, verify=Verify.DEVICE)) == content
    assert len(asked) > 8 * MIB / 300_000
    assert held(load_directory(root, driver)) == content


def test_files_that_refuse_to_be_read_past_the_page_cache_are_read_through_it(
    made: tuple[Path, Content, MemberContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, _ = made
    real = Files.open

    def refuse(self: Files, file: int, *, direct: bool) -> int:
        if direct:
            raise OSError(errno.EINVAL, "not here")
        return real(self, file, direct=direct)

    monkeypatch.setattr(Files, "open", refuse)
    config = replace(CONFIG, route=Route.DIRECT)
    loaded = load_directory(root, FakeDriver(), config=config)
    assert held(loaded) == content
    assert loaded.report.direct_bytes == 0


@pytest.mark.parametrize("route", [Route.BUFFERED, Route.DIRECT])
@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
@pytest.mark.parametrize("cut", [1, MIB])
def test_a_file_cut_short_is_told(
    made: tuple[Path, Content, MemberContent], cut: int, verify: Verify, route: Route
) -> None:
    root, _, checked = made
    file = root / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    driver = FakeDriver()
    config = replace(CONFIG, route=route)
    with pytest.raises(CorruptData, match=r"model-1.safetensors is cut short"):
        load_directory(root, driver, checked=checked, verify=verify, config=config)
    gc.collect()
    assert driver.leaks == []


def test_a_file_that_is_gone_is_told(
    made: tuple[Path, Content, MemberContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _, checked = made
    real = libc_fillers.LibcFillers.give

    def give(self: Any, slot: Any) -> None:
        (root / "model-2.safetensors").unlink(missing_ok=True)
        real(self, slot)

    monkeypatch.setattr(libc_fillers.LibcFillers, "give", give)
    before = len(os.listdir("/proc/self/fd"))
    driver = FakeDriver()
    with pytest.raises(NotFound, match="model-2"):
        load_directory(root, driver, checked=checked, verify=Verify.DEVICE)
    gc.collect()
    assert driver.leaks == []
    assert len(os.listdir("/proc/self/fd")) <= before


def test_the_device_takes_over_from_the_cpu_once_it_can(
    made: tuple[Path, Content, MemberContent],
) -> None:
    root, content, checked = made
    driver = FakeDriver()
    real = driver.load_hasher
    asked = 0

    def load_hasher(device: int, *, wait: bool) -> Any:
        nonlocal asked
        asked += 1
        return real(device, wait=wait) if asked > 4 else None

    driver.load_hasher = load_hasher  # type: ignore[method-assign]
    loaded = load_directory(root, driver, checked=checked, verify=Verify.AUTO)
    assert held(loaded) == content
    report = loaded.report
    assert report.verified
    assert report.cpu_checked_bytes > 0
    assert report.device_checked_bytes > 0
    assert report.cpu_checked_bytes + report.device_checked_bytes == report.read_bytes


def test_nothing_is_read_that_nobody_would_verify() -> None:
    driver = FakeDriver(hashes=False)
    checkers = Checkers(driver, Verify.CPU, 1)
    targets = [Target(0, 0)]
    filler = Filler(LoadPlan(), Files([], []), targets, checkers, lambda row: CorruptData("?"))
    read = Read(0, 0, 1, (Copy(0, 1, 0, 0),), (0,))
    with pytest.raises(Internal, match="nobody verifies"):
        filler.device_hasher(read)


def test_threads_read_where_the_c_library_does_not(
    made: tuple[Path, Content, MemberContent], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, checked = made

    def refuse(*given: object) -> None:
        raise OSError(errno.ENOSYS, "no aio_read")

    monkeypatch.setattr(libc_reads, "_libraries", refuse)
    can_read.cache_clear()
    try:
        loaded = load_directory(root, FakeDriver(), checked=checked, verify=Verify.DEVICE)
        assert held(loaded) == content
    finally:
        can_read.cache_clear()
