"""What `init` found is recorded beside the store record, and nothing depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgfmt import layout
from tests.transfer.pushes import RECORD, run
from transfer.catalog import Catalog, init_store
from transfer.store.posix import PosixStore


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    store = PosixStore(str(tmp_path / "store"))
    run(init_store(store, RECORD))
    return Catalog(store, RECORD)


def test_a_file_store_records_exclusive_creation(catalog: Catalog) -> None:
    record = run(catalog.probe_record())
    assert record is not None
    assert record.found == {"exclusive-creation": "honoured"}


@pytest.mark.parametrize("raw", [None, b"junk", b"x" * 300_000])
def test_a_store_without_a_record_that_can_be_read_is_a_store(
    catalog: Catalog, raw: bytes | None
) -> None:
    path = Path(catalog.store.url) / layout.PROBE_KEY
    path.unlink() if raw is None else path.write_bytes(raw)
    assert run(catalog.probe_record()) is None
