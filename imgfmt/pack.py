"""Packs (SPEC.md section 5.3): header, chunk table, footer, and where each chunk begins.

Does not read or write packs: a writer puts the payload between `encode_header` and `encode_tail`,
a reader hands in the footer and then the table.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from imgfmt.chunking import MAX_CHUNK_BYTES, PAGE_BYTES_CHOICES
from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import DIGEST_BYTES, Digest, Octets, digest_of
from imgfmt.errors import CorruptData, InvalidImage, InvalidInput, Unsupported
from imgfmt.wire import VERSION, Array, Column, Layout, encode_table
from imgfmt.wire import decode_table as decode_columns

PACK_NAME_BYTES = 16
MAX_CHUNKS = 65_536
MAX_PACK_BYTES = 2**32 - 1
MAX_ENCODED_BYTES = 16 << 20
"""The most that an encoded chunk may claim, stored or plain."""

FOOTER_BYTES = 64
TAIL_HINT_BYTES = 65_536
"""A first read of this many bytes from a pack's end holds the table of all but extreme packs."""

MAX_TABLE_BYTES = 4 << 20
"""More than a table of MAX_CHUNKS rows can have."""

LAYOUT = Layout(
    "pack",
    (
        Column("name", DIGEST_BYTES),
        Column("stored_bytes", 4),
        Column("encoded_row", 4),
        Column("encoded_codec", 1),
        Column("encoded_plain_bytes", 4),
    ),
)

U1 = npt.NDArray[np.uint8]
U4 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]


_HEADER = struct.Struct("<8sII16s")
_FOOTER = struct.Struct("<QQ32s8s8s")
_HEADER_MAGIC = b"SNAPPACK"
_FOOTER_MAGIC = b"SNAPFOOT"


@dataclass(frozen=True, slots=True, eq=False)
class PackTable:
    """What a pack holds, one row a chunk, in the order of the payload.

    `encoded_*` have one item for each row that is not raw. The arrays below them are derived, one
    item for each row; `offsets` count bytes from the pack's start. Nobody changes the arrays.
    Raises InvalidInput for columns that break the format.
    """

    pack: bytes
    page_bytes: int
    names: U1
    stored_bytes: U4
    encoded_rows: U4
    encoded_codecs: U1
    encoded_plain_bytes: U4
    offsets: U8 = field(init=False)
    codecs: U1 = field(init=False)
    plain_bytes: U4 = field(init=False)

    def __post_init__(self) -> None:
        self._check()
        codecs = np.zeros(len(self.names), "u1")
        codecs[self.encoded_rows] = self.encoded_codecs
        plain_bytes = self.stored_bytes.astype("u4")
        plain_bytes[self.encoded_rows] = self.encoded_plain_bytes
        raw = codecs == RAW
        if raw.any() and int(self.stored_bytes[raw].max()) > MAX_CHUNK_BYTES:
            raise InvalidInput(f"a raw chunk has more than {MAX_CHUNK_BYTES} bytes")
        offsets = chunk_offsets(self.page_bytes, self.stored_bytes, raw, self.page_bytes)
        object.__setattr__(self, "codecs", codecs)
        object.__setattr__(self, "plain_bytes", plain_bytes)
        object.__setattr__(self, "offsets", offsets)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def payload_end(self) -> int:
        """Where the last chunk ends, in bytes from the pack's start."""
        if not len(self):
            return self.page_bytes
        return int(self.offsets[-1]) + int(self.stored_bytes[-1])

    @property
    def table_offset(self) -> int:
        """Where the table begins: the first page boundary at or after the payload's end."""
        return self.payload_end + -self.payload_end % self.page_bytes

    def _check(self) -> None:
        if len(self.pack) != PACK_NAME_BYTES:
            raise InvalidInput(f"a pack's name has {PACK_NAME_BYTES} bytes")
        if self.page_bytes not in PAGE_BYTES_CHOICES:
            raise InvalidInput(f"{self.page_bytes} is not a page size")
        n_chunks = len(self.names)
        if n_chunks > MAX_CHUNKS:
            raise InvalidInput(f"{n_chunks} chunks are too many, a pack has at most {MAX_CHUNKS}")
        if len(self.stored_bytes) != n_chunks:
            raise InvalidInput("stored_bytes and name differ in length")
        if not within(self.stored_bytes, 1, MAX_ENCODED_BYTES):
            raise InvalidInput(f"a chunk's stored_bytes is not from 1 to {MAX_ENCODED_BYTES}")
        if len(self.encoded_plain_bytes) != len(self.encoded_rows):
            raise InvalidInput("the columns of encoded chunks differ in length")
        if not within(self.encoded_plain_bytes, 1, MAX_ENCODED_BYTES):
            raise InvalidInput(f"encoded_plain_bytes is not from 1 to {MAX_ENCODED_BYTES}")
        check_encoded(self.encoded_rows, self.encoded_codecs, n_chunks)


