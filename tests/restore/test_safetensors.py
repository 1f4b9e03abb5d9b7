"""Headers of safetensors files: what is right is read, all else is refused with a reason."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.errors import InvalidInput
from restore.dtypes import DTYPES
from restore.safetensors import HEADER_LIMIT_BYTES, MAX_RANK, header_length, parse_header


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def parse(header: object, data_bytes: int) -> Any:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(raw, 8 + len(raw) + data_bytes, "m.safetensors")


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F16", [2, 3], 4, 16),
        "none": entry("F32", [0, 7], 4, 4),
        "a": entry("F32", [], 0, 4),
    }
    found = parse(header, 16)
    start = 8 + len(json.dumps(header))
    assert [spec.name for spec in found] == ["a", "none", "b"]
    assert [(s.start - start, s.end - start) for s in found] == [(0, 4), (4, 4), (4, 16)]
    assert found[2].shape == (2, 3)
    assert found[2].dtype.name == "F16"


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_its_size(name: str) -> None:
    n_bytes = 8 * DTYPES[name].bits // 8
    (found,) = parse({"t": entry(name, [8], 0, n_bytes)}, n_bytes)
    assert found.n_bytes == n_bytes
    with pytest.raises(InvalidInput, match="are not"):
        parse({"t": entry(name, [9], 0, n_bytes)}, n_bytes)


@pytest.mark.parametrize(
    ("header", "data_bytes", "reason"),
    [
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 2, 6)}, 6, "overlaps"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, 4, "overlaps"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, 12, "hole"),
        ({"a": entry("F32", [1], 4, 8)}, 8, "hole"),
        ({"a": entry("F32", [1], 0, 4)}, 3, "the file at"),
        ({"a": entry("F32", [1], 0, 4)}, 5, "the file at"),
        ({"a": entry("F33", [1], 0, 4)}, 4, "unknown dtype"),
        ({"a": entry("f32", [1], 0, 4)}, 4, "unknown dtype"),
        ({"a": {**entry("F32", [1], 0, 4), "dtype": ["F32"]}}, 4, "unknown dtype"),
        ({"a": entry("F32", [-1], 0, 4)}, 4, "shape"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "shape"),
        ({"a": entry("F32", [1] * (MAX_RANK + 1), 0, 4)}, 4, "shape"),
        ({"a": entry("F32", [2**63, 2**63], 0, 4)}, 4, "shape"),
        ({"a": entry("F32", [2**62, 4], 0, 4)}, 4, "are not"),
        ({"a": entry("F4", [3], 0, 2)}, 2, "are not"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "data_offsets"),
        ({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0, 4.0]}}, 4, "data_offsets"),
        ({"a": {**entry("F32", [1], 0, 4), "data_offsets": [0]}}, 4, "data_offsets"),
        ({"a": {**entry("F32", [1], 0, 4), "more": 1}}, 4, "exactly"),
        ({"a": [1]}, 0, "exactly"),
        ({"x" * 5000: entry("F32", [1], 0, 4)}, 4, "name"),
        ({"__metadata__": {"format": 1}}, 0, "metadata"),
        ({"__metadata__": "pt"}, 0, "metadata"),
        (b'{"a":1,"a":2}', 0, "twice"),
        (b' {"a":1}', 0, "begin"),
        (b"[]", 0, "begin"),
        (b'{"a":', 0, "not JSON"),
        (b'{"a":' + b"[" * 100_000, 0, "not JSON"),
        (b"{\xff}", 0, "not JSON"),
    ],
)
def test_a_broken_header_is_refused(header: object, data_bytes: int, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        parse(header, data_bytes)
    assert "m.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("length", "file_bytes", "reason"),
    [
        (HEADER_LIMIT_BYTES + 1, 2**40, "larger than"),
        (2**63, 2**40, "larger than"),
        (100, 107, "within the file"),
        (0, 8, "empty"),
    ],
)
def test_a_header_of_no_sensible_length_is_refused(
    length: int, file_bytes: int, reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        header_length(struct.pack("<Q", length), file_bytes, "m")


def test_a_file_without_room_for_a_length_is_refused() -> None:
    with pytest.raises(InvalidInput, match="shorter"):
        header_length(b"\x01\0\0", 3, "m")


@given(st.binary(max_size=200), st.integers(0, 300))
def test_whatever_the_bytes_the_outcome_is_tensors_or_our_error(raw: bytes, size: int) -> None:
    try:
        found = parse_header(raw, size, "m")
    except InvalidInput:
        return
    assert sum(spec.n_bytes for spec in found) == size - 8 - len(raw)


def test_a_file_of_nothing_but_metadata_has_no_tensors() -> None:
    assert parse({"__metadata__": {}}, 0) == []
    assert header_length(struct.pack("<Q", 2), 10, "m") == 2
