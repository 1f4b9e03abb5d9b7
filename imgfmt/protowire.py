"""Protobuf messages, as far as CRIU's image files need them: a strict reader and a small writer.

No schema and no dependency. Errors are InvalidImage; the caller adds the object's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from imgfmt.errors import InvalidImage, InvalidInput

_VALUE_END = 1 << 64
MAX_TEXT_BYTES = 256
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1 << 18
"""Of one message: a view of a field takes up to 100 times the field's own size in memory."""


@dataclass(frozen=True, slots=True)
class Message:
    """A protobuf message: the values of each field by its number, numbers or views of bytes."""

    values: Mapping[int, Sequence[int | memoryview]]

    @classmethod
    def parse(cls, raw: memoryview) -> Message:
        values: defaultdict[int, list[int | memoryview]] = defaultdict(list)
        at = n_fields = 0
        while at < len(raw):
            key, at = _take_varint(raw, at)
            value, at = _take_value(raw, at, key & 7)
            values[key >> 3].append(value)
            n_fields += 1
            if n_fields > _MAX_FIELDS or key >> 3 == 0:
                raise InvalidImage(f"protobuf field {key >> 3} is the {n_fields}th of its message")
        return cls(values)

    def integer(self, number: int, default: int | None = None) -> int:
        """The last value of a number field. Without a default the field is required."""
        value = self.values.get(number, [default])[-1]
        if not isinstance(value, int):
            raise InvalidImage(f"protobuf field {number} is missing or not a number")
        return value

    def integers(self, number: int) -> tuple[int, ...]:
        """All values of a repeated number field, in either of its two encodings."""
        found: list[int] = []
        for value in self.values.get(number, []):
            if isinstance(value, int):
                found.append(value)
                continue
            at = 0
            while at < len(value):
                one, at = _take_varint(value, at)
                found.append(one)
        return tuple(found)

    def octets(self, number: int) -> memoryview:
        """The first value of a field of bytes; empty if there is none."""
        value = self.values.get(number, [memoryview(b"")])[0]
        if isinstance(value, int):
            raise InvalidImage(f"protobuf field {number} is a number, not bytes")
        return value

    def text(self, number: int) -> str:
        """The value of a text field, empty if there is none."""
        return _text(self.octets(number), number)

    def texts(self, number: int) -> tuple[str, ...]:
        """All values of a repeated text field."""
        return tuple(_text(value, number) for value in self.values.get(number, []))


def _text(raw: int | memoryview, number: int) -> str:
    try:
        text = "\0" if isinstance(raw, int) else bytes(raw[: MAX_TEXT_BYTES + 1]).decode()
    except UnicodeDecodeError:
        text = "\0"
    if isinstance(raw, int) or len(raw) > MAX_TEXT_BYTES or not text.isprintable():
        raise InvalidImage(f"protobuf field {number} is no text of {MAX_TEXT_BYTES} bytes")
    return text


def _take_value(raw: memoryview, at: int, wire: int) -> tuple[int | memoryview, int]:
    """The value of wire type `wire` that begins at byte `at`, and where it ends."""
    if wire == _VARINT:
        return _take_varint(raw, at)
    if wire == _BYTES:
        size_bytes, at = _take_varint(raw, at)
    elif wire in _FIXED_BYTES:
        size_bytes = _FIXED_BYTES[wire]
    else:
        raise InvalidImage(f"a protobuf field has the wire type {wire}")
    if size_bytes > len(raw) - at:
        raise InvalidImage(f"a protobuf field of {size_bytes} bytes is longer than its message")
    return raw[at : at + size_bytes], at + size_bytes


def _take_varint(raw: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at byte `at`, and where it ends."""
    value = 0
    for index in range(min(_MAX_VARINT_BYTES, len(raw) - at)):
        octet = raw[at + index]
        value |= (octet & 0x7F) << 7 * index
        if octet < 0x80 and value < _VALUE_END:
            return value, at + index + 1
    raise InvalidImage("a protobuf number is cut short or has more than 64 bits")


def put_number(number: int, value: int) -> bytes:
    """A number field."""
    return varint(number << 3 | _VARINT) + varint(value)


def put_bytes(number: int, raw: bytes) -> bytes:
    """A field of bytes or text."""
    return varint(number << 3 | _BYTES) + varint(len(raw)) + raw


def varint(value: int) -> bytes:
    """The encoding of a number of at most 64 bits. Raises InvalidInput for others."""
    if not 0 <= value < _VALUE_END:
        raise InvalidInput(f"{value} does not fit into 64 bits")
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
