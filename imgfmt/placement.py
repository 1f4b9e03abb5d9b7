"""Placements (SPEC.md section 5.4): in which packs, and where in them, the chunks of a tree lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgfmt.codec import RAW
from imgfmt.digest import DIGEST_BYTES, Digest, Octets
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.pack import (
    MAX_ENCODED_BYTES,
    MAX_PACK_BYTES,
    PACK_NAME_BYTES,
    U1,
    U4,
    U8,
    check_encoded,
    run_offsets,
    within,
)
from imgfmt.wire import Array, Column, Layout, decode_table, encode_table

MAX_CHUNKS = 2**32 - 1
_CHUNKS_AT_ONCE = 250_000

LAYOUT = Layout(
    "placement",
    (
        Column("pack", PACK_NAME_BYTES),
        Column("pack_live_bytes", 8),
        Column("run_pack", 4),
        Column("run_offset", 4),
        Column("run_chunk", 4),
        Column("encoded_chunk", 4),
        Column("encoded_codec", 1),
        Column("encoded_stored_bytes", 4),
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where the `n_chunks` chunks of `tree` lie. Raises InvalidInput for what no placement says.

    `packs` ascend; `run_*` have one item a run of chunks that lie one after the other in a pack,
    `encoded_*` one item a chunk that is not raw. Nobody changes the arrays.
    """

    tree: Digest
    n_chunks: int
    packs: U1
    pack_live_bytes: U8
    run_pack: U4
    run_offset: U4
    run_chunk: U4
    encoded_chunk: U4
    encoded_codec: U1
    encoded_stored_bytes: U4

    def __post_init__(self) -> None:
        self._check_packs()
        self._check_runs()
        if len(self.encoded_stored_bytes) != len(self.encoded_chunk):
            raise InvalidInput("the columns of encoded chunks differ in length")
        if not within(self.encoded_stored_bytes, 1, MAX_ENCODED_BYTES):
            raise InvalidInput(f"encoded_stored_bytes is not from 1 to {MAX_ENCODED_BYTES}")
        check_encoded(self.encoded_chunk, self.encoded_codec, self.n_chunks)

    def _check_packs(self) -> None:
        names = np.ascontiguousarray(self.packs).view(">u8")
        high, low = names[:, 0], names[:, 1]
        ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
        if not ascends.all():
            raise InvalidInput("the packs do not ascend")
        if len(self.pack_live_bytes) != len(names):
            raise InvalidInput("pack and pack_live_bytes differ in length")
        if not within(self.pack_live_bytes, 1, MAX_PACK_BYTES):
            raise InvalidInput(f"pack_live_bytes is not from 1 to {MAX_PACK_BYTES}")

    def _check_runs(self) -> None:
        if not len(self.run_pack) == len(self.run_offset) == len(self.run_chunk):
            raise InvalidInput("the columns of runs differ in length")
        if not 0 <= self.n_chunks <= MAX_CHUNKS:
            raise InvalidInput(f"{self.n_chunks} chunks are not from 0 to {MAX_CHUNKS}")
        first = self.run_chunk
        if (self.n_chunks > 0) != (len(first) > 0) or (len(first) and int(first[0])):
            raise InvalidInput("the runs do not begin with chunk 0")
        if not (first[1:] > first[:-1]).all() or not within(first[-1:], 0, self.n_chunks - 1):
            raise InvalidInput("the runs do not ascend, or one begins beyond the last chunk")
        if not within(self.run_pack, 0, len(self.packs) - 1):
            raise InvalidInput("a run lies in a pack that is not listed")
        used = np.zeros(len(self.packs), bool)
        used[self.run_pack] = True
        if not used.all():
            raise InvalidInput("a pack is listed in which no chunk lies")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLocations:
    """For each chunk of a tree: index into the placement's packs, and the bytes it takes there."""

    pack: U4
    offset: U8
    stored_bytes: U4
    codec: U1


def encode(placement: Placement) -> list[Octets]:
    """The canonical bytes as pieces to be written one after the other."""
    columns: dict[str, Array] = {
        "pack": placement.packs,
        "pack_live_bytes": placement.pack_live_bytes,
        "run_pack": placement.run_pack,
        "run_offset": placement.run_offset,
        "run_chunk": placement.run_chunk,
        "encoded_chunk": placement.encoded_chunk,
        "encoded_codec": placement.encoded_codec,
        "encoded_stored_bytes": placement.encoded_stored_bytes,
    }
    head = {"tree": placement.tree.raw, "chunks": placement.n_chunks}
    return encode_table(LAYOUT, head, columns)


def decode(raw: Octets, what: str) -> Placement:
    """Read a placement; its arrays are views of `raw`. Raises InvalidImage or Unsupported.

    Whether `tree` is the one of its key, and has that many chunks, is for the caller to see.
    """
    table = decode_table(raw, LAYOUT, what)
    head, columns = table.head, table.columns
    tree, n_chunks = Digest(head.raw("tree", DIGEST_BYTES)), head.integer("chunks", 0, MAX_CHUNKS)
    head.done()
    try:
        return Placement(
            tree=tree,
            n_chunks=n_chunks,
            packs=columns["pack"],
            pack_live_bytes=columns["pack_live_bytes"],
            run_pack=columns["run_pack"],
            run_offset=columns["run_offset"],
            run_chunk=columns["run_chunk"],
            encoded_chunk=columns["encoded_chunk"],
            encoded_codec=columns["encoded_codec"],
            encoded_stored_bytes=columns["encoded_stored_bytes"],
        )
    except InvalidInput as error:
        raise InvalidImage(f"{what}: {error}") from None
    except Unsupported as error:
        raise Unsupported(f"{what}: {error}") from None


