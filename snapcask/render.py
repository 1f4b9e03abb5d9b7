"""What the command prints: text for people, one JSON document for programs.

Names of any bytes are printed on one line and as valid JSON. Nothing here knows of stores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transfer.oserrors import printable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
_MAX_WORD = 800
"""Characters of a word in a message: its beginning and its end tell enough."""


def human_bytes(n_bytes: int) -> str:
    """`1.5 GiB`: three digits or four, in IEC units."""
    value = float(n_bytes)
    for unit in _UNITS[:-1]:
        if abs(value) < 1024:
            return f"{n_bytes} B" if unit == "B" else f"{value:.{0 if value >= 100 else 1}f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def human_age(seconds: float) -> str:
    """`3 d`: the largest unit that fits once."""
    for unit_s, name in _AGES:
        if seconds >= unit_s:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def share(part: int, whole: int) -> str:
    """`12.5 %`; nothing of nothing is 0 %."""
    return f"{100 * part / whole if whole else 0:.1f} %"


def on_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def path_fields(path: bytes, key: str = "path") -> dict[str, str]:
    """A path for JSON: bytes that are not UTF-8 as `\\xNN`, and then all of it in hexadecimal."""
    try:
        return {key: path.decode()}
    except UnicodeDecodeError:
        return {key: path.decode(errors="backslashreplace"), f"{key}_hex": path.hex()}


def print_json(document: Mapping[str, Any]) -> None:
    """Print one document."""
    print(json.dumps(_clean(document), indent=2))


def _clean(value: Any) -> Any:
    """The same value with only such text as UTF-8 can hold."""
    if isinstance(value, str):
        return value.encode(errors="surrogateescape").decode(errors="backslashreplace")
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text."""
    for line in lines:
        print(line)


def sentence(message: str) -> str:
    """A message on one line, and nothing in it that a terminal would obey or no one would read."""
    words = " ".join(map(_shortened, message.split()))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)


def _shortened(word: str) -> str:
    if len(word) <= _MAX_WORD:
        return word
    return f"{word[: _MAX_WORD // 2]}...{word[-_MAX_WORD // 2 :]}"


def warn(messages: Iterable[str]) -> None:
    """Print warnings to standard error, a line each."""
    for message in messages:
        print(f"snapcask: warning: {sentence(message)}", file=sys.stderr)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Aligned columns. `right` has an `r` at the place of each column that is aligned right."""
    lines = [header, *rows] if header else list(rows)
    if not lines:
        return []
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    sides = right.ljust(len(widths))
    return [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=False)
        ).rstrip()
        for row in lines
    ]


def facts(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Names and values below each other, the values aligned."""
    return table((), [(f"{name}:", value) for name, value in pairs])


def one_line(path: str | bytes) -> str:
    """A path for people, on one line whatever bytes it has; the empty one is `.`."""
    return printable(path) if path else "."


def seconds_text(seconds: Mapping[str, float]) -> str:
    """`1.2 s (read 1.0, publish 0.2)`."""
    phases = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if name != "total")
    return f"{seconds['total']:.1f} s ({phases})"


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds for JSON, to the microsecond."""
    return {name: round(value, 6) for name, value in seconds.items()}
