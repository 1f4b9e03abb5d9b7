"""Records and tables (SPEC.md section 4): canonical bytes out, strict reading in.

Knows nothing of what the objects mean; `tree`, `pack` and the others name their columns.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt

from imgfmt.digest import Octets
from imgfmt.errors import ImageError, InvalidImage, InvalidInput, Unsupported

VERSION = 1
MAX_RECORD_BYTES = 196_608
MAX_DEPTH = 8
TABLE_MAGIC = b"SNAPTBL1"
_TABLE_START = struct.Struct("<8sII")
_ALIGN = 8

Value = Any
"""nil, bool, int, str, bytes, list or dict of these: what a record may hold."""

Array = npt.NDArray[Any]


def encode_record(kind: str, fields: Mapping[str, Value], *, read: Sequence[str] = ()) -> bytes:
    """The canonical bytes of one record. Raises InvalidInput for values a record can't hold."""
    whole = {**fields, "kind": kind, "version": VERSION, "read": sorted(read)}
    try:
        raw = _pack(_sorted(whole, 0))
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidInput(f"{kind} can't be stored: {_first_line(error)}") from None
    if len(raw) > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"{kind} needs {len(raw)} bytes, a record has at most {MAX_RECORD_BYTES}"
        )
    return raw


def decode_record(raw: Octets, kinds: str | Sequence[str], what: str) -> Fields:
    """Read one record of one of `kinds`; `what` names the object in errors.

    Raises InvalidImage for bytes that are not canonical, Unsupported for another version or an
    unknown feature.
    """
    wanted = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if len(raw) > MAX_RECORD_BYTES:
        raise InvalidImage(f"{what} has {len(raw)} bytes, a record has at most {MAX_RECORD_BYTES}")
    try:
        value = msgpack.unpackb(raw, raw=False, strict_map_key=True)
        canonical = isinstance(value, dict) and _ordered(value, 0) and _pack(value) == raw
    except (ValueError, TypeError, RecursionError, ImageError, msgpack.UnpackException) as error:
        raise InvalidImage(f"{what} is not a record: {_first_line(error)}") from None
    if not canonical:
        raise InvalidImage(f"{what} is not in canonical form")
    fields = Fields(value, what)
    kind, version = fields.text("kind"), fields.integer("version")
    if kind not in wanted:
        raise InvalidImage(
            f"{what} is a record of kind {kind[:40]!r}, expected {' or '.join(wanted)}"
        )
    if version != VERSION:
        raise Unsupported(
            f"{what} has format version {version}, this snapcask reads {VERSION}; use a newer one"
            if version > VERSION
            else f"{what} has format version {version}, this snapcask reads {VERSION}"
        )
    if unknown := fields.text_array("read"):
        raise Unsupported(f"{what} needs the feature {unknown[0][:40]!r}; use a newer snapcask")
    fields.kind = kind
    return fields


