"""GPUDirect is used only where a trial proved it, and given up for a file at its first failure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from imgfmt.errors import Unsupported
from restore.direct_storage import TRIAL_BYTES, DirectStorage, peer_reads, why_not_here

POINTER = 1 << 40


class FakeFiles:
    """Device memory as a bytearray, the module's counters as a file."""

    def __init__(self, statistics: Path) -> None:
        self.statistics = statistics
        self.memory = bytearray(4 << 20)
        self.handles: dict[int, int] = {}
        self.between_peers = True
        self.refuse_open = False
        self.answers: list[int] = []
        self.n_reads = 0
        self.write_counters()

    def write_counters(self) -> None:
        counted = f"Reads\t\t\t\t: err=0 n={self.n_reads} ok={self.n_reads} readMiB=1\n"
        self.statistics.write_text("GDS Version: 1.7\nIO stats: Enabled\n" + counted)

    def open(self, descriptor: int) -> int:
        if self.refuse_open:
            raise Unsupported("cuFile does not take the file: 5027")
        self.handles[descriptor + 1000] = descriptor
        return descriptor + 1000

    def close(self, handle: int) -> None:
        del self.handles[handle]

    def read(self, handle: int, pointer: int, n_bytes: int, offset: int) -> int:
        asked = self.answers.pop(0) if self.answers else n_bytes
        if asked <= 0:
            return asked
        at = pointer - POINTER
        with open(f"/proc/self/fd/{self.handles[handle]}", "rb") as file:
            raw = os.pread(file.fileno(), min(asked, n_bytes), offset)
        self.memory[at : at + len(raw)] = raw
        if self.between_peers:
            self.n_reads += 1
            self.write_counters()
        return len(raw)

    def read_back(self, pointer: int, n_bytes: int) -> bytes:
        return bytes(self.memory[pointer - POINTER : pointer - POINTER + n_bytes])


@pytest.fixture
def machine(tmp_path: Path) -> tuple[FakeFiles, DirectStorage, str]:
    """A machine that can do it, and a file."""
    (tmp_path / "node").touch()
    fake = FakeFiles(tmp_path / "stats")
    storage = DirectStorage(lambda: fake, tmp_path / "node", tmp_path / "stats")
    (tmp_path / "file").write_bytes(os.urandom(2 << 20))
    return fake, storage, str(tmp_path / "file")


Machine = tuple[FakeFiles, DirectStorage, str]


def test_a_file_is_read_after_its_trial(machine: Machine) -> None:
    fake, storage, path = machine
    assert not storage.read(path, POINTER, 4096, 0)
    assert storage.prove(path, POINTER, fake.read_back) is None
    assert storage.read(path, POINTER, 8192, 4096)
    assert fake.read_back(POINTER, 8192) == Path(path).read_bytes()[4096:12288]
    assert storage.n_bytes == 8192
    storage.close()
    assert not fake.handles


def test_short_answers_are_completed(machine: Machine) -> None:
    fake, storage, path = machine
    assert storage.prove(path, POINTER, fake.read_back) is None
    fake.answers = [4096, 4096]
    assert storage.read(path, POINTER, 16384, 0)
    assert fake.read_back(POINTER, 16384) == Path(path).read_bytes()[:16384]


@pytest.mark.parametrize("answer", [-5, -1, 0])
def test_a_negative_count_or_an_early_end_gives_the_file_up(machine: Machine, answer: int) -> None:
    fake, storage, path = machine
    assert storage.prove(path, POINTER, fake.read_back) is None
    fake.answers = [4096, answer]
    assert not storage.read(path, POINTER, 16384, 0)
    assert str(answer) in storage.reasons[path]
    assert not storage.read(path, POINTER, 4096, 0)
    storage.close()
    assert not fake.handles


def test_without_the_module_cufile_is_not_even_opened(tmp_path: Path) -> None:
    def never() -> FakeFiles:
        raise AssertionError("cuFile was opened")

    storage = DirectStorage(never, tmp_path / "none", tmp_path / "stats")
    why = storage.prove("/bin/sh", POINTER, lambda pointer, n_bytes: b"")
    assert why is not None
    assert "nvidia-fs is not loaded" in why
    (tmp_path / "node").touch()
    assert "does not tell" in str(why_not_here(tmp_path / "node", tmp_path / "stats"))


def test_a_trial_through_host_memory_proves_nothing(machine: Machine) -> None:
    fake, storage, path = machine
    fake.between_peers = False
    assert "not a read between peers" in str(storage.prove(path, POINTER, fake.read_back))
    assert not fake.handles
    assert not storage.read(path, POINTER, 4096, 0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ({"refuse_open": True}, "5027"),
        ({"answers": [-22]}, "returned -22"),
        ({"answers": [4096]}, "returned 4096"),
    ],
)
def test_a_trial_that_fails_leaves_nothing_open(
    machine: Machine, damage: dict[str, object], reason: str
) -> None:
    fake, storage, path = machine
    for name, value in damage.items():
        setattr(fake, name, value)
    before = len(os.listdir("/proc/self/fd"))
    assert reason in str(storage.prove(path, POINTER, fake.read_back))
    assert reason in str(storage.prove(path, POINTER, fake.read_back))
    assert not fake.handles
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_trial_that_brings_other_bytes_is_no_proof(machine: Machine) -> None:
    _, storage, path = machine
    wrong = bytes(TRIAL_BYTES)
    assert "other bytes" in str(storage.prove(path, POINTER, lambda pointer, n_bytes: wrong))


def test_files_without_a_page_and_files_that_are_gone_are_not_tried(
    machine: Machine, tmp_path: Path
) -> None:
    fake, storage, _ = machine
    (tmp_path / "tiny").write_bytes(b"x")
    assert "less than a page" in str(storage.prove(str(tmp_path / "tiny"), POINTER, fake.read_back))
    assert storage.prove(str(tmp_path / "gone"), POINTER, fake.read_back) is not None
    assert peer_reads(tmp_path / "none") is None


def test_a_cufile_that_does_not_start_is_the_reason_for_each_file(tmp_path: Path) -> None:
    n_tried = 0

    def broken() -> FakeFiles:
        nonlocal n_tried
        n_tried += 1
        raise Unsupported("cuFile does not start: 5001")

    FakeFiles(tmp_path / "stats")
    (tmp_path / "node").touch()
    storage = DirectStorage(broken, tmp_path / "node", tmp_path / "stats")
    for name in ("/bin/sh", "/bin/sh", "/bin/ls"):
        assert "5001" in str(storage.prove(name, POINTER, lambda pointer, n_bytes: b""))
        assert not storage.read(name, POINTER, 4096, 0)
    assert n_tried == 1
    storage.close()


def test_a_read_that_cufile_refuses_later_gives_the_file_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, storage, path = machine
    assert storage.prove(path, POINTER, fake.read_back) is None

    def refuse(handle: int, pointer: int, n_bytes: int, offset: int) -> int:
        raise Unsupported("cuFile does not read: 5011")

    monkeypatch.setattr(fake, "read", refuse)
    assert not storage.read(path, POINTER, 4096, 0)
    assert "5011" in storage.reasons[path]
    assert storage.prove(path, POINTER, fake.read_back) == storage.reasons[path]


def test_a_filesystem_that_can_not_be_read_past_the_page_cache_is_told(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, storage, _ = machine
    why = str(storage.prove("/proc/version", POINTER, fake.read_back))
    assert why.startswith("it can't be read past the page cache: ")
    assert "/proc" not in why
