"""The runbook tells the truth: messages are the driver's, values and links are there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
import yaml

from csi.errors import NOT_FINAL
from snapcask.commands import verbs
from tests.deploy.chart import CHART, ROOT

_RUNBOOK = (ROOT / "docs" / "kubernetes.md").read_text()
_PAGES = ("docs/kubernetes.md", "docs/compare-kubernetes.md", "deploy/examples/README.md")
_ROW = re.compile(r"^\| ([A-Z_]{5,}) \| (.+?) \| .* \|$", re.MULTILINE)
_GAP = "\0"


def _texts() -> set[str]:
    """All strings of the driver and what it is built on, with a gap for what is put in."""
    found = set()
    for package in ("csi", "transfer", "imgfmt"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "csi_pb2.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
                if isinstance(node, ast.JoinedStr):
                    parts = [p.value if isinstance(p, ast.Constant) else _GAP for p in node.values]
                    found.add("".join(map(str, parts)))
    return found


TEXTS = _texts()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def _is_said(message: str) -> bool:
    """Whether some text of the driver is the message, with anything in the gaps of either."""
    letters = sum(map(str.isalpha, message))
    for text in TEXTS:
        parts = text.split(_GAP)
        if not all(part in message for part in parts):
            continue
        if 5 * sum(map(str.isalpha, text)) < 2 * letters:
            continue  # all gaps
        if re.fullmatch(".*".join(map(re.escape, parts)), message, re.DOTALL):
            return True
    return False


def _quoted() -> list[str]:
    rows = [words for _, words in _ROW.findall(_RUNBOOK) if words.startswith("`")]
    return [words.strip("`") for words in rows]


def test_the_runbook_quotes_enough_to_be_of_use() -> None:
    assert len(_quoted()) > 15


@pytest.mark.parametrize("message", _quoted())
def test_a_quoted_message_is_one_that_the_driver_gives(message: str) -> None:
    assert _is_said(message)


def test_a_message_that_nobody_gives_would_be_noticed() -> None:
    assert not _is_said("namespace … may on no account mount image …")


@pytest.mark.parametrize(
    "message",
    [
        "another driver uses …; end it first",
        "kubeletDir … is not there; mount the host's at this path",
        "cache … lies on overlayfs, which vanishes with its container; name a local disk",
    ],
)
def test_what_ends_the_driver_is_quoted_as_it_is(message: str) -> None:
    assert f"`{message}`" in _RUNBOOK
    assert _is_said(message)


def test_codes_that_are_not_final_are_named() -> None:
    (line,) = [found for found in _RUNBOOK.splitlines() if "are not final" in found]
    said = {word for word in re.findall(r"[A-Z_]{5,}", line)}
    assert said == {code.name for code in NOT_FINAL} - {"CANCELLED", "DEADLINE_EXCEEDED"}


def _has_value(path: str) -> bool:
    found = VALUES
    for word in path.split("."):
        if not isinstance(found, dict) or word not in found:
            return False
        found = found[word]
    return True


def _commands(text: str) -> Iterator[list[str]]:
    """Words after `snapcask` in each command of a page, be it one of the driver's container."""
    lines = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in lines for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`([^`\n]+)`", text)]:
        for part in re.split(r"[;|]|&&| -- ", line):
            words = part.partition(" # ")[0].split()
            if words[:1] == ["snapcask"] and len(words) > 1:
                yield shlex.split(" ".join(words[1:]))


def _unknown(words: Sequence[str]) -> list[str]:
    """What of a command the program does not know: the verb, or options."""
    group: click.Command = verbs
    left = list(words)
    while isinstance(group, click.Group) and left and not left[0].startswith("-"):
        found = group.get_command(click.Context(group), left[0])
        if found is None:
            return [left[0]]
        group = found
        del left[0]
    known = {name for option in group.params for name in option.opts}
    return [word for word in left if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", ["docs/csi.md", "docs/kubernetes.md"])
def test_commands_that_the_pages_name_are_there_with_these_options(page: str) -> None:
    found = list(_commands((ROOT / page).read_text()))
    assert len(found) > 3
    for words in found:
        assert _unknown(words) == [], words


def test_a_command_that_is_not_there_would_be_noticed() -> None:
    assert _unknown(["cache", "list"]) == ["list"]
    assert _unknown(["cache", "rm", "REF", "--cache", "PATH", "--force"]) == ["--force"]


def test_values_that_the_pages_name_are_there() -> None:
    named = set()
    for page in _PAGES:
        for path in re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z]+)+)[=`]", (ROOT / page).read_text()):
            if path.split(".")[0] in VALUES:
                named.add(path)
    assert len(named) > 15
    assert [path for path in sorted(named) if not _has_value(path)] == []


@pytest.mark.parametrize("page", _PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (ROOT / page).parent.joinpath(target).resolve().exists(), target


def test_metrics_that_the_runbook_names_are_those_of_the_driver() -> None:
    known = Path(ROOT / "csi" / "metrics.py").read_text()
    for name in set(re.findall(r"snapcask_[a-z_]+", _RUNBOOK)):
        assert f'"{name.removesuffix("_total")}"' in known, name


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_row_is_in_a_table_that_has_a_head(page: str) -> None:
    for block in (ROOT / "docs" / page).read_text().split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert not rows or re.fullmatch(r"(\|:?-+:?)+\|", rows[1]), rows[0]
