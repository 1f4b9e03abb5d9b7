"""Index segments (SPEC.md section 5.5): in which packs a chunk may lie. A hint, never the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Octets
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.pack import MAX_CHUNKS, PACK_NAME_BYTES, U1, U4, U8, PackTable, within
from imgfmt.wire import Array, Column, Layout, decode_table, encode_table

ENTRY_BYTES = 8 + 4 + 2
"""What one entry adds to a segment."""

CANDIDATES_PER_NAME = 64
"""How many entries `find` gives for one name at most, so that a bad segment can't flood it."""

_MERGED_AT_ONCE = 250_000

LAYOUT = Layout(
    "index",
    (
        Column("pack", PACK_NAME_BYTES),
        Column("key", 8),
        Column("entry_pack", 4),
        Column("entry_row", 2),
    ),
)

U2 = npt.NDArray[np.uint16]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class IndexSegment:
    """Entries by ascending `key`, the first 8 bytes of a store name as a big-endian number.

    An entry says: row `entry_row` of the table of pack `packs[entry_pack]` may be that chunk.
    Raises InvalidInput for columns that break the format. Nobody changes the arrays.
    """

    packs: U1
    key: U8
    entry_pack: U4
    entry_row: U2

    def __post_init__(self) -> None:
        if not len(self.key) == len(self.entry_pack) == len(self.entry_row):
            raise InvalidInput("the columns of entries differ in length")
        if not (self.key[1:] >= self.key[:-1]).all():
            raise InvalidInput("the keys do not ascend")
        if not within(self.entry_pack, 0, len(self.packs) - 1):
            raise InvalidInput("an entry names a pack that is not listed")

    def __len__(self) -> int:
        return len(self.key)


def encode(segment: IndexSegment) -> list[Octets]:
    """The canonical bytes as pieces to be written one after the other."""
    columns: dict[str, Array] = {
        "pack": segment.packs,
        "key": segment.key,
        "entry_pack": segment.entry_pack,
        "entry_row": segment.entry_row,
    }
    return encode_table(LAYOUT, {}, columns)


def decode(raw: Octets, what: str) -> IndexSegment:
    """Read a segment; its arrays are views of `raw`. Raises InvalidImage or Unsupported."""
    table = decode_table(raw, LAYOUT, what)
    table.head.done()
    columns = table.columns
    try:
        return IndexSegment(
            columns["pack"], columns["key"], columns["entry_pack"], columns["entry_row"]
        )
    except InvalidInput as error:
        raise InvalidImage(f"{what}: {error}") from None


def build(packs: Sequence[PackTable]) -> IndexSegment:
    """The segment of all chunks of these packs."""
    names, place_of = _distinct([_names(packs)])
    n_entries = [len(pack) for pack in packs]
    columns = (
        _joined([_keys(pack.names) for pack in packs], "u8"),
        np.repeat(place_of[0], n_entries),
        _joined([np.arange(n, dtype="u2") for n in n_entries], "u2"),
    )
    return IndexSegment(names, *_ordered(*columns))


def merge(segments: Sequence[IndexSegment]) -> IndexSegment:
    """The union: an entry that several segments have is in it once.

    Goes through the keys range by range, so that it takes little more memory than the result.
    """
    names, place_of = _distinct([segment.packs for segment in segments])
    n_ranges = 1 + sum(map(len, segments)) // _MERGED_AT_ONCE
    bounds = np.array([(i << 64) // n_ranges for i in range(1, n_ranges)], dtype="u8")
    ends = [[*np.searchsorted(s.key, bounds).tolist(), len(s)] for s in segments]
    starts = [0] * len(segments)
    ranges = []
    for stops in zip(*ends, strict=True):
        within_range = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        parts = list(zip(segments, place_of, within_range, strict=True))
        columns = (
            np.concatenate([segment.key[here] for segment, _, here in parts]),
            np.concatenate([place[segment.entry_pack[here]] for segment, place, here in parts]),
            np.concatenate([segment.entry_row[here] for segment, _, here in parts]),
        )
        ranges.append(_ordered(*columns))
        starts = list(stops)
    key, entry_pack, entry_row = zip(*ranges, strict=True) if ranges else ((), (), ())
    return IndexSegment(
        names, _joined(key, "u8"), _joined(entry_pack, "u4"), _joined(entry_row, "u2")
    )


def without(segment: IndexSegment, packs: Sequence[bytes]) -> IndexSegment:
    """The same but for the entries of these packs."""
    name_type = f"S{PACK_NAME_BYTES}"
    names = np.ascontiguousarray(segment.packs).view(name_type).reshape(-1)
    is_left = ~np.isin(names, np.frombuffer(b"".join(packs), name_type))
    entries = is_left[segment.entry_pack]
    number = np.cumsum(is_left, dtype="u4") - np.uint32(1)
    return IndexSegment(
        segment.packs[is_left],
        segment.key[entries],
        number[segment.entry_pack[entries]],
        segment.entry_row[entries],
    )


def find(segment: IndexSegment, names: U1) -> tuple[Indices, U4, U2]:
    """Candidates for store names (shape (m, 32)): query row, index into `packs`, row in the pack.

    One item of each array for every entry whose key is that of the name, by ascending query row;
    at most CANDIDATES_PER_NAME for a name. The pack's table must confirm the whole name.
    """
    wanted = _keys(names)
    left = np.searchsorted(segment.key, wanted, side="left")
    inside = np.flatnonzero(left < len(segment))
    present = inside[segment.key[left[inside]] == wanted[inside]]
    left = left[present]
    right = np.searchsorted(segment.key, wanted[present], side="right")
    n_found = np.minimum(right - left, CANDIDATES_PER_NAME)
    shift = left - (np.cumsum(n_found) - n_found)
    entry = np.arange(n_found.sum()) + np.repeat(shift, n_found)
    return np.repeat(present, n_found), segment.entry_pack[entry], segment.entry_row[entry]


def _distinct(lists: Sequence[U1]) -> tuple[U1, list[U4]]:
    """The packs of all lists, ascending and each once; for each list where its packs are there."""
    joined = np.concatenate([np.zeros((0, PACK_NAME_BYTES), "u1"), *lists])
    packs, position = np.unique(joined, axis=0, return_inverse=True)
    ends = np.cumsum([len(names) for names in lists], dtype="i8")
    return packs, np.split(position.reshape(-1).astype("u4"), ends)[: len(lists)]


def _ordered(key: U8, entry_pack: U4, entry_row: U2) -> tuple[U8, U4, U2]:
    """The same entries by key, pack and row, each once."""
    place = entry_pack.astype("u8") * np.uint64(MAX_CHUNKS) + entry_row
    order = np.lexsort((place, key))
    key, place = key[order], place[order]
    is_new = np.ones(len(key), bool)
    is_new[1:] = (key[1:] != key[:-1]) | (place[1:] != place[:-1])
    key, place = key[is_new], place[is_new]
    entry_pack, row = np.divmod(place, np.uint64(MAX_CHUNKS))
    return key, entry_pack.astype("u4"), row.astype("u2")


def _keys(names: U1) -> U8:
    return np.ascontiguousarray(names[:, :8]).view(">u8").reshape(-1).astype("u8")


def _names(packs: Sequence[PackTable]) -> U1:
    joined = b"".join(pack.pack for pack in packs)
    return np.frombuffer(joined, "u1").reshape(-1, PACK_NAME_BYTES)


def _joined(parts: Sequence[Array], dtype: str) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