@dataclass(slots=True)
class Fields:
    """Typed access to a decoded record; every getter raises InvalidImage naming the object."""

    values: dict[str, Value]
    what: str
    kind: str = ""
    _seen: set[str] = field(default_factory=set)

    def fail(self, message: str) -> NoReturn:
        """Raise InvalidImage about this object."""
        raise InvalidImage(f"{self.what}: {message}")

    def _get(self, key: str) -> Value:
        if key not in self.values:
            self.fail(f"{key!r} is missing")
        self._seen.add(key)
        return self.values[key]

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        if not isinstance(value, str):
            self.fail(f"{key!r} is not a string")
        return value

    def raw(self, key: str, length_bytes: int) -> bytes:
        """A binary string of exactly `length_bytes`."""
        value = self._get(key)
        if not isinstance(value, bytes) or len(value) != length_bytes:
            self.fail(f"{key!r} is not a binary string of {length_bytes} bytes")
        return value

    def optional_raw(self, key: str, length_bytes: int) -> bytes | None:
        """As `raw`, or nil."""
        return None if self._get(key) is None else self.raw(key, length_bytes)

    def integer(self, key: str, low: int = 0, high: int = 2**63 - 1) -> int:
        """An integer in [low, high]."""
        value = self._get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.fail(f"{key!r} is not an integer from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        """A boolean."""
        value = self._get(key)
        if not isinstance(value, bool):
            self.fail(f"{key!r} is not a boolean")
        return value

    def array(self, key: str, limit: int = 65_536) -> list[Value]:
        """An array of at most `limit` elements of any kind."""
        value = self._get(key)
        if not isinstance(value, list) or len(value) > limit:
            self.fail(f"{key!r} is not an array of at most {limit} elements")
        return value

    def text_array(self, key: str, limit: int = 256) -> tuple[str, ...]:
        """An array of strings."""
        value = self.array(key, limit)
        if not all(isinstance(item, str) for item in value):
            self.fail(f"{key!r} is not an array of strings")
        return tuple(value)

    def text_map(self, key: str, limit: int = 256) -> dict[str, str]:
        """A map of string to string."""
        value = self._get(key)
        if not isinstance(value, dict) or len(value) > limit:
            self.fail(f"{key!r} is not a map of at most {limit} entries")
        if not all(isinstance(item, str) for item in value.values()):
            self.fail(f"{key!r} holds something that is not a string")
        return value

    def children(self, key: str, limit: int) -> list[Fields]:
        """An array of maps, each with typed access of its own."""
        found = self.array(key, limit)
        if not all(isinstance(item, dict) for item in found):
            self.fail(f"{key!r} is not an array of maps")
        return [Fields(item, f"{self.what}: {key}[{i}]") for i, item in enumerate(found)]

    def done(self) -> None:
        """Raise InvalidImage if the record has keys that nobody asked for."""
        if unknown := sorted(set(self.values) - self._seen - {"kind", "version", "read"}):
            self.fail(f"unknown key {unknown[0]!r}")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: integers of 1, 2, 4 or 8 bytes, or digests (shape (n, item_bytes))."""

    name: str
    item_bytes: int
    signed: bool = False

    @property
    def is_digest(self) -> bool:
        """True for byte strings of fixed length, which are mapped as rows of bytes."""
        return self.item_bytes > 8

    @property
    def dtype(self) -> np.dtype[Any]:
        """Little-endian numpy type of one item, or of one byte of it for digests."""
        return np.dtype(
            "u1" if self.is_digest else f"<{'i' if self.signed else 'u'}{self.item_bytes}"
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """The kind of a table and its columns in their normative order."""

    kind: str
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A decoded table: `columns` are views into the bytes that were decoded, not copies."""

    head: Fields
    columns: dict[str, Array]


def encode_table(
    layout: Layout, fields: Mapping[str, Value], columns: Mapping[str, Array | Sequence[Array]]
) -> list[Octets]:
    """The canonical bytes of one table as pieces to be written one after the other.

    A column is an array or a list of arrays that follow each other; those that already have the
    right type are not copied.
    """
    parts = {column.name: _as_parts(column, columns[column.name]) for column in layout.columns}
    listed = [[c.name, c.item_bytes, sum(map(len, parts[c.name]))] for c in layout.columns]
    head = encode_record(layout.kind, {**fields, "columns": listed})
    start = _TABLE_START.pack(TABLE_MAGIC, len(head), 0) + head
    pieces: list[Octets] = [start + bytes(-len(start) % _ALIGN)]
    for arrays in parts.values():
        pieces += [array.reshape(-1).view(np.uint8).data for array in arrays if array.nbytes]
        if filling := -sum(array.nbytes for array in arrays) % _ALIGN:
            pieces.append(bytes(filling))
    return pieces


def decode_table(raw: Octets, layout: Layout, what: str) -> Table:
    """Read one table strictly. The columns are read-only views of `raw`."""
    view = memoryview(raw).toreadonly().cast("B")
    head_end = _head_end(view, what)
    head = decode_record(bytes(view[_TABLE_START.size : head_end]), layout.kind, what)
    listed = head.array("columns", limit=256)
    stated = [item[:2] if isinstance(item, list) else None for item in listed]
    if repr(stated) != repr([[c.name, c.item_bytes] for c in layout.columns]):  # True is no 1
        head.fail(f"its columns are not those of a {layout.kind}")
    position = _filled(view, head_end, what)
    columns: dict[str, Array] = {}
    for column, item in zip(layout.columns, listed, strict=True):
        count = item[2] if len(item) == 3 else None
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < 2**40:
            head.fail(f"column {column.name!r} has no valid count")
        end = position + count * column.item_bytes
        if end > len(view):
            head.fail(f"column {column.name!r} reaches beyond the end; the object is cut short")
        columns[column.name] = _mapped(column, view[position:end], count)
        position = _filled(view, end, what)
    if position != len(view):
        head.fail(f"{len(view) - position} bytes follow the last column")
    return Table(head, columns)


def peek_head(raw: Octets, layout: Layout, what: str) -> Fields:
    """The head of a table that begins with `raw`, for a glance: no column of it is looked at."""
    view = memoryview(raw).toreadonly().cast("B")
    return decode_record(bytes(view[_TABLE_START.size : _head_end(view, what)]), layout.kind, what)


def table_bytes(beginning: Octets, what: str) -> int:
    """The length in bytes that the head of a table claims for the whole of it."""
    view = memoryview(beginning).toreadonly().cast("B")
    end = _head_end(view, what)
    try:
        head = msgpack.unpackb(view[_TABLE_START.size : end], raw=False, strict_map_key=True)
        counts = [(int(item_bytes), int(count)) for _, item_bytes, count in head["columns"]]
    except (
        ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException,
    ) as error:  # fmt: skip
        raise InvalidImage(f"{what} is not a table: {_first_line(error)}") from None
    end += -end % _ALIGN
    for item_bytes, count in counts:
        end += item_bytes * count
        end += -end % _ALIGN
    return end


def _head_end(view: memoryview, what: str) -> int:
    if len(view) < _TABLE_START.size:
        raise InvalidImage(f"{what} has {len(view)} bytes, too few for a table")
    magic, head_bytes, zero = _TABLE_START.unpack_from(view)
    if magic != TABLE_MAGIC or zero:
        raise InvalidImage(f"{what} does not begin like a table")
    if head_bytes > MAX_RECORD_BYTES or _TABLE_START.size + head_bytes > len(view):
        raise InvalidImage(f"{what} is cut short: its head claims {head_bytes} bytes")
    return _TABLE_START.size + int(head_bytes)


def _filled(view: memoryview, end: int, what: str) -> int:
    """The next aligned position after `end`; raises if the filling is short or not zero."""
    filled = end + -end % _ALIGN
    if filled > len(view) or any(view[end:filled]):
        raise InvalidImage(f"{what} has a filling that is cut short or not zero at byte {end}")
    return filled


def _mapped(column: Column, view: memoryview, count: int) -> Array:
    array: Array = np.frombuffer(view, dtype=column.dtype)
    return array.reshape(count, column.item_bytes) if column.is_digest else array


def _as_parts(column: Column, value: Array | Sequence[Array]) -> list[Array]:
    arrays = [value] if isinstance(value, np.ndarray) else value
    return [_as_column(column, array) for array in arrays]


def _as_column(column: Column, array: Array) -> Array:
    shape = (len(array), column.item_bytes) if column.is_digest else (len(array),)
    result = np.ascontiguousarray(array, dtype=column.dtype)
    if result.shape != shape:
        raise InvalidInput(f"column {column.name!r} has shape {result.shape}, expected {shape}")
    return result


def _pack(value: Value) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


def _sorted(value: Value, depth: int) -> Value:
    """The same value with map keys in order; raises InvalidInput for what a record can't hold."""
    if depth > MAX_DEPTH:
        raise InvalidInput(f"a record nests at most {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, list | tuple):
        return [_sorted(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidInput("a record's keys are strings")
        keys = sorted(value, key=lambda key: key.encode())
        return {key: _sorted(value[key], depth + 1) for key in keys}
    raise InvalidInput(f"a record can't hold a {type(value).__name__}")


def _ordered(value: Value, depth: int) -> bool:
    """Whether all map keys of a decoded value are strings in order; copies nothing."""
    if depth > MAX_DEPTH or isinstance(value, float | msgpack.ExtType | msgpack.Timestamp):
        return False
    if isinstance(value, list):
        return all(_ordered(item, depth + 1) for item in value)
    if isinstance(value, dict):
        keys = [key.encode() for key in value if isinstance(key, str)]
        in_order = len(keys) == len(value) and keys == sorted(keys)
        return in_order and all(_ordered(item, depth + 1) for item in value.values())
    return True


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
