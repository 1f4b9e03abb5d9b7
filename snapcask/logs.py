"""What the command shows of what modules log: warnings of ours, one line each.

Nothing here is loaded before it is needed, and the library never sets up logging for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

_OURS = ("imgfmt", "transfer", "restore", "csi", "snapcask")
_level: str | None = None


def want(level: str) -> None:
    """This process is the command: `begin` shall show what others log from `level` on."""
    global _level
    _level = level


def begin() -> None:
    """Print to standard error from now on, if the command wants it and nothing is set up yet."""
    if _level is None:
        return
    import logging

    root = logging.getLogger()
    if root.handlers:
        return
    others = logging.getLevelName(_level)

    def matters(record: logging.LogRecord) -> bool:
        return record.levelno >= others or record.name.partition(".")[0] in _OURS

    class OneLine(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            from snapcask.render import sentence

            if record.exc_info:
                return super().format(record)
            return f"snapcask: {record.levelname.lower()}: {sentence(record.getMessage())}"

    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    handler.addFilter(matters)
    root.addHandler(handler)
