"""A limit anywhere above this process counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer.memory_limit import is_memory_limited


@pytest.mark.parametrize(
    ("limits", "limited"),
    [
        ({}, False),
        ({"a/b": "max", "a": "max"}, False),
        ({"a/b": "1073741824"}, True),
        ({"a/b": "max", "a": "1073741824"}, True),
        ({"other": "1073741824"}, False),
    ],
)
def test_a_limit_of_this_group_or_one_above_counts(
    tmp_path: Path, limits: dict[str, str], limited: bool
) -> None:
    for group, limit in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "memory.max").write_text(f"{limit}\n")
    own = tmp_path / "own"
    own.write_text("1:cpu:/x\n0::/a/b\n")
    assert is_memory_limited(str(tmp_path), str(own)) == limited


def test_without_control_groups_there_is_none(tmp_path: Path) -> None:
    assert not is_memory_limited(str(tmp_path), str(tmp_path / "none"))
