"""Records and tables: one form for each value, and nothing else is read."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import wire
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.wire import Column, Fields, Layout
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, joined, peak_bytes

SMALL = Layout(
    "small",
    (Column("one", 1), Column("two", 2), Column("eight", 8, signed=True), Column("digest", 32)),
)

TEXTS = st.text(max_size=6)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | TEXTS
    | st.binary(max_size=40)
    | st.sampled_from([31, 32, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, -32, -33, -129]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
RESERVED = ("kind", "version", "read")
FIELDS = st.dictionaries(TEXTS.filter(lambda key: key not in RESERVED), VALUES, max_size=5)


def head_of(**changed: Any) -> bytes:
    """A record of kind `thing` as msgpack writes it, keys in order."""
    whole = {"kind": "thing", "version": 1, "read": []} | changed
    return packed({key: whole[key] for key in sorted(whole, key=lambda key: str(key).encode())})


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


def map_of(*pairs: bytes) -> bytes:
    """A map with these encoded keys and values, one after the other."""
    return bytes([0x80 | len(pairs) // 2]) + b"".join(pairs)


def columns_of(**changed: Any) -> dict[str, Any]:
    columns = {
        "one": np.array([1, 2, 3], "u1"),
        "two": np.array([4, 5], "u2"),
        "eight": np.array([-1, 2**62], "i8"),
        "digest": np.arange(64, dtype="u1").reshape(2, 32),
    }
    return columns | changed


def table(**changed: Any) -> bytes:
    return joined(wire.encode_table(SMALL, {"note": "x"}, columns_of(**changed)))


def table_with_head(head: bytes, rest: bytes = b"") -> bytes:
    start = struct.pack("<8sII", b"SNAPTBL1", len(head), 0) + head
    return start + bytes(-len(start) % 8) + rest


def small_head(columns: Any) -> bytes:
    return wire.encode_record("small", {"columns": columns, "note": "x"})


GOOD_COLUMNS = [["one", 1, 3], ["two", 2, 2], ["eight", 8, 2], ["digest", 32, 2]]
GOOD_BODY = table()[len(table_with_head(small_head(GOOD_COLUMNS))) :]


@given(FIELDS)
def test_a_record_is_read_back_and_has_one_form(fields: dict[str, Any]) -> None:
    raw = wire.encode_record("thing", fields)
    found = wire.decode_record(raw, "thing", "thing 1")
    assert found.values == fields | {"kind": "thing", "version": 1, "read": []}
    backwards = dict(reversed(fields.items()))
    assert wire.encode_record("thing", backwards) == raw


@given(FIELDS)
def test_the_keys_of_all_maps_ascend_by_their_bytes(fields: dict[str, Any]) -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            keys = [key.encode() for key in value]
            assert keys == sorted(keys)
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                check(inner)

    check(msgpack.unpackb(wire.encode_record("thing", fields)))


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_or_canonical(raw: bytes) -> None:
    refusal = ""
    try:
        found = wire.decode_record(raw, "thing", "thing 1")
    except (InvalidImage, Unsupported) as error:
        refusal = str(error)
    if refusal:
        assert re.fullmatch(r"thing 1[^\n]{1,400}", refusal)
    else:
        assert wire.encode_record("thing", found.values) == raw


def test_damage_to_a_record_is_refused_or_canonical() -> None:
    fields = {"a": [1, -1, None, True], "b": {"x": b"\0\1", "y": "text"}, "c": 2**40}
    raw = wire.encode_record("thing", fields)

    def encode(found: Fields) -> bytes:
        values = {key: value for key, value in found.values.items() if key not in RESERVED}
        return wire.encode_record("thing", values)

    check_damage(raw, lambda copy: wire.decode_record(copy, "thing", "thing 1"), encode)


FLOAT = b"\xcb" + struct.pack(">d", 1.0)
HEAD = (b"\xa4kind", b"\xa5thing", b"\xa4read", b"\x90", b"\xa7version", b"\x01")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(packed([1]), id="no map"),
        pytest.param(map_of(*HEAD) + b"\0", id="more than a record"),
        pytest.param(map_of(*HEAD[2:4], *HEAD[:2], *HEAD[4:]), id="keys not in order"),
        pytest.param(map_of(*HEAD, *HEAD[4:]), id="a key twice"),
        pytest.param(map_of(b"\xa1a", b"\x01", b"\xa1a", b"\x01", *HEAD), id="another key twice"),
        pytest.param(map_of(*HEAD[:5], b"\xcc\x01"), id="an integer of two bytes"),
        pytest.param(map_of(*HEAD[:5], b"\xd0\x01"), id="a signed integer"),
        pytest.param(map_of(*HEAD[:5], b"\xcf" + bytes(7) + b"\x01"), id="an integer of nine"),
        pytest.param(map_of(b"\xd9\x04kind", *HEAD[1:]), id="a long key"),
        pytest.param(map_of(*HEAD[:3], b"\xdc\0\0", *HEAD[4:]), id="a long empty array"),
        pytest.param(b"\xde\0\x03" + b"".join(HEAD), id="a long map"),
        pytest.param(map_of(b"\xa1a", FLOAT, *HEAD), id="a float"),
        pytest.param(map_of(b"\xa1a", b"\xca" + bytes(4), *HEAD), id="a short float"),
        pytest.param(map_of(b"\xa1a", b"\xd4\x05\x00", *HEAD), id="an extension"),
        pytest.param(map_of(b"\xa1a", b"\xd6\xff" + bytes(4), *HEAD), id="a time"),
        pytest.param(map_of(b"\xa1a", b"\xc1", *HEAD), id="a reserved byte"),
        pytest.param(map_of(b"\xa1a", b"\xa1\xff", *HEAD), id="a string that is not UTF-8"),
        pytest.param(map_of(b"\xa1a", b"\xa3\xed\xa0\x80", *HEAD), id="a surrogate"),
        pytest.param(map_of(b"\x01", b"\x01", *HEAD), id="a key that is an integer"),
        pytest.param(map_of(b"\xc4\x01a", b"\x01", *HEAD), id="a key that is binary"),
        pytest.param(
            map_of(b"\xa1a", map_of(b"\xc4\x01a", b"\x01"), *HEAD), id="an inner binary key"
        ),
        pytest.param(
            map_of(b"\xa1a", map_of(b"\xa1b", b"\x01", b"\xa1a", b"\x01"), *HEAD),
            id="inner keys not in order",
        ),
        pytest.param(map_of(b"\xa1a", b"\xc6\xff\xff\xff\xff", *HEAD), id="a huge binary string"),
        pytest.param(map_of(b"\xa1a", b"\xdd\xff\xff\xff\xff", *HEAD), id="a huge array"),
        pytest.param(b"\xdf\xff\xff\xff\xff" + b"".join(HEAD), id="a huge map"),
        pytest.param(map_of(b"\xa1a", b"\x91" * 5000 + b"\x90", *HEAD), id="nested deeply"),
        pytest.param(map_of(b"\xa1a", b"\x91" * 8 + b"\x90", *HEAD), id="nested one too deep"),
        pytest.param(head_of(kind=3), id="a kind that is no string"),
        pytest.param(head_of(version=True), id="a version that is no integer"),
        pytest.param(head_of(read=None), id="features that are no array"),
        pytest.param(head_of(kind="k" * 50_000), id="another kind"),
    ],
)
def test_a_record_in_another_form_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidImage, match=r"^thing 1\b[^\n]{1,400}\Z"):
        wire.decode_record(raw, "thing", "thing 1")


def test_a_record_nests_as_deep_as_allowed_and_no_deeper() -> None:
    value: Any = None
    for _ in range(wire.MAX_DEPTH - 1):
        value = [value]
    raw = wire.encode_record("thing", {"a": value})
    assert wire.decode_record(raw, "thing", "thing 1").values["a"] == value
    with pytest.raises(InvalidInput, match="nests at most 8"):
        wire.encode_record("thing", {"a": [[value]]})


def test_a_record_has_as_many_bytes_as_allowed_and_no_more() -> None:
    overhead = len(wire.encode_record("thing", {"a": bytes(70_000)})) - 70_000
    room = wire.MAX_RECORD_BYTES - overhead
    raw = wire.encode_record("thing", {"a": bytes(room)})
    assert len(raw) == wire.MAX_RECORD_BYTES
    assert wire.decode_record(raw, "thing", "thing 1").values["a"] == bytes(room)
    with pytest.raises(InvalidInput, match="at most 196608"):
        wire.encode_record("thing", {"a": bytes(room + 1)})
    with pytest.raises(InvalidImage, match="at most 196608"):
        wire.decode_record(head_of(a=bytes(room + 1)), "thing", "thing 1")


@pytest.mark.parametrize("value", [1.0, {1: 2}, object(), 2**64, -(2**63) - 1, "\ud800"])
def test_what_a_record_can_not_hold_is_not_written(value: Any) -> None:
    with pytest.raises(InvalidInput):
        wire.encode_record("thing", {"a": value})


def test_another_version_is_unsupported_and_both_are_named() -> None:
    with pytest.raises(Unsupported, match=r"^thing 1 has format version 2, this snapcask reads 1"):
        wire.decode_record(head_of(version=2), "thing", "thing 1")


def test_a_feature_to_be_read_is_unsupported_and_named() -> None:
    raw = wire.encode_record("thing", {}, read=["zeta", "crypt-1"])
    with pytest.raises(Unsupported, match="'crypt-1'"):
        wire.decode_record(raw, "thing", "thing 1")
    with pytest.raises(Unsupported, match=r"^thing 1[^\n]{1,400}\Z"):
        wire.decode_record(head_of(read=["x" * 100_000]), "thing", "thing 1")


def test_one_of_several_kinds_is_read_and_told() -> None:
    raw = wire.encode_record("thing", {})
    assert wire.decode_record(raw, ("other", "thing"), "thing 1").kind == "thing"
    with pytest.raises(InvalidImage, match="'thing', expected other or third"):
        wire.decode_record(raw, ("other", "third"), "thing 1")


@pytest.mark.parametrize(
    ("key", "values", "call"),
    [
        ("text", [1, None, b"x", ["x"]], Fields.text),
        ("raw", ["ab", b"a", b"abc", None, 1], lambda f, k: f.raw(k, 2)),
        ("optional_raw", ["ab", b"a", 1, False], lambda f, k: f.optional_raw(k, 2)),
        ("integer", [True, -1, 2**63, "1", None, b"1"], Fields.integer),
        ("bounded", [0, 4, False], lambda f, k: f.integer(k, 1, 3)),
        ("flag", [0, 1, None, "true"], Fields.flag),
        ("array", ["x", {}, [1, 2, 3]], lambda f, k: f.array(k, 2)),
        ("text_array", [[1], ["a", b"b"], ["a"] * 257, "a"], Fields.text_array),
        ("text_map", [["a"], {"a": 1}, {str(i): "" for i in range(257)}], Fields.text_map),
        ("children", [[1], [{}, []], [{}] * 3], lambda f, k: f.children(k, 2)),
    ],
)
def test_typed_access_refuses_other_types_and_names_the_key(
    key: str, values: list[Any], call: Any
) -> None:
    for value in values:
        with pytest.raises(InvalidImage, match=rf"^thing 1: '{key}' "):
            call(Fields({key: value}, "thing 1"), key)
    with pytest.raises(InvalidImage, match=rf"^thing 1: '{key}' is missing"):
        call(Fields({}, "thing 1"), key)


def test_typed_access_gives_what_is_there() -> None:
    fields = Fields(
        {"a": "x", "b": b"12", "c": None, "d": 7, "e": False, "f": ["x"], "g": {"k": "v"},
         "h": [{"i": 1}]},
        "thing 1",
    )  # fmt: skip
    assert fields.text("a") == "x"
    assert fields.raw("b", 2) == fields.optional_raw("b", 2) == b"12"
    assert fields.optional_raw("c", 2) is None
    assert fields.integer("d") == 7
    assert fields.flag("e") is False
    assert fields.text_array("f") == ("x",)
    assert fields.text_map("g") == {"k": "v"}
    child = fields.children("h", 1)[0]
    assert child.what == "thing 1: h[0]"
    assert child.integer("i") == 1
    fields.done()


def test_keys_that_nobody_asked_for_are_refused() -> None:
    fields = wire.decode_record(wire.encode_record("thing", {"a": 1, "b": 2}), "thing", "thing 1")
    fields.integer("a")
    with pytest.raises(InvalidImage, match=r"^thing 1: unknown key 'b'"):
        fields.done()


@given(
    st.lists(st.integers(0, 255), max_size=9),
    st.lists(st.integers(0, 65535), max_size=9),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
    st.lists(st.binary(min_size=32, max_size=32), max_size=3),
    st.integers(0, 9),
)
def test_a_table_is_read_back_and_has_one_form(
    one: list[int], two: list[int], eight: list[int], digests: list[bytes], cut: int
) -> None:
    columns = {
        "one": np.array(one, "u1"),
        "two": np.array(two, "u2"),
        "eight": np.array(eight, "i8"),
        "digest": np.frombuffer(b"".join(digests), "u1").reshape(-1, 32),
    }
    raw = joined(wire.encode_table(SMALL, {"note": "x"}, columns))
    found = wire.decode_table(raw, SMALL, "table 1")
    assert {name: column.tolist() for name, column in found.columns.items()} == {
        name: column.tolist() for name, column in columns.items()
    }
    assert found.head.text("note") == "x"
    in_parts = {name: [column[:cut], column[cut:]] for name, column in columns.items()}
    assert joined(wire.encode_table(SMALL, {"note": "x"}, in_parts)) == raw


def test_a_table_lies_as_the_specification_says() -> None:
    raw = table()
    head_bytes = int.from_bytes(raw[8:12], "little")
    assert raw[:8] == b"SNAPTBL1"
    assert raw[12:16] == bytes(4)
    head = wire.decode_record(raw[16 : 16 + head_bytes], "small", "head")
    assert head.values["columns"] == GOOD_COLUMNS
    body = 16 + head_bytes + -(16 + head_bytes) % 8
    assert raw[16 + head_bytes : body] == bytes(body - 16 - head_bytes)
    assert raw[body:] == (
        b"\1\2\3" + bytes(5) + b"\4\0\5\0" + bytes(4)
        + b"\xff" * 8 + (2**62).to_bytes(8, "little") + bytes(range(64))
    )  # fmt: skip


def test_columns_are_views_that_can_not_be_written() -> None:
    raw = bytearray(table())
    found = wire.decode_table(raw, SMALL, "table 1")
    for column in found.columns.values():
        assert not column.flags.writeable
        assert np.shares_memory(column, np.frombuffer(raw, "u1"))


def test_columns_of_the_right_type_are_not_copied_when_encoded() -> None:
    digests = np.zeros((4, 32), "u1")
    pieces = wire.encode_table(SMALL, {}, columns_of(digest=[digests]))
    assert any(np.shares_memory(np.frombuffer(piece, "u1"), digests) for piece in pieces)


def test_a_column_of_another_shape_is_not_written() -> None:
    with pytest.raises(InvalidInput, match="column 'digest' has shape"):
        table(digest=np.zeros((2, 31), "u1"))
    with pytest.raises(InvalidInput, match="column 'one' has shape"):
        table(one=np.zeros((2, 2), "u1"))


def test_damage_to_a_table_is_refused_or_canonical() -> None:
    def encode(found: wire.Table) -> bytes:
        added = {k: v for k, v in found.head.values.items() if k not in (*RESERVED, "columns")}
        return joined(wire.encode_table(SMALL, added, found.columns))

    accepted = check_damage(table(), lambda raw: wire.decode_table(raw, SMALL, "table 1"), encode)
    data_bits = 8 * (3 + 4 + 16 + 64)
    assert data_bits <= accepted < data_bits + 40


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param(GOOD_COLUMNS[:3], id="one is missing"),
        pytest.param([*GOOD_COLUMNS, ["more", 1, 0]], id="one more"),
        pytest.param([GOOD_COLUMNS[1], GOOD_COLUMNS[0], *GOOD_COLUMNS[2:]], id="another order"),
        pytest.param([["uno", 1, 3], *GOOD_COLUMNS[1:]], id="another name"),
        pytest.param([["one", 2, 3], *GOOD_COLUMNS[1:]], id="another item size"),
        pytest.param([["one", True, 3], *GOOD_COLUMNS[1:]], id="an item size that is no integer"),
        pytest.param([[b"one", 1, 3], *GOOD_COLUMNS[1:]], id="a name that is no string"),
        pytest.param([["one", 1], *GOOD_COLUMNS[1:]], id="no count"),
        pytest.param([["one", 1, 3, 0], *GOOD_COLUMNS[1:]], id="two counts"),
        pytest.param([["one", 1, True], *GOOD_COLUMNS[1:]], id="a count that is no integer"),
        pytest.param([["one", 1, "3"], *GOOD_COLUMNS[1:]], id="a count that is a string"),
        pytest.param([["one", 1, -1], *GOOD_COLUMNS[1:]], id="a count below zero"),
        pytest.param([["one", 1, 9], *GOOD_COLUMNS[1:]], id="another count"),
        pytest.param([*GOOD_COLUMNS[:3], ["digest", 32, 3]], id="one row too many"),
        pytest.param([*GOOD_COLUMNS[:3], ["digest", 32, 1]], id="one row too few"),
        pytest.param([*GOOD_COLUMNS[:3], ["digest", 32, 2**39]], id="a huge count"),
        pytest.param([*GOOD_COLUMNS[:3], ["digest", 32, 2**63]], id="a count beyond all bounds"),
        pytest.param([["one", 1, 2**64 - 1], *GOOD_COLUMNS[1:]], id="a count that would wrap"),
        pytest.param(["one", "two", "eight", "digest"], id="columns that are no arrays"),
        pytest.param({"one": 1}, id="columns that are a map"),
        pytest.param([], id="no columns"),
        pytest.param([[]] * 60_000, id="too many columns"),
    ],
)
def test_a_table_with_other_columns_is_refused(listed: Any) -> None:
    with pytest.raises(InvalidImage, match=r"^table 1[^\n]{1,400}\Z"):
        wire.decode_table(table_with_head(small_head(listed), GOOD_BODY), SMALL, "table 1")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "too few for a table"),
        (b"SNAPTBL2" + table()[8:], "does not begin like a table"),
        (table()[:12] + b"\1" + table()[13:], "does not begin like a table"),
        (table()[:8] + b"\xff\xff\xff\xff" + table()[12:], "claims 4294967295 bytes"),
        (table() + bytes(8), "8 bytes follow"),
        (table()[:-1], "cut short"),
        (table_with_head(small_head(None), GOOD_BODY), "'columns' is not an array"),
        (table_with_head(wire.encode_record("small", {}), GOOD_BODY), "'columns' is missing"),
        (table_with_head(wire.encode_record("large", {}), GOOD_BODY), "of kind 'large'"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidImage, match=rf"^table 1.*{message}"):
        wire.decode_table(raw, SMALL, "table 1")


def test_a_count_that_is_true_is_not_one() -> None:
    one = np.array([7], "u1")
    body = table(one=one)[-len(GOOD_BODY) :]
    for count, is_read in ((1, True), (True, False)):
        raw = table_with_head(small_head([["one", 1, count], *GOOD_COLUMNS[1:]]), body)
        if is_read:
            assert wire.decode_table(raw, SMALL, "table 1").columns["one"].tolist() == [7]
        else:
            with pytest.raises(InvalidImage, match="column 'one' has no valid count"):
                wire.decode_table(raw, SMALL, "table 1")


def test_filling_that_is_not_zero_is_refused() -> None:
    raw = table()
    filling = [i for i in range(len(raw) - len(GOOD_BODY), len(raw))][3:8]
    for at in filling:
        copy = raw[:at] + b"\1" + raw[at + 1 :]
        with pytest.raises(InvalidImage, match=r"filling .* at byte \d+"):
            wire.decode_table(copy, SMALL, "table 1")


def test_the_head_of_a_table_is_read_without_its_columns() -> None:
    raw = table()[: -len(GOOD_BODY)]
    assert wire.peek_head(raw, SMALL, "table 1").text("note") == "x"
    with pytest.raises(InvalidImage, match="cut short"):
        wire.peek_head(raw[:40], SMALL, "table 1")


def _fill(item: bytes, header: bytes = b"\xdd") -> bytes:
    """A record that holds as many of `item` as it may."""
    count = (wire.MAX_RECORD_BYTES - 100) // len(item)
    return map_of(b"\xa1a", header + struct.pack(">I", count) + item * count, *HEAD)


def _many_keys() -> bytes:
    count = (wire.MAX_RECORD_BYTES - 100) // 4
    keys = sorted(bytes([0xA2, 0x21 + i // 94 % 94, 0x21 + i % 94]) for i in range(94 * 94))
    longer = sorted(
        b"\xa3" + bytes([0x21 + i // 8836, 0x21 + i // 94 % 94, 0x21 + i % 94])
        for i in range(count - count // 4 - len(keys))
    )
    pairs = sorted(keys + longer, key=lambda key: key[1:])
    return map_of(
        b"\xa1a", b"\xdf" + struct.pack(">I", len(pairs)) + b"".join(k + b"\xc0" for k in pairs),
        *HEAD,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(_fill(b"\x80"), id="empty maps"),
        pytest.param(_fill(b"\xce\xff\xff\xff\xff"), id="integers"),
        pytest.param(_fill(b"\xd4\x05\x00"), id="extensions"),
        pytest.param(_many_keys(), id="one map of many keys"),
        pytest.param(b"\x91" * wire.MAX_RECORD_BYTES, id="nothing but depth"),
    ],
)
def test_a_hostile_record_costs_at_most_four_times_its_size(raw: bytes) -> None:
    assert len(raw) > wire.MAX_RECORD_BYTES // 2
    peak = peak_bytes(lambda: wire.decode_record(raw, "thing", "thing 1"))
    assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES


@pytest.mark.slow
def test_a_hostile_table_costs_at_most_four_times_its_size() -> None:
    claims = [["one", 1, 2**39], ["two", 2, 2**39], ["eight", 8, 2**39], ["digest", 32, 2**39]]
    hostile: list[Any] = [
        claims,
        [[]] * 60_000,
        [["\0" * 190_000]],
        [GOOD_COLUMNS[0] + [[]] * 60_000],
    ]
    for listed in hostile:
        raw = table_with_head(small_head(listed), GOOD_BODY)
        peak = peak_bytes(partial(wire.decode_table, raw, SMALL, "table 1"))
        assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES


def test_a_large_table_is_not_copied_when_read() -> None:
    raw = bytearray(table(digest=np.zeros((400_000, 32), "u1")))
    peak = peak_bytes(lambda: wire.decode_table(raw, SMALL, "table 1"))
    assert peak < len(raw) // 10


def test_names_of_kinds_and_features_in_messages_are_short() -> None:
    for raw in (head_of(kind="k" * 100_000), head_of(read=["r" * 100_000])):
        with pytest.raises((InvalidImage, Unsupported)) as caught:
            wire.decode_record(raw, "thing", "thing 1")
        assert re.fullmatch(r"[^\n]{1,200}", str(caught.value))
