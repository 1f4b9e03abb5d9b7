"""Placements: `build` and `locate` agree with a model that goes chunk by chunk."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import placement as placements
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.pack import run_offsets
from imgfmt.placement import Placement
from imgfmt.wire import encode_table
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, REFUSALS, check_damage, joined, peak_bytes

TREE = Digest(bytes(range(32)))
PAGE = 4096


@dataclass(frozen=True)
class Chunk:
    """One chunk as it lies in a pack."""

    pack: int
    offset: int
    stored_bytes: int
    codec: int
    plain_bytes: int
    digest: bytes


@dataclass(frozen=True)
class Case:
    """Chunks of a tree in order, and the names of the packs they lie in."""

    names: list[bytes]
    chunks: list[Chunk]
    page_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees that take stretches of chunks out of packs, some chunks twice, some packs never."""
    page_bytes = draw(st.sampled_from([4096, 16384, 65536]))
    names = draw(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=4, unique=True))
    row = st.tuples(st.integers(1, 12_000), st.booleans())
    packs = []
    for pack in range(len(names)):
        end, chunks = page_bytes, []
        for number, (stored_bytes, raw) in enumerate(draw(st.lists(row, min_size=1, max_size=12))):
            begin = -(-end // page_bytes) * page_bytes if raw else end
            end = begin + stored_bytes
            plain_bytes = stored_bytes if raw else stored_bytes + 5
            digest = digest_of(bytes([pack if number % 3 else 0, number])).raw
            chunks.append(Chunk(pack, begin, stored_bytes, int(not raw), plain_bytes, digest))
        packs.append(chunks)
    tree = []
    for _ in range(draw(st.integers(0, 5))):
        chunks = draw(st.sampled_from(packs))
        first = draw(st.integers(0, len(chunks) - 1))
        tree += chunks[first : first + draw(st.integers(1, len(chunks)))]
    return Case(names, tree, page_bytes)


def build(case: Case) -> Placement:
    def column(field: str, dtype: str) -> Any:
        return np.array([getattr(chunk, field) for chunk in case.chunks], dtype)

    digests = b"".join(chunk.digest for chunk in case.chunks)
    return placements.build(
        TREE,
        np.frombuffer(b"".join(case.names), "u1").reshape(-1, 16),
        column("pack", "u4"),
        column("offset", "u4"),
        column("stored_bytes", "u4"),
        column("codec", "u1"),
        np.frombuffer(digests, "u1").reshape(-1, 32),
        case.page_bytes,
    )


def plain_bytes_of(case: Case) -> Any:
    return np.array([chunk.plain_bytes for chunk in case.chunks], "u4")


def follows(chunk: Chunk, before: Chunk, page_bytes: int) -> bool:
    end = before.offset + before.stored_bytes
    if chunk.codec == 0:
        end = -(-end // page_bytes) * page_bytes
    return chunk.pack == before.pack and chunk.offset == end


def encode_columns(columns: dict[str, Any], **head: Any) -> bytes:
    head = {"tree": TREE.raw, "chunks": 6} | head
    return joined(encode_table(placements.LAYOUT, head, columns))


def good_columns() -> dict[str, Any]:
    """Six chunks in three runs in two packs, the second and fifth encoded."""
    return {
        "pack": np.array([[1] * 16, [2] * 16], "u1"),
        "pack_live_bytes": np.array([9000, 5000], "u8"),
        "run_pack": np.array([1, 0, 1], "u4"),
        "run_offset": np.array([4096, 8192, 40960], "u4"),
        "run_chunk": np.array([0, 2, 3], "u4"),
        "encoded_chunk": np.array([1, 4], "u4"),
        "encoded_codec": np.array([1, 1], "u1"),
        "encoded_stored_bytes": np.array([700, 800], "u4"),
    }


PLAIN_BYTES = np.array([4096, 8192, 5000, 4096, 4096, 100], "u4")


@given(cases())
def test_locate_finds_what_build_was_given(case: Case) -> None:
    placement = build(case)
    found = placements.locate(placement, plain_bytes_of(case), case.page_bytes)
    names = [placement.packs[pack].tobytes() for pack in found.pack]
    assert names == [case.names[chunk.pack] for chunk in case.chunks]
    assert found.offset.tolist() == [chunk.offset for chunk in case.chunks]
    assert found.stored_bytes.tolist() == [chunk.stored_bytes for chunk in case.chunks]
    assert found.codec.tolist() == [chunk.codec for chunk in case.chunks]


@given(cases())
def test_runs_are_maximal_and_packs_are_those_in_use(case: Case) -> None:
    placement, chunks = build(case), case.chunks
    starts = [
        i
        for i, chunk in enumerate(chunks)
        if i == 0 or not follows(chunk, chunks[i - 1], case.page_bytes)
    ]
    assert placement.run_chunk.tolist() == starts
    used = sorted({case.names[chunk.pack] for chunk in chunks})
    assert [name.tobytes() for name in placement.packs] == used


@given(cases())
def test_live_bytes_count_each_digest_once_in_each_pack(case: Case) -> None:
    placement = build(case)
    live: dict[bytes, dict[bytes, int]] = {}
    for chunk in case.chunks:
        live.setdefault(case.names[chunk.pack], {}).setdefault(chunk.digest, chunk.stored_bytes)
    expected = [sum(live[name.tobytes()].values()) for name in placement.packs]
    assert placement.pack_live_bytes.tolist() == expected


@given(cases(), st.randoms())
def test_the_order_of_pack_names_does_not_matter(case: Case, random: Any) -> None:
    order = list(range(len(case.names)))
    random.shuffle(order)
    names = [case.names[i] for i in order]
    chunks = [Chunk(**{**vars(c), "pack": order.index(c.pack)}) for c in case.chunks]
    other = build(Case(names, chunks, case.page_bytes))
    assert joined(placements.encode(other)) == joined(placements.encode(build(case)))


@given(cases())
def test_what_is_decoded_encodes_to_the_same_bytes(case: Case) -> None:
    raw = joined(placements.encode(build(case)))
    found = placements.decode(raw, "placement 00")
    assert joined(placements.encode(found)) == raw
    assert found.tree == TREE
    assert found.n_chunks == len(case.chunks)


def test_chunks_whose_digests_begin_alike_are_told_apart() -> None:
    digests = [bytes(8) + bytes([tail] * 24) for tail in (1, 2, 1, 2)]
    case = Case(
        [bytes(16)],
        [Chunk(0, 4096 * (i + 1), 10 + i, 0, 10 + i, digest) for i, digest in enumerate(digests)],
        PAGE,
    )
    assert build(case).pack_live_bytes.tolist() == [10 + 11]


def test_damage_is_refused_or_is_canonical_and_never_leads_out_of_a_pack() -> None:
    def decode(copy: bytes) -> Placement:
        found = placements.decode(copy, "placement 00")
        try:
            located = placements.locate(found, PLAIN_BYTES, PAGE)
        except REFUSALS:
            return found
        ends = located.offset + located.stored_bytes
        assert located.offset.min() >= PAGE
        assert ends.max() < 2**32
        assert located.pack.max() < len(found.packs)
        assert not (located.offset[located.codec == 0] % PAGE).any()
        return found

    assert check_damage(encode_columns(good_columns()), decode, placements.encode) > 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pack": [[2] * 16, [1] * 16]}, "the packs do not ascend"),
        ({"pack": [[1] * 16, [1] * 16]}, "the packs do not ascend"),
        ({"pack": [[1] * 16, [1] * 15 + [0]]}, "the packs do not ascend"),
        ({"pack": [[2] * 8 + [1] * 8, [1] * 8 + [2] * 8]}, "the packs do not ascend"),
        ({"pack": [[1] * 16, [2] * 16, [3] * 16]}, "differ in length"),
        (
            {"pack": [[1] * 16, [2] * 16, [3] * 16], "pack_live_bytes": [1, 1, 1]},
            "in which no chunk lies",
        ),
        ({"pack_live_bytes": [0, 1]}, "pack_live_bytes is not from 1"),
        ({"pack_live_bytes": [1, 2**32]}, "pack_live_bytes is not from 1"),
        ({"run_pack": [1, 0]}, "columns of runs differ in length"),
        ({"run_offset": [4096]}, "columns of runs differ in length"),
        ({"run_pack": [1, 0, 2]}, "pack that is not listed"),
        ({"run_chunk": [1, 2, 3]}, "do not begin with chunk 0"),
        ({"run_chunk": [], "run_pack": [], "run_offset": []}, "do not begin with chunk 0"),
        ({"run_chunk": [0, 3, 3]}, "runs do not ascend"),
        ({"run_chunk": [0, 3, 2]}, "runs do not ascend"),
        ({"run_chunk": [0, 2, 6]}, "beyond the last chunk"),
        ({"encoded_chunk": [1]}, "differ in length"),
        ({"encoded_codec": [1]}, "differ in length"),
        ({"encoded_stored_bytes": [1]}, "differ in length"),
        ({"encoded_chunk": [4, 4]}, "do not ascend"),
        ({"encoded_chunk": [1, 6]}, "beyond the last chunk"),
        ({"encoded_codec": [1, 0]}, "a raw chunk is among"),
        ({"encoded_stored_bytes": [0, 1]}, "encoded_stored_bytes is not from 1"),
        ({"encoded_stored_bytes": [1, (16 << 20) + 1]}, "encoded_stored_bytes is not from 1"),
    ],
)
def test_a_placement_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    columns = good_columns()
    columns |= {key: np.array(value, columns[key].dtype) for key, value in change.items()}
    with pytest.raises(InvalidImage, match=f"^placement 00: .*{message}"):
        placements.decode(encode_columns(columns), "placement 00")


