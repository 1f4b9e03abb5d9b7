"""`docs/cli.md` tells the truth: every verb, option, JSON key and exit code is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from snapcask.commands import VERBS, verbs
from snapcask.exitcodes import ExitCode
from tests.snapcask.conftest import Call

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
WORDS = set(re.findall(r"`([^`]+)`", PAGE))


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands with their names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, f"{path}{name} ")
        else:
            yield path + name, found


@pytest.mark.parametrize(("name", "found"), [*commands(verbs)])
def test_every_verb_and_option_is_documented(name: str, found: click.Command) -> None:
    assert any(word.split(" ")[: name.count(" ") + 1] == name.split(" ") for word in WORDS)
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert any(parameter.opts[-1] in word.split() for word in WORDS), parameter.opts


def test_the_text_of_each_verb_is_that_of_the_list() -> None:
    assert {name.split(" ")[0] for name, _ in commands(verbs)} == set(VERBS)


def test_every_exit_code_is_documented() -> None:
    documented = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    assert [int(code) for code in documented] == sorted(int(code) for code in ExitCode)


def test_every_key_of_every_document_is_documented(
    call: Call, store: Path, snapshot: Path, tmp_path: Path
) -> None:
    lines: list[tuple[Any, ...]] = [
        ("init", tmp_path / "other"),
        ("push", snapshot, "a:1"),
        ("pull", "a:1", tmp_path / "out", "--dry-run"),
        ("pull", "a:1", tmp_path / "out"),
        ("inspect", "a:1"),
        ("check", "a:1"),
        ("inspect", snapshot),
        ("tag", "a:1", "b:1"),
        ("ls",),
        ("diff", "a:1", "b:1"),
        ("verify", "--all"),
        ("variants", "v:1", "a:1"),
        ("index", "rebuild"),
        ("store",),
        ("bench", snapshot),
        ("rm", "a:1"),
        ("gc", "--dry-run"),
    ]
    names = {word for phrase in WORDS for word in phrase.split()}
    for line in lines:
        document = call(*line, "--json").document
        for key in keys_of(document):
            assert key in names, (line, key)


def keys_of(value: Any) -> Iterator[str]:
    """The names of fields; not those of maps whose keys are data."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in {"seconds", "entry_counts", "features", "holds", "provenance", "facts"}:
                yield from keys_of(item)
