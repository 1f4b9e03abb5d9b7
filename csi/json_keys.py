"""One JSON object, read strictly: each key is taken once, with its kind, and none may be left.

What is wrong is an InvalidInput of one line that names the key with those above it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

from imgfmt.errors import InvalidInput

T = TypeVar("T")


def load(raw: bytes | str) -> Any:
    """Read a JSON text in which no key is twice. Raises InvalidInput."""
    try:
        return json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(f"it is not JSON: {error}") from None


class Keys:
    """One object of the file; each key is taken once, and none may be left."""

    def __init__(self, found: object, where: str) -> None:
        if not isinstance(found, dict):
            raise InvalidInput(f"{where or 'the document'} is not a JSON object")
        self._left: dict[str, Any] = dict(found)
        self._where = where

    def path(self, key: str) -> str:
        """The key with those above it."""
        return f"{self._where}.{key}" if self._where else key

    def _take(self, key: str, kind: type[T] | tuple[type, ...], default: T, shown: str) -> T:
        if key not in self._left:
            return default
        value = self._left.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidInput(f"{self.path(key)}: {str(value)[:80]!r} is not {shown}")
        return value  # type: ignore[return-value]

    def text(self, key: str, default: str) -> str:
        """A string that is not empty, unless that is the default."""
        value = self._take(key, str, default, "a string")
        if not value and value != default:
            raise InvalidInput(f"{self.path(key)} is empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None for null, an empty one, and for what is not there."""
        if self._left.get(key, "") is None:
            del self._left[key]
        return self.text(key, "") or None

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        return self._take(key, bool, default, "true or false")

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = float(self._take(key, (int, float), default, "a number"))
        if not low <= value <= high:
            raise InvalidInput(f"{self.path(key)}: {value:g} is not from {low:g} to {high:g}")
        return value

    def integer(self, key: str, default: int | None, low: int) -> int | None:
        """An integer of at least `low`; null is None where that is the default."""
        if default is None and self._left.get(key, 0) is None:
            del self._left[key]
        value = self._take(key, int, default, "an integer")
        if value is not None and not low <= value < 2**63:
            raise InvalidInput(f"{self.path(key)}: {value} is less than {low}, or too large")
        return value

    def choice(self, key: str, kind: type[T], default: T) -> T:
        """One of an enumeration."""
        return choice(self._take(key, str, str(default), "a string"), kind, self.path(key))

    def paths(self, key: str) -> tuple[str, ...]:
        """An array of absolute paths, none of them twice."""
        found: list[Any] = self._take(key, list, [], "an array of strings")
        where = self.path(key)
        for path in found:
            if not isinstance(path, str):
                raise InvalidInput(f"{where}: {str(path)[:80]!r} is not a string")
            absolute(path, where)
        if len(set(found)) < len(found):
            raise InvalidInput(f"{where} names a directory twice")
        return tuple(found)

    def below(self, key: str) -> Keys:
        """The object under a key, an empty one if there is none."""
        return Keys(self._left.pop(key, {}), self.path(key))

    def mapping(self, key: str, read: Callable[[Any, str], T]) -> dict[str, T]:
        """An object whose keys are names."""
        found = self.below(key)
        return {name: read(value, found.path(name)) for name, value in found._left.items()}

    def done(self) -> None:
        """Raise InvalidInput if a key is left."""
        for key in self._left:
            raise InvalidInput(f"{self.path(key[:80])} is not a key that is known here")


def absolute(path: str, where: str) -> str:
    """A path from the root, without detours. Raises InvalidInput."""
    parts = path.split("/")[1:]
    if not path.startswith("/") or not path.isprintable() or {"", ".", ".."} & set(parts):
        raise InvalidInput(f"{where}: {path[:80]!r} is not an absolute path in its shortest form")
    return path


def choice(value: Any, kind: type[T], where: str) -> T:
    """One of an enumeration. Raises InvalidInput, which lists them."""
    allowed = [str(item) for item in kind]  # type: ignore[attr-defined]
    if value not in allowed:
        raise InvalidInput(f"{where}: {str(value)[:80]!r} is not one of {', '.join(allowed)}")
    return kind(value)  # type: ignore[call-arg]


def match(pattern: re.Pattern[str], value: str, where: str, shown: str) -> str:
    """A string of a pattern, which `shown` puts into words. Raises InvalidInput."""
    if not pattern.fullmatch(value):
        raise InvalidInput(f"{where}: {value[:80]!r} is not {shown}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows")
