"""Index segments: built from pack tables, merged, searched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import index
from imgfmt.errors import InvalidImage
from imgfmt.index import IndexSegment
from imgfmt.pack import MAX_CHUNKS, PackTable
from imgfmt.wire import encode_table
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, joined, peak_bytes

# Few different beginnings, so that names meet under one key.
CHUNK_NAMES = st.builds(
    lambda head, tail: bytes([head]) * 8 + bytes([tail]) * 24,
    st.sampled_from([0, 1, 128, 255]),
    st.integers(0, 3),
)
PACKS = st.dictionaries(
    st.binary(min_size=16, max_size=16), st.lists(CHUNK_NAMES, max_size=6), max_size=4
)
Contents = dict[bytes, list[bytes]]
Entries = set[tuple[int, bytes, int]]


def make_pack(name: bytes, names: list[bytes]) -> PackTable:
    none = np.zeros(0, "u4")
    rows = np.frombuffer(b"".join(names), "u1").reshape(-1, 32)
    return PackTable(name, 4096, rows, np.full(len(rows), 7, "u4"), none, none.astype("u1"), none)


def make_segment(contents: Contents) -> IndexSegment:
    return index.build([make_pack(name, names) for name, names in contents.items()])


def entries_of(contents: Contents) -> list[tuple[int, bytes, int]]:
    """Key, pack and row of all chunks, in the order of a segment."""
    return sorted(
        (int.from_bytes(name[:8], "big"), pack, row)
        for pack, names in contents.items()
        for row, name in enumerate(names)
    )


def listed(segment: IndexSegment) -> list[tuple[int, bytes, int]]:
    columns = zip(segment.key, segment.entry_pack, segment.entry_row, strict=True)
    return [(int(key), segment.packs[pack].tobytes(), int(row)) for key, pack, row in columns]


def encode_columns(columns: dict[str, Any], **head: Any) -> bytes:
    return joined(encode_table(index.LAYOUT, head, columns))


def good_columns() -> dict[str, Any]:
    return {
        "pack": np.array([[1] * 16, [2] * 16], "u1"),
        "key": np.array([5, 5, 9], "u8"),
        "entry_pack": np.array([0, 1, 1], "u4"),
        "entry_row": np.array([3, 0, 65535], "u2"),
    }


@given(PACKS)
def test_a_segment_lists_every_chunk_by_key_pack_and_row(contents: Contents) -> None:
    segment = make_segment(contents)
    assert listed(segment) == entries_of(contents)
    assert len(segment) == sum(map(len, contents.values()))


@given(PACKS)
def test_a_segment_does_not_depend_on_the_order_of_packs(contents: Contents) -> None:
    backwards = dict(reversed(contents.items()))
    assert joined(index.encode(make_segment(backwards))) == joined(
        index.encode(make_segment(contents))
    )


@given(PACKS)
def test_what_is_decoded_encodes_to_the_same_bytes(contents: Contents) -> None:
    raw = joined(index.encode(make_segment(contents)))
    assert joined(index.encode(index.decode(raw, "segment 00"))) == raw


@given(PACKS, PACKS)
def test_a_merged_segment_is_that_of_all_packs_at_once(one: Contents, other: Contents) -> None:
    whole = make_segment(one | other)
    overlapping = [make_segment({k: v for k, v in one.items() if k not in other}), whole, whole]
    merged = index.merge([*overlapping, make_segment(other)])
    assert joined(index.encode(merged)) == joined(index.encode(whole))


def test_nothing_merges_to_an_empty_segment() -> None:
    for empty in (index.merge([]), index.build([]), index.merge([index.build([])] * 2)):
        assert len(empty) == len(empty.packs) == 0
        assert len(index.find(empty, np.zeros((3, 32), "u1"))[0]) == 0


@given(PACKS, st.lists(CHUNK_NAMES, max_size=8))
def test_find_gives_every_entry_with_the_key_of_a_name(
    contents: Contents, wanted: list[bytes]
) -> None:
    segment = make_segment(contents)
    names = np.frombuffer(b"".join(wanted), "u1").reshape(-1, 32)
    query, pack, row = index.find(segment, names)
    found = [
        (int(q), segment.packs[p].tobytes(), int(r))
        for q, p, r in zip(query, pack, row, strict=True)
    ]
    assert found == [
        (q, pack, row)
        for q, name in enumerate(wanted)
        for key, pack, row in entries_of(contents)
        if key == int.from_bytes(name[:8], "big")
    ]


def test_a_key_is_a_big_endian_number_stored_little_endian() -> None:
    raw = joined(index.encode(make_segment({bytes(16): [bytes(range(32))]})))
    assert bytes(range(7, -1, -1)) in raw


def test_a_segment_full_of_one_key_can_not_flood_a_search() -> None:
    n_entries = 5000
    segment = make_segment({bytes(16): [bytes(32)] * n_entries})
    query, _, row = index.find(segment, np.zeros((100, 32), "u1"))
    assert len(query) == 100 * index.CANDIDATES_PER_NAME
    assert row.tolist() == list(range(index.CANDIDATES_PER_NAME)) * 100


def test_the_last_row_of_the_fullest_pack_can_be_found() -> None:
    names = np.arange(4 * MAX_CHUNKS, dtype=">u8").view("u1").reshape(-1, 32)
    none = np.zeros(0, "u4")
    packs = [
        PackTable(bytes([i]) * 16, 4096, names, np.full(MAX_CHUNKS, 7, "u4"), none, none, none)
        for i in (2, 1)
    ]
    query, pack, row = index.find(index.build(packs), names[-1:])
    assert query.tolist() == [0, 0]
    assert pack.tolist() == [0, 1]
    assert row.tolist() == [65535, 65535]


def test_damage_is_refused_or_is_canonical() -> None:
    raw = encode_columns(good_columns())
    assert check_damage(raw, lambda copy: index.decode(copy, "segment 00"), index.encode) > 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": [5, 5]}, "differ in length"),
        ({"entry_pack": [0]}, "differ in length"),
        ({"entry_row": [0]}, "differ in length"),
        ({"key": [5, 9, 8]}, "the keys do not ascend"),
        ({"entry_pack": [0, 2, 1]}, "pack that is not listed"),
    ],
)
def test_a_segment_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    columns = good_columns()
    columns |= {key: np.array(value, columns[key].dtype) for key, value in change.items()}
    with pytest.raises(InvalidImage, match=f"^segment 00: .*{message}"):
        index.decode(encode_columns(columns), "segment 00")


def test_a_head_with_unknown_keys_is_refused() -> None:
    with pytest.raises(InvalidImage, match="unknown key 'more'"):
        index.decode(encode_columns(good_columns(), more=1), "segment 00")


def test_a_large_segment_costs_at_most_four_times_its_size() -> None:
    n_entries = 1_000_000
    columns = good_columns() | {
        "key": np.zeros(n_entries, "u8"),
        "entry_pack": np.zeros(n_entries, "u4"),
        "entry_row": np.zeros(n_entries, "u2"),
    }
    raw = encode_columns(columns)

    def use() -> None:
        index.find(index.decode(raw, "segment 00"), np.zeros((10, 32), "u1"))

    assert peak_bytes(use) < 4 * len(raw) + ALLOWED_EXTRA_BYTES