def within(values: Array, low: int, high: int) -> bool:
    """Whether all values are in [low, high]."""
    return not len(values) or (int(values.min()) >= low and int(values.max()) <= high)


def check_encoded(rows: Array, codecs: Array, n_chunks: int) -> None:
    """Raise InvalidInput unless rows ascend below `n_chunks`, each with a codec other than raw.

    Raises Unsupported for a codec that is not known.
    """
    if len(codecs) != len(rows):
        raise InvalidInput("the columns of encoded chunks differ in length")
    if not len(rows):
        return
    if not (rows[1:] > rows[:-1]).all() or int(rows[-1]) >= n_chunks:
        raise InvalidInput("the encoded chunks do not ascend, or one is beyond the last chunk")
    if int(codecs.min()) == RAW:
        raise InvalidInput("a raw chunk is among the encoded ones")
    if int(codecs.max()) > ZSTD:
        raise Unsupported(f"codec {int(codecs.max())} is not known; use a newer snapcask")


def chunk_offsets(start: int, stored_bytes: Array, raw: Bools, page_bytes: int) -> U8:
    """Offsets of chunks that lie one after the other from `start` on.

    A raw chunk begins at the first page boundary at or after the end of the one before it (or
    after `start`), an encoded one begins right there.
    """
    if not len(stored_bytes):
        return np.zeros(0, "u8")
    first, begin = np.zeros(1, "u4"), np.array([start], "u8")
    return run_offsets(first, begin, stored_bytes, raw, page_bytes)


def run_offsets(
    run_chunk: Array, run_offset: Array, stored_bytes: Array, raw: Bools, page_bytes: int
) -> U8:
    """As `chunk_offsets`, for runs: run `r` begins with chunk `run_chunk[r]` at `run_offset[r]`.

    `run_chunk` begins with 0 and ascends strictly below the number of chunks, which is not 0.
    """
    mask = np.uint64(page_bytes - 1)
    begin = run_offset.astype("u8")
    begin[raw[run_chunk]] = _aligned(begin[raw[run_chunk]], mask)
    if raw.all():  # each chunk fills whole pages
        return _continued(run_chunk, begin, _aligned(stored_bytes.astype("u8"), mask))
    if not raw.any():
        return _continued(run_chunk, begin, stored_bytes.astype("u8"))
    # A block is a raw chunk and the encoded chunks after it, or those that a run begins with. The
    # next block of the run begins with a raw chunk, so a block fills whole pages, but that the
    # first block of a run may begin within a page: `lead` bytes after the boundary before it.
    starts_block = raw.copy()
    starts_block[run_chunk] = True
    block_chunk = np.flatnonzero(starts_block)
    run_block = np.searchsorted(block_chunk, run_chunk)
    lead = np.zeros(len(block_chunk), "u8")
    lead[run_block] = begin & mask
    block_bytes = lead + np.add.reduceat(stored_bytes, block_chunk, dtype="u8")
    block_offset = _continued(run_block, begin & ~mask, _aligned(block_bytes, mask)) + lead
    return _continued(block_chunk, block_offset, stored_bytes.astype("u8"))


def _continued(first: Array, begin: U8, lengths: U8) -> U8:
    """Positions of items one after the other: item `first[i]` is at `begin[i]`, then on from it."""
    positions = np.cumsum(lengths, dtype="u8")
    positions -= lengths
    shift = begin - positions[first]  # may wrap below 0, and wraps back
    positions += shift if len(first) == 1 else np.repeat(shift, np.diff(first, append=len(lengths)))
    return positions


def _aligned(positions: U8, mask: np.uint64) -> U8:
    return (positions + mask) & ~mask


def encode_header(pack: bytes, page_bytes: int) -> bytes:
    """The first page of a pack."""
    if len(pack) != PACK_NAME_BYTES or page_bytes not in PAGE_BYTES_CHOICES:
        raise InvalidInput(f"no pack has a name of {len(pack)} bytes and pages of {page_bytes}")
    return _HEADER.pack(_HEADER_MAGIC, VERSION, page_bytes, pack).ljust(page_bytes, b"\0")


