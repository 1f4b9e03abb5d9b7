"""Small state files: what writers that were killed leave of them, and its removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transfer.cache.durable import remove_half_written, replace_file


def left_by_a_killed_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a file and die before it has its name."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_file(str(path), [b"x"], fsync=False)


@pytest.mark.parametrize("name", ["state", "x" * 120])
def test_what_a_killed_writer_left_is_removed_of_one_file_or_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "whole").write_bytes(b"y")
    left_by_a_killed_writer(tmp_path / name, monkeypatch)
    left_by_a_killed_writer(tmp_path / "other", monkeypatch)
    assert len(list(tmp_path.iterdir())) == 3
    remove_half_written(str(tmp_path), name)
    assert sorted(path.name[-5:] for path in tmp_path.iterdir()) == ["other", "whole"]
    remove_half_written(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    remove_half_written(str(tmp_path / "absent"))
