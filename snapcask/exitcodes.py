"""The command's exit codes: one for each thing that a caller may do next. Never renumbered."""

from __future__ import annotations

import signal
from enum import IntEnum

from imgfmt.errors import ErrorKind


class ExitCode(IntEnum):
    """How the command ended."""

    OK = 0
    INTERNAL = 1
    INVALID_INPUT = 2
    NOT_FOUND = 4
    UNAVAILABLE = 5
    CORRUPT = 6
    DENIED = 7
    OUT_OF_RESOURCES = 8
    CONFLICT = 9
    UNSUPPORTED = 10
    MISMATCH = 11
    INTERRUPTED = 128 + signal.SIGINT
    BROKEN_PIPE = 128 + signal.SIGPIPE
    TERMINATED = 128 + signal.SIGTERM


_OF_KIND = {
    ErrorKind.NOT_FOUND: ExitCode.NOT_FOUND,
    ErrorKind.CORRUPT: ExitCode.CORRUPT,
    ErrorKind.INVALID_IMAGE: ExitCode.CORRUPT,
    ErrorKind.UNSUPPORTED: ExitCode.UNSUPPORTED,
    ErrorKind.INVALID_INPUT: ExitCode.INVALID_INPUT,
    ErrorKind.CONFLICT: ExitCode.CONFLICT,
    ErrorKind.UNAVAILABLE: ExitCode.UNAVAILABLE,
    ErrorKind.OUT_OF_RESOURCES: ExitCode.OUT_OF_RESOURCES,
    ErrorKind.DENIED: ExitCode.DENIED,
    ErrorKind.INTERNAL: ExitCode.INTERNAL,
    ErrorKind.MISMATCH: ExitCode.MISMATCH,
}


def exit_code_of(kind: ErrorKind) -> ExitCode:
    """The exit code for an error of this kind."""
    return _OF_KIND[kind]
