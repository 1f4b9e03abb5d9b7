"""Ctrl-C and SIGTERM: nothing is left behind, and the exit code tells."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.snapcask.support import command_line, contents

pytestmark = pytest.mark.slow

STOP_BEFORE_PUBLISHING = """
import asyncio, sys, transfer.push
async def finish(self):
    print("ready", file=sys.stderr, flush=True)
    await asyncio.sleep(60)
transfer.push.Packer.finish = finish
"""
STOP_IN_A_THREAD = """
import sys, time, transfer.push
def check(listing):
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
transfer.push.check_unchanged = check
"""
STOP_WHILE_WRITING = """
import asyncio, sys, transfer.execute
real = transfer.execute.Executor.read
async def read(self, *args, **kwargs):
    result = await real(self, *args, **kwargs)
    print("ready", file=sys.stderr, flush=True)
    await asyncio.sleep(60)
transfer.execute.Executor.read = read
"""

INTERRUPT_ITSELF = """
import os, signal, transfer.push
transfer.push.check_unchanged = lambda listing: os.kill(os.getpid(), signal.SIGINT)
"""


def interruptible() -> None:
    """Take the signals as a shell's foreground command does, however the tests were started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def begun(*arguments: str | Path, prelude: str) -> subprocess.Popen[str]:
    """The command, once it has printed `ready`."""
    process = subprocess.Popen(
        command_line(*arguments, prelude=prelude),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_push_that_is_stopped_leaves_no_reference_no_lease_and_no_pack(
    store: Path, snapshot: Path, number: signal.Signals, code: int
) -> None:
    process = begun("push", snapshot, "a:1", prelude=STOP_BEFORE_PUBLISHING)
    assert list((store / "leases").iterdir())
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert err == "snapcask: error: interrupted\n"
    assert not (store / "refs").exists()
    for folder in ("leases", "tmp"):
        assert not list((store / folder).iterdir())


def test_a_pull_that_is_stopped_and_not_to_be_resumed_leaves_nothing(
    store: Path, snapshot: Path, tmp_path: Path, call: object
) -> None:
    assert subprocess.run(command_line("push", snapshot, "a:1"), check=False).returncode == 0
    before = contents(tmp_path)
    process = begun("pull", "a:1", tmp_path / "out", "--no-resume", prelude=STOP_WHILE_WRITING)
    assert contents(tmp_path).keys() != before.keys()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert contents(tmp_path).keys() == before.keys()


def test_a_second_interruption_ends_the_command_at_once(store: Path, snapshot: Path) -> None:
    process = begun("push", snapshot, "a:1", prelude=STOP_IN_A_THREAD)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_an_interruption_that_the_caller_ignores_is_ignored(store: Path, snapshot: Path) -> None:
    process = subprocess.Popen(
        command_line("push", snapshot, "a:1", "-q", prelude=INTERRUPT_ITSELF),
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert process.wait(60) == 0
