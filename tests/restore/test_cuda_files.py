"""cuFile: every answer is looked at, and whatever it lacks is an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import pytest

from imgfmt.errors import Unsupported
from restore import cuda_files
from restore.cuda_files import CuFile


class Failure(Exception):
    """As `cuFileError`."""


class BoolParameter(IntEnum):
    """As `BoolConfigParameter` of 12.9 to 13.5."""

    PROPERTIES_ALLOW_COMPAT_MODE = 1
    FORCE_COMPAT_MODE = 2


class HandleType(IntEnum):
    OPAQUE_FD = 1


class Union:
    fd = 0


class Described:
    """As `cufile.Descr`: `ptr` stands for the address."""

    def __init__(self) -> None:
        self.type = 0
        self.handle = Union()
        self.fs_ops = 1

    @property
    def ptr(self) -> Described:
        return self


class FakeCufile:
    """What of `cuda.bindings.cufile` is used. `fails` is the call that raises."""

    cuFileError = Failure
    BoolConfigParameter: Any = BoolParameter
    FileHandleType = HandleType
    Descr = Described

    def __init__(self, fails: str = "", answer: object = 4096) -> None:
        self.fails = fails
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def _called(self, name: str, *given: Any) -> None:
        self.calls.append((name, *given))
        if name == self.fails:
            raise RuntimeError("no libcufile") if name == "set" else Failure("5027")

    def set_parameter_bool(self, parameter: int, value: bool) -> None:
        self._called("set", parameter, value)

    def driver_open(self) -> None:
        self._called("open")

    def handle_register(self, described: Described) -> int:
        assert (described.type, described.fs_ops) == (HandleType.OPAQUE_FD, 0)
        self._called("register", described.handle.fd)
        return 1000 + described.handle.fd

    def handle_deregister(self, handle: int) -> None:
        self._called("deregister", handle)

    def read(self, handle: int, pointer: int, size: int, offset: int, at: int) -> object:
        self._called("read", handle, pointer, size, offset, at)
        return self.answer


def made(monkeypatch: pytest.MonkeyPatch, fake: FakeCufile | None) -> CuFile:
    monkeypatch.setattr(cuda_files, "cufile", fake)
    return CuFile()


def test_the_driver_is_opened_without_the_mode_that_copies_through_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCufile()
    files = made(monkeypatch, fake)
    assert files.open(7) == 1007
    assert files.read(1007, 1 << 40, 4096, 8192) == 4096
    files.close(1007)
    assert fake.calls == [
        ("set", 1, False), ("open",), ("register", 7), ("read", 1007, 1 << 40, 4096, 8192, 0),
        ("deregister", 1007),
    ]  # fmt: skip


@pytest.mark.parametrize("answer", [-5, 0, 100])
def test_counts_are_handed_on_as_they_are(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    assert made(monkeypatch, FakeCufile(answer=answer)).read(1, 2, 4096, 0) == answer


def test_a_release_that_tells_no_count_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="does not tell"):
        made(monkeypatch, FakeCufile(answer=None)).read(1, 2, 4096, 0)


@pytest.mark.parametrize("fails", ["set", "open"])
def test_a_library_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    with pytest.raises(Unsupported, match="does not start"):
        made(monkeypatch, FakeCufile(fails))


def test_a_release_with_other_names_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCufile()
    fake.BoolConfigParameter = HandleType
    with pytest.raises(Unsupported, match="PROPERTIES_ALLOW_COMPAT_MODE"):
        made(monkeypatch, fake)


@pytest.mark.parametrize("fails", ["register", "read", "deregister"])
def test_what_cufile_refuses_is_our_error(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    files = made(monkeypatch, FakeCufile(fails))
    calls: dict[str, Callable[[], object]] = {
        "register": lambda: files.open(7),
        "read": lambda: files.read(1, 2, 3, 4),
        "deregister": lambda: files.close(1),
    }
    with pytest.raises(Unsupported, match="5027"):
        calls[fails]()


def test_a_number_that_the_bindings_do_not_know_is_our_error_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCufile()

    def read(*given: int) -> int:
        raise ValueError("22 is not a valid OpError")

    monkeypatch.setattr(fake, "read", read)
    with pytest.raises(Unsupported, match="22"):
        made(monkeypatch, fake).read(1, 2, 3, 4)


def test_without_cuda_python_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match=r"snapcask\[gpu\]"):
        made(monkeypatch, None)
