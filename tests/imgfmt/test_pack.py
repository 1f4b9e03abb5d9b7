"""Packs: offsets by the running rule, tables and footers strict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import pack as packs
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import CorruptData, InvalidImage, InvalidInput, Unsupported
from imgfmt.pack import PackTable
from imgfmt.wire import encode_table
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, peak_bytes

NAME = bytes(range(16))
PAGE = 4096
CHUNKS = st.lists(st.tuples(st.integers(1, 20_000), st.booleans()), max_size=40)
Rows = list[tuple[int, bool]]


def offsets_one_by_one(start: int, rows: Rows, page_bytes: int) -> list[int]:
    """SPEC.md section 5.3, word for word."""
    offsets, end = [], start
    for stored_bytes, raw in rows:
        begin = -(-end // page_bytes) * page_bytes if raw else end
        offsets.append(begin)
        end = begin + stored_bytes
    return offsets


def make_table(rows: Rows, *, page_bytes: int = PAGE, pack: bytes = NAME) -> PackTable:
    encoded = [row for row, (_, raw) in enumerate(rows) if not raw]
    names = b"".join(digest_of(row.to_bytes(4)).raw for row in range(len(rows)))
    return PackTable(
        pack=pack,
        page_bytes=page_bytes,
        names=np.frombuffer(names, "u1").reshape(-1, 32),
        stored_bytes=np.array([stored_bytes for stored_bytes, _ in rows], "u4"),
        encoded_rows=np.array(encoded, "u4"),
        encoded_codecs=np.ones(len(encoded), "u1"),
        encoded_plain_bytes=np.array([rows[row][0] + 7 for row in encoded], "u4"),
    )


def columns_of(table: PackTable) -> dict[str, Any]:
    return {
        "name": table.names,
        "stored_bytes": table.stored_bytes,
        "encoded_row": table.encoded_rows,
        "encoded_codec": table.encoded_codecs,
        "encoded_plain_bytes": table.encoded_plain_bytes,
    }


def encode_columns(columns: dict[str, Any], pack: bytes = NAME) -> bytes:
    return b"".join(encode_table(packs.LAYOUT, {"pack": pack}, columns))


def decode(raw: bytes, table_offset: int, *, page_bytes: int = PAGE) -> PackTable:
    """Decode as a table whose footer was forged to fit."""
    return packs.decode_table(raw, NAME, digest_of(raw), page_bytes, table_offset, "pack 00")


@given(st.integers(0, 100_000), CHUNKS, st.sampled_from([4096, 16384, 65536]))
def test_offsets_are_those_of_the_running_rule(start: int, rows: Rows, page_bytes: int) -> None:
    stored_bytes = np.array([row[0] for row in rows], "u4")
    for raw in ([row[1] for row in rows], [True] * len(rows), [False] * len(rows)):
        same_lengths = list(zip(stored_bytes.tolist(), raw, strict=True))
        expected = offsets_one_by_one(start, same_lengths, page_bytes)
        found = packs.chunk_offsets(start, stored_bytes, np.array(raw, bool), page_bytes)
        assert found.dtype == np.uint64
        assert found.tolist() == expected


@given(CHUNKS, st.sampled_from([4096, 16384, 65536]))
def test_a_pack_is_read_back_from_its_tail(rows: Rows, page_bytes: int) -> None:
    table = make_table(rows, page_bytes=page_bytes)
    tail = packs.encode_tail(table, table.payload_end)
    pack_bytes = table.table_offset + len(tail)
    assert pack_bytes % page_bytes == 0
    assert table.table_offset % page_bytes == 0
    assert 0 <= table.table_offset - table.payload_end < page_bytes
    offset, length, digest = packs.parse_footer(tail[-64:], pack_bytes, "pack 00")
    assert offset == table.table_offset
    found = packs.decode_table(tail[:length], NAME, digest, page_bytes, offset, "pack 00")
    for name, column in columns_of(table).items():
        assert np.array_equal(columns_of(found)[name], column)
    assert found.offsets.tolist() == offsets_one_by_one(page_bytes, rows, page_bytes)
    assert found.codecs.tolist() == [0 if raw else 1 for _, raw in rows]
    assert found.plain_bytes.tolist() == [n if raw else n + 7 for n, raw in rows]
    assert len(found) == len(rows)


def test_the_footer_is_that_of_the_specification() -> None:
    table = make_table([(5000, True)])
    tail = packs.encode_tail(table, PAGE + 5000)
    assert len(tail) % PAGE == 0
    length = int.from_bytes(tail[-56:-48], "little")
    assert int.from_bytes(tail[-64:-56], "little") == 3 * PAGE
    assert tail[-48:-16] == digest_of(tail[:length]).raw
    assert tail[-16:] == bytes(8) + b"SNAPFOOT"
    assert not any(tail[length:-64])


def test_a_writer_that_disagrees_with_its_table_is_told() -> None:
    with pytest.raises(InvalidInput, match="payload ends at 4097"):
        packs.encode_tail(make_table([(5000, True)]), 4097)


def test_a_pack_of_4_gib_is_not_written() -> None:
    rows = [(1 << 20, True)] * 4095
    one_page = make_table([*rows, (PAGE, True)])
    tail_bytes = len(packs.encode_tail(one_page, one_page.payload_end))
    room = 2**32 - one_page.payload_end - tail_bytes
    fits = make_table([*rows, (room, True)])
    assert len(packs.encode_tail(fits, fits.payload_end)) == tail_bytes
    too_large = make_table([*rows, (room + PAGE, True)])
    with pytest.raises(InvalidInput, match="a pack has at most"):
        packs.encode_tail(too_large, too_large.payload_end)


def test_a_header_is_one_page_and_checked_to_its_end() -> None:
    header = packs.encode_header(NAME, 16384)
    assert header[:32] == b"SNAPPACK\x01\0\0\0\0\x40\0\0" + NAME
    assert len(header) == 16384
    packs.check_header(header, NAME, 16384, "pack 00")
    for page_bytes, name in ((16384, NAME[::-1]), (4096, NAME)):
        with pytest.raises(InvalidImage):
            packs.check_header(header, name, page_bytes, "pack 00")
    with pytest.raises(Unsupported, match="version 2, this snapcask reads 1"):
        packs.check_header(header.replace(b"\x01\0", b"\x02\0", 1), NAME, 16384, "pack 00")
    for name, page_bytes in ((NAME, 8192), (NAME[:-1], 4096)):
        with pytest.raises(InvalidInput):
            packs.encode_header(name, page_bytes)


def test_every_damage_to_a_header_is_refused() -> None:
    def check(raw: bytes) -> None:
        packs.check_header(raw, NAME, PAGE, "pack 00")

    assert check_damage(packs.encode_header(NAME, PAGE), check, lambda _: b"") == 0


def test_every_damage_to_a_table_is_told_by_its_digest() -> None:
    table = make_table([(5000, True), (300, False)])
    raw = encode_columns(columns_of(table))
    digest = digest_of(raw)
    for copy in (raw[:-1], b"\1" + raw[1:], b""):
        with pytest.raises(CorruptData, match="hashes to"):
            packs.decode_table(copy, NAME, digest, PAGE, table.table_offset, "pack 00")


def test_a_table_with_a_forged_footer_is_refused_or_is_canonical() -> None:
    table = make_table([(5000, True), (300, False), (20, False), (9000, True)])
    raw = encode_columns(columns_of(table))

    def encode(found: PackTable) -> bytes:
        return encode_columns(columns_of(found))

    accepted = check_damage(raw, lambda copy: decode(copy, table.table_offset), encode)
    assert accepted > 4 * 256  # every bit of the names may be another


def test_every_damage_to_a_footer_is_refused_but_to_its_digest() -> None:
    table = make_table([(5000, True)])
    tail = packs.encode_tail(table, table.payload_end)
    pack_bytes = table.table_offset + len(tail)
    for bit in range(64 * 8):
        footer = bytearray(tail[-64:])
        footer[bit // 8] ^= 1 << bit % 8
        try:
            offset, length, digest = packs.parse_footer(bytes(footer), pack_bytes, "pack 00")
        except InvalidImage:
            continue
        begin = offset - table.table_offset
        with pytest.raises((CorruptData, InvalidImage)):
            packs.decode_table(
                tail[begin : begin + length] if begin >= 0 else b"",
                NAME,
                digest,
                PAGE,
                offset,
                "pack 00",
            )


@pytest.mark.parametrize(
    ("offset", "length", "pack_bytes"),
    [
        (8192, 2**63, 16384),
        (2**63, 100, 16384),
        (8192, packs.MAX_TABLE_BYTES + 1, 8192 + packs.MAX_TABLE_BYTES + 4096),
        (8192, 8192, 16384),
        (4096, 4032, 73728),
        (8200, 100, 16384),
        (8192, 100, 16385),
        (2**32 - 4096, 100, 2**32),
    ],
)
def test_a_footer_that_names_an_impossible_place_is_refused(
    offset: int, length: int, pack_bytes: int
) -> None:
    footer = offset.to_bytes(8, "little") + length.to_bytes(8, "little") + bytes(40) + b"SNAPFOOT"
    with pytest.raises(InvalidImage):
        packs.parse_footer(footer, pack_bytes, "pack 00")


def test_a_table_may_end_where_the_footer_begins() -> None:
    footer = (4096).to_bytes(8, "little") + (4032).to_bytes(8, "little") + bytes(40) + b"SNAPFOOT"
    expected = (4096, 4032, Digest(bytes(32)))
    assert packs.parse_footer(footer, 8192, "pack 00") == expected


def test_a_footer_has_64_bytes() -> None:
    for raw in (b"", bytes(63), bytes(65)):
        with pytest.raises(InvalidImage):
            packs.parse_footer(raw, 4096, "pack 00")


ROWS: Rows = [(5000, True), (300, False), (20, False), (9000, True)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stored_bytes": [5000, 300, 20]}, "differ in length"),
        ({"stored_bytes": [5000, 0, 20, 9000]}, "stored_bytes is not from 1"),
        ({"stored_bytes": [5000, (16 << 20) + 1, 20, 9000]}, "stored_bytes is not from 1"),
        ({"stored_bytes": [(1 << 20) + 1, 300, 20, 9000]}, "raw chunk has more than"),
        ({"encoded_row": [1]}, "differ in length"),
        ({"encoded_codec": [1]}, "differ in length"),
        ({"encoded_plain_bytes": [1]}, "differ in length"),
        ({"encoded_row": [2, 1]}, "do not ascend"),
        ({"encoded_row": [1, 1]}, "do not ascend"),
        ({"encoded_row": [1, 4]}, "beyond the last chunk"),
        ({"encoded_codec": [1, 0]}, "raw chunk is among the encoded"),
        ({"encoded_plain_bytes": [0, 5]}, "plain_bytes is not from 1"),
        ({"encoded_plain_bytes": [5, (16 << 20) + 1]}, "plain_bytes is not from 1"),
        ({"stored_bytes": [5000, 300, 20, 19000]}, "its chunks end at"),
        ({"stored_bytes": [5000, 300, 20, 90]}, "its chunks end at"),
    ],
)
def test_a_table_that_breaks_a_rule_is_refused(change: dict[str, list[int]], message: str) -> None:
    table = make_table(ROWS)
    columns = columns_of(table)
    columns |= {key: np.array(value, columns[key].dtype) for key, value in change.items()}
    with pytest.raises(InvalidImage, match=f"^pack 00.*{message}"):
        decode(encode_columns(columns), table.table_offset)


def test_claims_up_to_their_limits_are_accepted() -> None:
    rows = [(1 << 20, True), ((16 << 20) - 7, False)]
    assert make_table(rows).plain_bytes.tolist() == [1 << 20, 16 << 20]


def test_a_codec_that_is_not_known_is_unsupported() -> None:
    columns = columns_of(make_table(ROWS)) | {"encoded_codec": np.array([1, 2], "u1")}
    with pytest.raises(Unsupported, match="pack 00: codec 2 is not known"):
        decode(encode_columns(columns), 24576)


def test_the_table_of_another_pack_is_refused() -> None:
    table = make_table(ROWS, pack=NAME[::-1])
    raw = encode_columns(columns_of(table), pack=NAME[::-1])
    with pytest.raises(InvalidImage, match=f"has the table of pack {NAME[::-1].hex()}"):
        decode(raw, table.table_offset)


def test_a_head_with_unknown_keys_is_refused() -> None:
    table = make_table(ROWS)
    head = {"pack": NAME, "more": 1}
    raw = b"".join(encode_table(packs.LAYOUT, head, columns_of(table)))
    with pytest.raises(InvalidImage, match="unknown key 'more'"):
        decode(raw, table.table_offset)


def test_a_pack_has_at_most_65536_chunks_and_such_a_table_is_within_its_limit() -> None:
    n_chunks = packs.MAX_CHUNKS
    every = np.arange(n_chunks + 1, dtype="u4")
    columns = {
        "name": np.zeros((n_chunks + 1, 32), "u1"),
        "stored_bytes": np.ones(n_chunks + 1, "u4"),
        "encoded_row": every,
        "encoded_codec": np.ones(n_chunks + 1, "u1"),
        "encoded_plain_bytes": np.ones(n_chunks + 1, "u4"),
    }
    with pytest.raises(InvalidImage, match="65537 chunks are too many"):
        decode(encode_columns(columns), 73728)
    raw = encode_columns({name: column[:-1] for name, column in columns.items()})
    assert len(decode(raw, PAGE + n_chunks)) == n_chunks
    assert len(raw) < packs.MAX_TABLE_BYTES
    assert peak_bytes(lambda: decode(raw, PAGE + n_chunks)) < 4 * len(raw) + ALLOWED_EXTRA_BYTES


def test_a_usual_table_fits_the_first_read_of_a_tail() -> None:
    table = make_table([(256 << 10, True)] * 256)
    assert len(packs.encode_tail(table, table.payload_end)) <= packs.TAIL_HINT_BYTES


def test_tables_that_no_writer_may_make_are_refused() -> None:
    none = np.zeros(0, "u4")
    for name, page_bytes in ((b"short", PAGE), (NAME, 8192)):
        with pytest.raises(InvalidInput):
            PackTable(name, page_bytes, np.zeros((0, 32), "u1"), none, none, none, none)


def test_a_digest_is_compared_before_anything_is_read() -> None:
    with pytest.raises(CorruptData):
        packs.decode_table(b"", NAME, Digest(bytes(32)), PAGE, PAGE, "pack 00")