def check_header(raw: Octets, pack: bytes, page_bytes: int, what: str) -> None:
    """Raise InvalidImage or Unsupported unless `raw`, one page, is the header of this pack."""
    if len(raw) != page_bytes:
        raise InvalidImage(f"{what} has a header of {len(raw)} bytes, expected {page_bytes}")
    magic, version, stated_page_bytes, stated_pack = _HEADER.unpack_from(raw)
    if magic != _HEADER_MAGIC:
        raise InvalidImage(f"{what} does not begin like a pack")
    if version != VERSION:
        raise Unsupported(f"{what} has format version {version}, this snapcask reads {VERSION}")
    if stated_page_bytes != page_bytes:
        raise InvalidImage(f"{what} has pages of {stated_page_bytes} bytes, expected {page_bytes}")
    if stated_pack != pack:
        raise InvalidImage(f"{what} says that it is pack {stated_pack.hex()}")
    if any(memoryview(raw)[_HEADER.size :]):
        raise InvalidImage(f"{what} has a header that is not zero to its end")


def encode_tail(table: PackTable, payload_end: int) -> bytes:
    """Table, filling and footer, to be written at the first page boundary after the payload.

    The zero bytes before that boundary are the writer's; `payload_end` is where it saw the last
    chunk end. Raises InvalidInput if that is not where the table says.
    """
    if payload_end != table.payload_end:
        raise InvalidInput(f"a payload ends at {payload_end}, its table says {table.payload_end}")
    columns: dict[str, Array] = {
        "name": table.names,
        "stored_bytes": table.stored_bytes,
        "encoded_row": table.encoded_rows,
        "encoded_codec": table.encoded_codecs,
        "encoded_plain_bytes": table.encoded_plain_bytes,
    }
    raw = b"".join(encode_table(LAYOUT, {"pack": table.pack}, columns))
    filling = bytes(-(len(raw) + FOOTER_BYTES) % table.page_bytes)
    if table.table_offset + len(raw) + len(filling) + FOOTER_BYTES > MAX_PACK_BYTES:
        raise InvalidInput(f"a pack has at most {MAX_PACK_BYTES} bytes")
    digest = digest_of(raw).raw
    footer = _FOOTER.pack(table.table_offset, len(raw), digest, bytes(8), _FOOTER_MAGIC)
    return raw + filling + footer


def parse_footer(raw: Octets, pack_bytes: int, what: str) -> tuple[int, int, Digest]:
    """Offset, length and digest of the table, from the last 64 bytes of a pack of `pack_bytes`.

    Raises InvalidImage for places that can't be.
    """
    if len(raw) != FOOTER_BYTES or pack_bytes > MAX_PACK_BYTES:
        raise InvalidImage(f"{what} has {pack_bytes} bytes, which no pack has")
    offset, length, digest, zero, magic = _FOOTER.unpack(raw)
    if magic != _FOOTER_MAGIC or any(zero):
        raise InvalidImage(f"{what} does not end like a pack; it may be cut short")
    filling = pack_bytes - FOOTER_BYTES - offset - length
    if length > MAX_TABLE_BYTES or not 0 <= filling < max(PAGE_BYTES_CHOICES):
        raise InvalidImage(f"{what} has a table of {length} bytes at {offset}, which can't be")
    if offset % min(PAGE_BYTES_CHOICES) or pack_bytes % min(PAGE_BYTES_CHOICES):
        raise InvalidImage(f"{what} has a table or a footer that is off the page boundary")
    return offset, length, Digest(digest)


def decode_table(
    raw: Octets, pack: bytes, digest: Digest, page_bytes: int, table_offset: int, what: str
) -> PackTable:
    """Read the table that lies at `table_offset` of pack `pack`; its columns are views of `raw`.

    Raises CorruptData if it is not the one with this digest, else InvalidImage or Unsupported.
    """
    if (found := digest_of(raw)) != digest:
        raise CorruptData(f"{what} has a table that hashes to {found.short}, not {digest.short}")
    decoded = decode_columns(raw, LAYOUT, what)
    stated_pack, columns = decoded.head.raw("pack", PACK_NAME_BYTES), decoded.columns
    decoded.head.done()
    if stated_pack != pack:
        raise InvalidImage(f"{what} has the table of pack {stated_pack.hex()}")
    try:
        table = PackTable(
            pack=pack,
            page_bytes=page_bytes,
            names=columns["name"],
            stored_bytes=columns["stored_bytes"],
            encoded_rows=columns["encoded_row"],
            encoded_codecs=columns["encoded_codec"],
            encoded_plain_bytes=columns["encoded_plain_bytes"],
        )
    except (InvalidInput, Unsupported) as error:
        kind = InvalidImage if isinstance(error, InvalidInput) else Unsupported
        raise kind(f"{what}: {error}") from None
    if table.table_offset != table_offset:
        raise InvalidImage(
            f"{what} has its table at {table_offset}, its chunks end at {table.payload_end}"
        )
    return table
