"""Copies of this process that kill themselves after so many bytes, requests or changes of files.

A copy has everything loaded already, so a run costs no start of an interpreter. What it is killed
by is counted, not timed, so a seed means the same on every machine.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /")
_FILE_EVENTS = {
    "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod",
    "os.chown", "os.utime", "os.truncate", "os.setxattr", "fcntl.flock", "ctypes.dlsym",
}  # fmt: skip


class After(StrEnum):
    """What is counted: ANSWERED the requests whose answer came and was not read, HEADS those of
    which only the head was sent."""

    SENT_BYTES = "sent-bytes"
    RECEIVED_BYTES = "received-bytes"
    REQUESTS = "requests"
    HEADS = "heads"
    ANSWERED = "answered"
    FILES = "files"


def forked(work: Callable[[], object]) -> int:
    """Call `work` in a copy of this process; its exit code, or minus the signal that ended it."""
    return exit_code(start_forked(work))


def exit_code(pid: int) -> int:
    """Wait for a copy; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start_forked(work: Callable[[], object]) -> int:
    """Begin `work` in a copy of this process; its id, for `exit_code`."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def kill() -> None:
    """End this process at once, with no chance to tidy up."""
    os.kill(os.getpid(), signal.SIGKILL)


class Meter:
    """Counts what goes over the sockets of this process, and kills it where it is told to."""

    def __init__(self, after: After | None = None, limit: int = 0) -> None:
        self.counts = dict.fromkeys(After, 0)
        self._after = after
        self._limit = limit
        self._doomed: set[int] = set()
        self._bodiless: set[int] = set()

    def note(self, what: After, amount: int) -> bool:
        """Count; True if the limit is passed by this."""
        before = self.counts[what]
        self.counts[what] += amount
        return self._after is what and before <= self._limit < before + amount

    def left_bytes(self) -> int:
        """What may still be sent."""
        return self._limit - self.counts[After.SENT_BYTES]

    def sends(self, sock: socket.socket, raw: Any) -> Any:
        """What of `raw` may be sent now."""
        view = memoryview(raw).cast("B")
        if sock.fileno() in self._bodiless:
            return view[:0]
        if _REQUEST.match(view[:16]):
            if self.note(After.REQUESTS, 1):
                kill()
            if self.note(After.HEADS, 1):
                self._bodiless.add(sock.fileno())
                head_bytes = bytes(view).find(b"\r\n\r\n") + 4
                return raw if head_bytes == len(view) else view[:head_bytes]
            if self.note(After.ANSWERED, 1):
                self._doomed.add(sock.fileno())
        left = self.left_bytes()
        if self.note(After.SENT_BYTES, len(view)):
            return view[:left]
        return raw

    def received(self, sock: socket.socket, n_bytes: int) -> None:
        """So many bytes came."""
        if self.note(After.RECEIVED_BYTES, n_bytes) or (n_bytes and sock.fileno() in self._doomed):
            kill()


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """Let all that asyncio does with sockets of the network go through `meter`."""
    real_send, real_recv = socket.socket.send, socket.socket.recv
    real_recv_into = socket.socket.recv_into

    def send(self: socket.socket, raw: Any, *flags: int) -> int:
        if self.family == socket.AF_UNIX:
            return real_send(self, raw, *flags)
        allowed = meter.sends(self, raw)
        sent = real_send(self, allowed, *flags) if len(allowed) else 0
        if allowed is not raw:
            kill()
        return sent

    def recv(self: socket.socket, *args: int) -> bytes:
        raw = real_recv(self, *args)
        if self.family != socket.AF_UNIX:
            meter.received(self, len(raw))
        return raw

    def recv_into(self: socket.socket, *args: Any) -> int:
        n_bytes = real_recv_into(self, *args)
        if self.family != socket.AF_UNIX:
            meter.received(self, n_bytes)
        return n_bytes

    patched: Any = socket.socket
    patched.send, patched.recv, patched.recv_into = send, recv, recv_into
    try:
        yield
    finally:
        del patched.send, patched.recv, patched.recv_into


def killed(work: Callable[[], object], after: After, limit: int) -> int:
    """Do `work` in a copy of this process that is killed after `limit`; its exit code."""

    def doomed() -> None:
        meter = Meter(after, limit)
        if after is After.FILES:
            _watch_files(meter)
        with metered(meter):
            work()

    return forked(doomed)


def count_files(work: Callable[[], object], said: Path) -> int:
    """How many changes of files `work` makes. A copy of this process does it, and writes `said`."""

    def counted() -> None:
        meter = Meter()
        _watch_files(meter)
        work()
        said.write_text(str(meter.counts[After.FILES]))

    assert forked(counted) == 0
    return int(said.read_text())


def _watch_files(meter: Meter) -> None:
    """Count what this process does with files, from now until it ends."""

    def hook(event: str, arguments: object) -> None:
        if event in _FILE_EVENTS and meter.note(After.FILES, 1):
            kill()

    sys.addaudithook(hook)