def locate(placement: Placement, plain_bytes: Array, page_bytes: int) -> ChunkLocations:
    """Where each chunk lies, given the plain length of each chunk of the tree.

    Raises InvalidImage if the placement is not of a tree with these chunks, or names a place that
    no pack has.
    """
    what, n_chunks = f"placement of tree {placement.tree.short}", placement.n_chunks
    if len(plain_bytes) != n_chunks:
        raise InvalidImage(f"{what} is for {n_chunks} chunks, the tree has {len(plain_bytes)}")
    codec = np.zeros(n_chunks, "u1")
    codec[placement.encoded_chunk] = placement.encoded_codec
    stored_bytes = plain_bytes.astype("u4")
    stored_bytes[placement.encoded_chunk] = placement.encoded_stored_bytes
    if not n_chunks:
        return ChunkLocations(np.zeros(0, "u4"), np.zeros(0, "u8"), stored_bytes, codec)
    raw, first, begin = codec == RAW, placement.run_chunk, placement.run_offset
    if int(begin.min()) < page_bytes or (begin[raw[first]] & np.uint32(page_bytes - 1)).any():
        raise InvalidImage(f"{what} has a run in a pack's header or off the page boundary")
    offset = run_offsets(first, begin, stored_bytes, raw, page_bytes)
    last = np.append(first[1:], np.uint32(n_chunks)) - np.uint32(1)
    if not within(offset[last] + stored_bytes[last], 0, MAX_PACK_BYTES):
        raise InvalidImage(f"{what} has a run that ends beyond {MAX_PACK_BYTES} bytes")
    run_lengths = np.diff(first, append=np.uint32(n_chunks))
    return ChunkLocations(np.repeat(placement.run_pack, run_lengths), offset, stored_bytes, codec)


def build(
    tree: Digest,
    chunk_pack_names: U1,
    chunk_pack: Array,
    chunk_offset: Array,
    chunk_stored_bytes: Array,
    chunk_codec: Array,
    chunk_digest: U1,
    page_bytes: int,
) -> Placement:
    """The placement of a tree from where each of its chunks lies: packs sorted, runs maximal.

    `chunk_pack` holds indices into `chunk_pack_names`, which may have any order and names that are
    not used. Chunks with equal digests in one pack count once as live.
    """
    packs, pack = _used_packs(chunk_pack_names, chunk_pack)
    encoded_chunk = np.flatnonzero(chunk_codec)
    starts_run = np.ones(len(pack), bool)
    if len(pack):
        mask, is_raw = np.uint64(page_bytes - 1), chunk_codec[1:] == RAW
        end = chunk_offset[:-1].astype("u8")  # where the next chunk of a run begins
        end += chunk_stored_bytes[:-1]
        np.add(end, mask, out=end, where=is_raw)
        np.bitwise_and(end, ~mask, out=end, where=is_raw)
        starts_run[1:] = (end != chunk_offset[1:]) | (pack[1:] != pack[:-1])
    run_chunk = np.flatnonzero(starts_run)
    live_bytes = np.zeros(len(packs), "u8")
    for some in _by_digest(chunk_digest):
        once = some[_first_of_each(pack[some], chunk_digest[some])]
        found = np.bincount(pack[once], weights=chunk_stored_bytes[once], minlength=len(packs))
        live_bytes += found.astype("u8")
    return Placement(
        tree=tree,
        n_chunks=len(pack),
        packs=packs,
        pack_live_bytes=live_bytes,
        run_pack=pack[run_chunk],
        run_offset=chunk_offset[run_chunk].astype("u4"),
        run_chunk=run_chunk.astype("u4"),
        encoded_chunk=encoded_chunk.astype("u4"),
        encoded_codec=chunk_codec[encoded_chunk].astype("u1"),
        encoded_stored_bytes=chunk_stored_bytes[encoded_chunk].astype("u4"),
    )


def _used_packs(names: U1, chunk_pack: Array) -> tuple[U1, U4]:
    """The names of the packs that hold chunks, ascending, and each chunk's index into them."""
    used = np.flatnonzero(np.bincount(chunk_pack, minlength=len(names)))
    packs, position = np.unique(names[used], axis=0, return_inverse=True)
    to_new = np.zeros(len(names), "u4")
    to_new[used] = position.reshape(-1)
    return packs, to_new[chunk_pack]


def _by_digest(digests: U1) -> Iterator[npt.NDArray[np.intp]]:
    """Numbers of all chunks, in parts that have no digest in common, to save memory."""
    n_parts = min(256, 1 + len(digests) // _CHUNKS_AT_ONCE)
    part = (np.arange(256) * n_parts // 256).astype("u1")[digests[:, 0]]
    return (np.flatnonzero(part == number) for number in range(n_parts))


def _first_of_each(pack: U4, digests: U1) -> npt.NDArray[np.intp]:
    """Numbers of the chunks that are the first of their digest in their pack."""
    words = np.ascontiguousarray(digests).view("u8")
    keys = (words[:, 0], words[:, 1], words[:, 2], words[:, 3], pack)
    for sorted_by in (keys[:1], keys):  # the first is much faster, and all but always does
        order = np.lexsort(sorted_by)
        key = sorted_by[0][order]
        alike = np.flatnonzero(key[1:] == key[:-1])
        earlier, later = order[alike], order[alike + 1]
        same = np.logical_and.reduce([part[earlier] == part[later] for part in keys])
        if same.all():
            break
    is_first = np.ones(len(pack), bool)
    is_first[later[same]] = False
    return np.flatnonzero(is_first)
