"""What a person sees: a summary after the digest, a progress bar, sizes in IEC units."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from snapcask.render import human_age, human_bytes, sentence, share, table
from tests.snapcask.support import command_line
from tests.snapcask.test_interrupts import STOP_BEFORE_PUBLISHING, interruptible

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(
    *arguments: str | Path,
    prelude: str = "",
    when: Callable[[str, subprocess.Popen[bytes]], None] = lambda text, process: None,
) -> tuple[int, str]:
    """Run the command on a terminal; returns its exit code and all that it wrote."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command_line(*arguments, prelude=prelude),
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        preexec_fn=interruptible,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            got = os.read(ours, 65536)
        except OSError:  # nobody has the other end open any more
            break
        if not got:
            break
        written += got
        when(written.decode(errors="replace"), process)
    os.close(ours)
    return process.wait(60), written.decode(errors="replace").replace("\r\n", "\n")


def test_a_person_sees_a_bar_the_digest_and_a_summary(store: Path, snapshot: Path) -> None:
    code, written = on_terminal("push", snapshot, "a:1")
    assert code == 0
    assert "read" in written
    text = _ESCAPES.sub("", written)
    digest, summary = re.search(r"(blake3:[0-9a-f]{64})\n(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert len(digest) == 71
    for word in ("reference", "a:1", "zeros", "reused", "new", "MiB", "time"):
        assert word in summary
    code, written = on_terminal("pull", "a:1", snapshot.parent / "out")
    assert code == 0
    assert digest in written
    assert "fetched" in written


def test_quiet_is_the_digest_alone(store: Path, snapshot: Path) -> None:
    code, written = on_terminal("push", snapshot, "a:1", "-q")
    assert code == 0
    assert re.fullmatch(r"blake3:[0-9a-f]{64}\n", written)


def test_a_person_who_interrupts_is_told_how_to_end_it_at_once(store: Path, snapshot: Path) -> None:
    sent: list[int] = []

    def interrupt(text: str, process: subprocess.Popen[bytes]) -> None:
        if "ready" in text and not sent:
            sent.append(1)
            process.send_signal(signal.SIGINT)

    code, written = on_terminal(
        "push", snapshot, "a:1", prelude=STOP_BEFORE_PUBLISHING, when=interrupt
    )
    assert code == 130
    assert "once more" in written
    assert written.endswith("snapcask: error: interrupted\n")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (150 * 1024, "150 KiB"),
        (1 << 20, "1.0 MiB"),
        (1536 << 20, "1.5 GiB"),
        (1 << 60, "1.0 EiB"),
        (5000 << 60, "5000.0 EiB"),
    ],
)
def test_sizes_are_in_iec_units(n_bytes: int, text: str) -> None:
    assert human_bytes(n_bytes) == text


def test_ages_shares_and_tables() -> None:
    assert [human_age(s) for s in (-1, 5, 120, 7200, 200_000)] == [
        "0 s", "5 s", "2 min", "2 h", "2 d",
    ]  # fmt: skip
    assert (share(1, 8), share(0, 0)) == ("12.5 %", "0.0 %")
    assert table(("A", "LONG"), [("xyz", "1")], right=" r") == ["A    LONG", "xyz     1"]
    assert table((), []) == []
    assert sentence("a\n b\x1b[1m") == r"a b\x1b[1m"
    path = "/begins" + "/middle" * 500 + "/ends"
    shown = sentence(f"{path}: the path is too long")
    assert shown.startswith("/begins/")
    assert shown.endswith("/ends: the path is too long")
    assert len(shown) < 1000
