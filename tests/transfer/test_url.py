"""Which store a user means."""

from __future__ import annotations

from pathlib import Path

import pytest

from imgfmt.errors import InvalidInput
from transfer.store.posix import PosixStore
from transfer.store.url import open_store


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/data/store", "/data/store"),
        ("/data/a b%20c", "/data/a b%20c"),
        ("file:///data/store", "/data/store"),
        ("file://localhost/data/store", "/data/store"),
        ("FILE:///data/a%20b", "/data/a b"),
        ("file:///data/%ff", "/data/\udcff"),
        ("file:///data/a?b#c", "/data/a?b#c"),
        ("/data/x://y", "/data/x:/y"),
    ],
)
def test_a_path_or_file_url_names_a_directory(url: str, root: str) -> None:
    store = open_store(url)
    assert isinstance(store, PosixStore)
    assert store.root == root
    store.close()


def test_a_relative_path_is_one_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("here")
    assert isinstance(store, PosixStore)
    assert store.root == str(tmp_path / "here")
    store.close()


@pytest.mark.parametrize(
    "url", ["", "file://", "file://host/data", "https://x/y", "a\0b", "file:///%00"]
)
def test_anything_else_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        open_store(url)