def test_a_tree_without_chunks_has_a_placement_without_runs() -> None:
    placement = build(Case([bytes(16)], [], PAGE))
    assert len(placement.packs) == len(placement.run_chunk) == 0
    found = placements.locate(placement, np.zeros(0, "u4"), PAGE)
    assert len(found.pack) == len(found.offset) == len(found.codec) == 0
    with pytest.raises(InvalidImage, match="do not begin with chunk 0"):
        placements.decode(encode_columns(good_columns(), chunks=0), "placement 00")


def test_a_codec_that_is_not_known_is_unsupported() -> None:
    columns = good_columns() | {"encoded_codec": np.array([1, 3], "u1")}
    with pytest.raises(Unsupported, match="placement 00: codec 3 is not known"):
        placements.decode(encode_columns(columns), "placement 00")


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"chunks": 2**32}, "'chunks' is not an integer from 0"),
        ({"tree": b"short"}, "'tree' is not a binary string of 32 bytes"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_head_that_breaks_a_rule_is_refused(head: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidImage, match=message):
        placements.decode(encode_columns(good_columns(), **head), "placement 00")


def test_a_placement_for_another_number_of_chunks_is_refused() -> None:
    placement = placements.decode(encode_columns(good_columns()), "placement 00")
    with pytest.raises(InvalidImage, match="is for 6 chunks, the tree has 5"):
        placements.locate(placement, PLAIN_BYTES[:5], PAGE)


@pytest.mark.parametrize(
    ("run_offset", "message"),
    [
        ([0, 8192, 40960], "in a pack's header"),
        ([4096, 8193, 40960], "off the page boundary"),
        ([4096, 2**32 - 4096, 40960], "ends beyond"),
    ],
)
def test_a_run_at_an_impossible_place_is_refused(run_offset: list[int], message: str) -> None:
    columns = good_columns() | {"run_offset": np.array(run_offset, "u4")}
    placement = placements.decode(encode_columns(columns), "placement 00")
    with pytest.raises(InvalidImage, match=message):
        placements.locate(placement, PLAIN_BYTES, PAGE)


def test_an_encoded_run_may_begin_anywhere() -> None:
    columns = good_columns() | {"encoded_chunk": np.array([1, 3], "u4")}
    columns["run_offset"] = np.array([4096, 8192, 40961], "u4")
    placement = placements.decode(encode_columns(columns), "placement 00")
    found = placements.locate(placement, PLAIN_BYTES, PAGE)
    assert found.offset.tolist() == [4096, 8192, 8192, 40961, 45056, 49152]


def test_packs_whose_names_begin_alike_ascend_by_the_rest() -> None:
    columns = good_columns() | {"pack": np.array([[9] * 15 + [1], [9] * 15 + [200]], "u1")}
    assert len(placements.decode(encode_columns(columns), "placement 00").packs) == 2


def test_a_claim_of_many_chunks_costs_nothing() -> None:
    raw = encode_columns(good_columns(), chunks=2**32 - 1)
    assert placements.decode(raw, "placement 00").n_chunks == 2**32 - 1
    assert peak_bytes(lambda: placements.decode(raw, "placement 00")) < 1 << 20


def test_a_placement_of_many_runs_costs_at_most_four_times_its_size() -> None:
    n_runs = 400_000
    columns = good_columns() | {
        "run_pack": np.arange(n_runs, dtype="u4") % 2,
        "run_offset": np.full(n_runs, 4096, "u4"),
        "run_chunk": np.arange(n_runs, dtype="u4"),
        "encoded_chunk": np.arange(n_runs, dtype="u4"),
        "encoded_codec": np.ones(n_runs, "u1"),
        "encoded_stored_bytes": np.ones(n_runs, "u4"),
    }
    raw = encode_columns(columns, chunks=n_runs)
    peak = peak_bytes(lambda: placements.decode(raw, "placement 00"))
    assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES


def test_arrays_that_no_writer_may_make_are_refused() -> None:
    none = np.zeros(0, "u4")
    with pytest.raises(InvalidInput, match="4294967296 chunks"):
        Placement(TREE, 2**32, np.zeros((0, 16), "u1"), none, none, none, none, none, none, none)


@pytest.mark.parametrize("encoded_share", [0.0, 0.5, 1.0])
def test_a_million_chunks_are_located_without_a_loop(encoded_share: float) -> None:
    n_chunks, in_pack = 1_000_000, 250
    stored_bytes = np.full(n_chunks, 8192, "u4")
    codec = (np.random.default_rng(1).random(n_chunks) < encoded_share).astype("u1")
    first = np.arange(0, n_chunks, in_pack)
    offsets = run_offsets(first, np.full(len(first), PAGE), stored_bytes, codec == 0, PAGE)
    names = np.arange(2 * len(first), dtype="u8").view("u1").reshape(-1, 16)
    digests = np.arange(4 * n_chunks, dtype="u8").view("u1").reshape(-1, 32)
    pack = np.arange(n_chunks) // in_pack
    placement = placements.build(TREE, names, pack, offsets, stored_bytes, codec, digests, PAGE)
    began_s = time.process_time()
    found = placements.locate(placement, stored_bytes, PAGE)
    assert time.process_time() - began_s < 1  # CPU takes 0.03 s; in a loop more than 1 s
    assert np.array_equal(found.offset, offsets)
    assert len(placement.run_chunk) == len(first)
