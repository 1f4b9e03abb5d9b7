"""Odd surroundings and arguments: closed streams, a directory that is gone, text that is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.snapcask.conftest import Call
from tests.snapcask.support import command_line

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

DROPPED_INTERRUPTION = """
import os, signal, weakref
from snapcask import running
real = running.LoopThread.run
class Thing:
    pass
def run(self, work):
    thing = Thing()
    kept = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del thing  # Python drops what the signal's handler raises in here
    return real(self, work)
running.LoopThread.run = run
import transfer.push, asyncio
async def finish(self):
    await asyncio.sleep(60)
transfer.push.Packer.finish = finish
"""


def test_an_interruption_that_python_drops_still_ends_the_command(
    store: Path, snapshot: Path
) -> None:
    done = subprocess.run(
        command_line("push", snapshot, "a:1", prelude=DROPPED_INTERRUPTION),
        capture_output=True, text=True, timeout=50, check=False, cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith("snapcask: error: interrupted\n")
    assert not (store / "refs").exists()
    assert not list(store.glob("leases/*"))


@pytest.mark.parametrize(
    ("closed", "code"), [(">&-", 141), ("2>&-", 0), (">&- 2>&-", 141), ("<&- >&- 2>&-", 141)]
)
def test_closed_streams_change_nothing_else(
    store: Path, snapshot: Path, closed: str, code: int
) -> None:
    command = f'"{sys.executable}" -m snapcask push "{snapshot}" a:1 {closed}'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert (store / "refs" / "a" / "1").is_dir()


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()

    command = f'cd "{gone}" && rmdir "{gone}" && "{sys.executable}" -m snapcask ls --store x'
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr == (
        "snapcask: error: the working directory does not exist any more; change to another one\n"
    )


def test_annotations_are_shown_on_one_line_without_escapes(
    call: Call, store: Path, snapshot: Path
) -> None:
    assert call("push", snapshot, "a:1", "--annotation", "k=x\n\x1b[31mred").code == 0
    shown = call("inspect", "a:1").out
    assert "\x1b" not in shown
    assert r"x\n\x1b[31mred" in shown
    failed = call("push", snapshot, "a:2", "--annotation", "key=\udcff")
    assert failed.code == 2
    assert "'key' is not UTF-8" in failed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["init", "t", "--pack-bytes", "1K"], ["1024", "from 4096", "4294967295"]),
        (["push", ".", "a:", "--store", "s"], ["'a:' is no reference", "NAME:TAG"]),
        (["push", ".", ":b", "--store", "s"], ["':b' is no reference"]),
        (["push", "x:1", "--member", "a", "--store", "s"], ["'a' is not of the form NAME=SOURCE"]),
        (["push", ".", "x:1", "--store", "s", "--max-memory", "1M"], ["--max-memory", "6MiB"]),
    ],
)
def test_a_message_names_what_was_given_and_what_would_do(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str],
    words: list[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert call("init", "s").code == 0
    failed = call(*arguments)
    assert failed.code == 2
    assert failed.err.count("\n") == 1
    for word in words:
        assert word in failed.err
