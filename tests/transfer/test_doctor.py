"""`doctor`: what is bad is called bad, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgfmt.errors import AccessDenied
from tests.transfer.pushes import new_store, run
from transfer import doctor
from transfer.config import MIB
from transfer.doctor import Diagnosis, Health, diagnose
from transfer.store.base import ObjectFacts, Store
from transfer.store.posix import PosixStore


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LOCAL_BYTES", 16 * MIB)


def health_of(found: Diagnosis, check: str) -> Health:
    return min(f.health for f in found.findings if f.check == check)  # "bad" comes first


def diagnosed(store: Store, tmp_path: Path) -> Diagnosis:
    return run(diagnose(store, str(tmp_path)))


def below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def test_a_sound_store_is_healthy_and_nothing_stays_behind(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    before = below(tmp_path)
    found = diagnosed(store, tmp_path)
    assert found.healthy
    assert {f.health for f in found.findings} == {Health.GOOD}
    assert found.limited_by in found.rates_gb_s
    assert all(rate > 0 for rate in found.rates_gb_s.values())
    assert below(tmp_path) == before


def test_a_directory_that_is_no_store_is_left_as_it_is(tmp_path: Path) -> None:
    found = diagnosed(PosixStore(str(tmp_path / "none")), tmp_path)
    assert health_of(found, "store") is Health.BAD
    assert (found.healthy, found.limited_by) == (False, None)
    assert not (tmp_path / "none").exists()


def test_a_directory_that_pulls_cannot_write_is_named(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store")
    found = run(diagnose(store, str(tmp_path / "absent")))
    assert not found.healthy
    (bad,) = [f for f in found.findings if f.health is Health.BAD]
    assert bad.check == "local disk"
    assert str(tmp_path / "absent") in bad.detail


class Skewed(PosixStore):
    """A store whose clock is an hour behind."""

    async def facts(self, key: str) -> ObjectFacts | None:
        found = await super().facts(key)
        late = 3600 * 10**9
        return found and ObjectFacts(found.key, found.size_bytes, found.written_ns - late)


class Denied(PosixStore):
    """A store that may be read and not written."""

    async def create(self, key: str, pieces: object) -> bool:
        raise AccessDenied("no")


class Wrong(PosixStore):
    """A store that answers ranges with zeros."""

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = bytes(len(buffer))


@pytest.mark.parametrize(
    ("kind", "check"),
    [(Skewed, "clock"), (Denied, "conditional writes"), (Wrong, "range reads")],
)
def test_what_is_bad_is_called_bad(tmp_path: Path, kind: type[PosixStore], check: str) -> None:
    new_store(tmp_path / "store")
    found = diagnosed(kind(str(tmp_path / "store")), tmp_path)
    assert health_of(found, check) is Health.BAD
    assert not found.healthy
    assert [f.check for f in found.findings if f.health is Health.BAD] == [check]
