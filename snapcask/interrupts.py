"""Ctrl-C and SIGTERM: the first is raised where the command waits, the second ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_raised: int | None = None
"""The signal whose `Interrupted` nobody has seen yet: Python drops what is raised in a callback."""


class Interrupted(BaseException):
    """The user, or the system, wants the command to stop. Not to be caught but for clean-up."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


def install() -> None:
    """Handle the signals from now on, but for those that the caller made us ignore (`nohup`)."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _first)


def remove() -> None:
    """Leave the signals to a verb that handles them itself."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _first:
            signal.signal(number, signal.SIG_DFL)


def check() -> None:
    """Raise `Interrupted` again if it was raised where Python drops it, as during an import."""
    number = seen()
    if number is not None:
        raise Interrupted(number)


def seen() -> int | None:
    """Note that the signal is known from now on; returns its number if it was not before."""
    global _raised
    number, _raised = _raised, None
    return number


def _first(number: int, frame: FrameType | None) -> None:
    global _raised
    _raised = number
    for each in _SIGNALS:
        if signal.getsignal(each) is _first:
            signal.signal(each, _again)
    if os.isatty(2):
        os.write(2, b"\nsnapcask: stopping; once more ends it at once\n")
    raise Interrupted(number)


def _again(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
