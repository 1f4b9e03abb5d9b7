"""The `snapcask` command: what it prints when things go wrong, and its exit code.

Imports as little as possible: what a verb needs is loaded when it runs.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapcask import __version__

if TYPE_CHECKING:
    import click

NAME = "snapcask"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, or those of the process; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:  # without loading anything
        print(f"{NAME} {__version__}")
        return 0
    _open_closed_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would spin; none is used
    from snapcask import interrupts, logs

    interrupts.install()
    logs.want("WARNING" if _is_debugging() else "ERROR")  # others warn of what they then raise
    try:
        return _run(given)
    except interrupts.Interrupted as interruption:
        return _failed("interrupted", 128 + interruption.signal_number)
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE


def _open_closed_streams() -> None:
    """Where the caller closed a stream (`>&-`): a reader that is gone, or for messages nowhere."""
    if sys.stdout is None:
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = os.fdopen(writer, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _run(arguments: list[str]) -> int:
    import click

    from imgfmt.errors import ErrorKind, ImageError
    from snapcask.commands import verbs
    from snapcask.exitcodes import exit_code_of

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            with verbs.make_context(NAME, arguments or ["--help"]) as context:
                code = verbs.invoke(context)
        except click.exceptions.Exit as end:
            code = end.exit_code
        sys.stdout.flush()
        return code or 0
    except click.ClickException as error:
        return _failed(_usage(error), exit_code_of(ErrorKind.INVALID_INPUT))
    except ImageError as error:
        _trace()
        return _failed(str(error), exit_code_of(error.kind))
    except BrokenPipeError:
        raise
    except OSError as error:
        from transfer.oserrors import printable, translate

        _trace()
        if error.filename is None and not _has_working_directory():
            message = "the working directory does not exist any more; change to another one"
            return _failed(message, exit_code_of(ErrorKind.NOT_FOUND))
        if error.filename is None:
            _discard_output()
        translated = translate(error, printable(error.filename or "standard output"))
        return _failed(str(translated), exit_code_of(translated.kind))
    except Exception as error:
        _trace()
        advice = "SNAPCASK_DEBUG=1 shows where, please report it"
        message = f"internal error: {type(error).__name__}: {error}; {advice}"
        return _failed(message, exit_code_of(ErrorKind.INTERNAL))


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def _usage(error: click.ClickException) -> str:
    """What was wrong with the arguments, and where to look."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else NAME
    return f"{error.format_message().rstrip('.')}; `{path} --help` tells more"


def _discard_output() -> None:
    """Let what is still to be printed go nowhere: the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trace() -> None:
    """Show where an error comes from to those who asked for it."""
    if _is_debugging():
        import traceback

        traceback.print_exc()


def _is_debugging() -> bool:
    return os.environ.get("SNAPCASK_DEBUG", "0") not in ("", "0")


def _failed(message: str, code: int) -> int:
    """Print one line whatever the message holds."""
    from snapcask.render import sentence

    print(f"{NAME}: error: {sentence(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
