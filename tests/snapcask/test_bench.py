"""`snapcask bench` on directories of the user's own."""

from __future__ import annotations

from pathlib import Path

from benchmarks.snapshots import make_half_shared, make_snapshot
from snapcask.exitcodes import ExitCode
from tests.snapcask.conftest import Call

MIB = 1 << 20


def test_the_second_directory_adds_what_it_does_not_share(call: Call, tmp_path: Path) -> None:
    first = make_snapshot(tmp_path / "first", 32 * MIB)
    second = make_half_shared(tmp_path / "second", first)
    document = call("bench", first, second, "--json").document
    of_first, of_second = document["directories"]
    assert of_first["directory"] == str(first)
    new = {way["way"]: way["new_bytes"] / (32 * MIB) for way in of_second["ways"]}
    assert 0.5 <= new["page-CDC"] < 0.65
    assert new["fixed 64 KiB"] > 0.99
    assert document["estimated"] == []
    assert all(rate > 0 for rate in document["rates_gb_s"].values())


def test_a_table_is_shown_to_people(call: Call, tmp_path: Path) -> None:
    first = make_snapshot(tmp_path / "first", 2 * MIB)
    said = call("bench", first).out.splitlines()
    assert said[0].split() == [str(first)]
    assert any(line.startswith("new, single pages (the bound)") for line in said)
    assert said[-1].startswith("one core cuts ")


def test_an_absent_directory_is_an_error(call: Call, tmp_path: Path) -> None:
    said = call("bench", tmp_path / "absent")
    assert said.code == ExitCode.NOT_FOUND
    assert "absent" in said.err


def test_a_directory_must_be_named(call: Call) -> None:
    assert call("bench").code == ExitCode.INVALID_INPUT
