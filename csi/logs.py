"""Log lines for machines: one JSON object a line on standard error, with the volume and the Pod.

Messages of calls are never logged as they are. `without_secrets` is for who looks into one: the
interface's own description says which fields hold credentials.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from google.protobuf.message import Message

from csi.config import LogLevel
from csi.proto import csi_pb2 as pb

HIDDEN = "***"
_SECRET: Any = pb.csi_secret
_ALWAYS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Time, level, logger and message, and whatever `extra` has."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in vars(record).items():
            if key not in _ALWAYS and value is not None:
                line[key] = value if isinstance(value, int | float | bool) else str(value)
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start(level: LogLevel, stream: TextIO | None = None) -> None:
    """Write log lines of this process to `stream`, by default standard error."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("csi", "imgfmt", "restore", "snapcask", "transfer"):
        logging.getLogger(name).setLevel(level.upper())


def without_secrets(message: Message) -> dict[str, Any]:
    """The fields of a message, those that hold credentials replaced."""
    shown: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.GetOptions().Extensions[_SECRET]:
            shown[field.name] = HIDDEN
        elif isinstance(value, Message):
            shown[field.name] = without_secrets(value)
        elif hasattr(value, "items"):
            shown[field.name] = dict(value.items())
        elif not isinstance(value, str | bytes | int | float | bool):
            items = list(value)
            shown[field.name] = [
                without_secrets(item) if isinstance(item, Message) else item for item in items
            ]
        else:
            shown[field.name] = value
    return shown
