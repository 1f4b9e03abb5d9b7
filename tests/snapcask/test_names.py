"""Names of any bytes: they come back, and are printed on one line and as valid JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import snapcask
from snapcask.render import path_fields, print_json
from tests.snapcask.conftest import Call
from tests.snapcask.support import command, contents

ODD_NAMES = [
    b"caf\xe9",
    b"caf\xc3\xa9",
    b"\xff\xfe",
    b"two\nlines",
    b"tab\tand \x1b[31mred",
    b" space ",
    b"-q",
    b"#hash@at:colon",
    b"back\\xe9slash",
    "\u202eevil".encode(),
    b"x" * 255,
]


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A directory, itself of an odd name, with files and a link of odd names."""
    root = os.fsencode(tmp_path) + b"/d\xe9r"
    os.mkdir(root)
    for name in ODD_NAMES:
        with open(root + b"/" + name, "wb") as file:
            file.write(name)
    os.symlink(b"to\xe9\n", root + b"/link")
    return Path(os.fsdecode(root))


def raw_path(fields: dict[str, Any]) -> bytes:
    """The bytes of a path in a JSON document."""
    return bytes.fromhex(fields["path_hex"]) if "path_hex" in fields else fields["path"].encode()


def strict(text: str) -> Any:
    """A JSON document that holds nothing but text that UTF-8 can hold."""
    document = json.loads(text)
    json.dumps(document, ensure_ascii=False).encode()
    return document


def test_odd_names_come_back(call: Call, store: Path, odd: Path, tmp_path: Path) -> None:
    assert call("push", odd, "a:1").code == 0
    assert call("pull", "a:1", tmp_path / "out").code == 0
    assert contents(tmp_path / "out") == contents(odd)


def test_odd_names_are_valid_and_unambiguous_json(call: Call, store: Path, odd: Path) -> None:
    call("push", odd, "a:1")
    documents = [
        strict(call("inspect", odd, "--json").out)["entries"],
        strict(call("inspect", "a:1", "--json").out)["members"][0]["entries"],
    ]
    for entries in documents:
        assert {raw_path(entry) for entry in entries} == {*ODD_NAMES, b"link"}
        (linked,) = [entry for entry in entries if entry["type"] == "symlink"]
        assert bytes.fromhex(linked["target_hex"]) == b"to\xe9\n"
    os.unlink(os.fsencode(odd) + b"/caf\xe9")
    call("push", odd, "a:2")
    changes = strict(call("diff", "a:1", "a:2", "--json").out)["changes"]
    assert [raw_path(one) for one in changes if one["change"] == "removed"] == [b"caf\xe9"]
    assert strict(call("pull", "a:1", odd / "new", "--json").out)["directory"].endswith("new")


def test_odd_names_are_text_of_one_line_each(call: Call, store: Path, odd: Path) -> None:
    call("push", odd, "a:1")
    for arguments in (["inspect", odd, "--entries"], ["inspect", "a:1", "--entries"]):
        shown = call(*arguments).out
        assert "two\\nlines" in shown
        assert "caf\\xe9" in shown
        assert all(line.isprintable() for line in shown.splitlines())


def test_an_error_about_an_odd_name_is_one_line(call: Call, store: Path, odd: Path) -> None:
    failed = call("push", os.path.join(odd, "no\nsuch"), "a:1")
    assert failed.code == 4
    assert failed.err.count("\n") == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_works_in_any_encoding(store: Path, odd: Path, encoding: str) -> None:
    shown = command(
        "inspect", odd, "--entries", env={"PYTHONIOENCODING": encoding}, encoding=encoding
    )
    assert (shown.code, shown.err) == (0, "")
    assert "café" in shown.out or "caf\\xe9" in shown.out


def test_the_api_takes_and_gives_odd_names(call: Call, store: Path, odd: Path) -> None:
    call("push", odd, "a:1")
    with snapcask.open_image("a:1", store=store) as image:
        assert sorted(map(os.fsencode, image.paths())) == sorted([*ODD_NAMES, b"link"])
        for name in ODD_NAMES:
            assert image.read(os.fsdecode(name)) == image.read(name) == name
        assert image.stat("link").link_target == os.fsdecode(b"to\xe9\n")


def test_text_that_is_not_utf_8_is_escaped_anywhere_in_a_document(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_json({"a\udce9": ["b\udce9", {"c": "é"}], "n": 1})
    assert strict(capsys.readouterr().out) == {"a\\xe9": ["b\\xe9", {"c": "é"}], "n": 1}
    assert path_fields(b"a\xe9") == {"path": "a\\xe9", "path_hex": "61e9"}
    assert path_fields("é".encode()) == {"path": "é"}
