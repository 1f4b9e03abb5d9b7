"""Page-CDC against a model that goes page by page, as SPEC.md section 3 is written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from imgfmt.chunking import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Cuts,
    Cutter,
    PageMarks,
    Profile,
    constants,
    fingerprints,
    page_marks,
)
from imgfmt.errors import InvalidInput, Unsupported

PAGE_SIZES = (4096, 16384, 65536)
Run = tuple[int, int]

DATA, HIT, ZERO = 0, 1, 2


@dataclass(frozen=True)
class File:
    """A file as the model sees it: DATA, HIT or ZERO for each page."""

    pages: tuple[int, ...]
    page_bytes: int
    tail_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the file; its last page has `tail_bytes`."""
        return (len(self.pages) - 1) * self.page_bytes + self.tail_bytes if self.pages else 0

    def marks(self, first: int, end: int) -> PageMarks:
        kinds = np.array(self.pages[first:end], "u1")
        return PageMarks(kinds == HIT, kinds == ZERO)


def zero_runs(pages: Sequence[int]) -> list[Run]:
    """Maximal runs of zero pages: first page and number of pages."""
    runs: list[Run] = []
    for page, kind in enumerate(pages):
        if kind != ZERO:
            continue
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs


def model_holes(file: File) -> list[Run]:
    """SPEC.md section 3.2."""
    if file.size_bytes <= 65536:
        return []
    holes, n_small = [], 0
    for start, n_pages in zero_runs(file.pages):
        if n_pages >= 16:
            holes.append((start, n_pages))
        elif n_small < 8 + start // 64:
            holes.append((start, n_pages))
            n_small += 1
    return holes


def model_chunks(file: File) -> list[Run]:
    """SPEC.md section 3.3."""
    if file.size_bytes <= 65536:
        return [(0, len(file.pages))] if file.pages else []
    at_least, at_most = max(1, 65536 // file.page_bytes), 1048576 // file.page_bytes
    in_hole = {page for start, n in model_holes(file) for page in range(start, start + n)}
    chunks, start = [], None
    for page, kind in enumerate(file.pages):
        if page in in_hole:
            if start is not None:
                chunks.append((start, page - start))
            start = None
            continue
        start = page if start is None else start
        n_pages = page + 1 - start
        if n_pages == at_most or (kind == HIT and n_pages >= at_least):
            chunks.append((start, n_pages))
            start = None
    if start is not None:
        chunks.append((start, len(file.pages) - start))
    return chunks


def cut(file: File, splits: Iterable[int] = (), *, skip_zeros: bool = False) -> Cuts:
    """Feed the file in pieces that end at `splits`; with `skip_zeros` zero pieces by number."""
    cutter = Cutter(Profile(file.page_bytes), file.size_bytes)
    found = []
    first = 0
    for end in [*sorted(splits), len(file.pages)]:
        piece = file.pages[first:end]
        if skip_zeros and piece and set(piece) == {ZERO}:
            found.append(cutter.feed_zeros(len(piece)))
        else:
            found.append(cutter.feed(file.marks(first, end)))
        first = end
        certain = [run.start + run.pages for cuts in found for run in cuts.chunks + cuts.holes]
        assert max(certain, default=0) <= cutter.certain_pages <= end
    found.append(cutter.finish())
    return Cuts([r for c in found for r in c.chunks], [r for c in found for r in c.holes])


def runs_of(cuts: Cuts) -> tuple[list[Run], list[Run]]:
    return [(r.start, r.pages) for r in cuts.chunks], [(r.start, r.pages) for r in cuts.holes]


def file_of(runs: Iterable[Run], page_bytes: int = 4096, tail_bytes: int = 0) -> File:
    """A file from kinds of pages and how many of each follow."""
    pages = tuple(kind for kind, n_pages in runs for _ in range(n_pages))
    return File(pages, page_bytes, tail_bytes or page_bytes)


LENGTHS = st.integers(1, 20) | st.sampled_from([15, 16, 17, 63, 64, 65, 255, 256, 257, 300])


@st.composite
def files(draw: st.DrawFn) -> File:
    kinds = st.sampled_from([DATA, DATA, HIT, ZERO, ZERO])
    runs = draw(st.lists(st.tuples(kinds, LENGTHS), max_size=30))
    page_bytes = draw(st.sampled_from(PAGE_SIZES))
    return file_of(runs, page_bytes, draw(st.integers(1, page_bytes)))


@st.composite
def split_files(draw: st.DrawFn) -> tuple[File, list[int]]:
    file = draw(files())
    edges = [page for page, n in zero_runs(file.pages)]
    edges += [page + n for page, n in zero_runs(file.pages)]
    where = st.integers(0, len(file.pages))
    return file, draw(st.lists(where | st.sampled_from(edges) if edges else where, max_size=20))


@given(files())
def test_cuts_are_those_of_the_model(file: File) -> None:
    assert runs_of(cut(file)) == (model_chunks(file), model_holes(file))


@given(split_files(), st.booleans())
def test_cuts_do_not_depend_on_how_a_file_is_fed(case: tuple[File, list[int]], skip: bool) -> None:
    file, splits = case
    assert runs_of(cut(file, splits, skip_zeros=skip)) == (model_chunks(file), model_holes(file))


@settings(max_examples=10)
@given(files(), st.booleans())
def test_cuts_are_the_same_when_fed_page_by_page(file: File, skip: bool) -> None:
    every = range(len(file.pages))
    assert runs_of(cut(file, every, skip_zeros=skip)) == runs_of(cut(file))


@given(split_files())
def test_chunks_and_holes_cover_a_file_without_overlap(case: tuple[File, list[int]]) -> None:
    file, splits = case
    chunks, holes = runs_of(cut(file, splits))
    position = 0
    for start, n_pages in sorted(chunks + holes):
        assert start == position
        assert n_pages > 0
        position += n_pages
    assert position == len(file.pages)
    after_holes = {start for start, _ in holes} | {len(file.pages)}
    for start, n_pages in chunks:
        assert n_pages * file.page_bytes <= MAX_CHUNK_BYTES
        assert n_pages * file.page_bytes >= MIN_CHUNK_BYTES or start + n_pages in after_holes
    for start, n_pages in holes:
        assert set(file.pages[start : start + n_pages]) == {ZERO}


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 22)), min_size=12, max_size=60),
    st.integers(1, 90),
    st.integers(1, 40),
)
def test_small_holes_are_credited_as_the_model_says(
    runs: list[Run], lead: int, pages_a_feed: int
) -> None:
    pattern = [(DATA, lead)]
    for n_data, n_zeros in runs:
        pattern += [(DATA, n_data), (ZERO, n_zeros)]
    file = file_of([*pattern, (DATA, 20)])
    splits = range(pages_a_feed, len(file.pages), pages_a_feed)
    assert runs_of(cut(file, splits))[1] == model_holes(file)


def test_alternating_zero_pages_make_few_holes() -> None:
    file = file_of([(ZERO, 1), (DATA, 1)] * 8192)
    chunks, holes = runs_of(cut(file, range(0, len(file.pages), 500)))
    assert (chunks, holes) == (model_chunks(file), model_holes(file))
    assert len(holes) == 8 + (len(file.pages) - 2) // 64
    assert [start for start, _ in holes[:12]] == [0, 2, 4, 6, 8, 10, 12, 14, 64, 128, 192, 256]


def test_a_run_of_sixteen_zero_pages_is_always_a_hole_and_of_fifteen_on_credit() -> None:
    sixteen = file_of([(DATA, 1), (ZERO, 16)] * 100)
    assert len(cut(sixteen).holes) == 100
    fifteen = file_of([(DATA, 1), (ZERO, 15)] * 100)
    starts = [run.start for run in cut(fifteen).holes]
    assert starts[:8] == [1 + 16 * i for i in range(8)]
    assert starts == [start for start, _ in model_holes(fifteen)]
    assert len(starts) == 8 + (1 + 16 * 99) // 64


def test_large_holes_use_up_no_credit() -> None:
    file = file_of([(DATA, 1), (ZERO, 20)] * 3 + [(DATA, 1), (ZERO, 1)] * 9)
    assert len(cut(file).holes) == 3 + 9


def test_a_zero_page_that_is_no_hole_never_ends_a_chunk() -> None:
    marks = page_marks(bytes(4096 * 4), Profile())
    assert not marks.hits.any()
    assert marks.zeros.all()


def fed(size_bytes: int, raw: bytes, page_bytes: int = 4096) -> tuple[list[Run], list[Run]]:
    """Cut real bytes."""
    profile = Profile(page_bytes)
    assert len(raw) == size_bytes
    cutter = Cutter(profile, size_bytes)
    cuts = cutter.feed(page_marks(raw + bytes(-size_bytes % page_bytes), profile)), cutter.finish()
    return runs_of(Cuts([r for c in cuts for r in c.chunks], [r for c in cuts for r in c.holes]))


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
@pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, 65535, 65536])
@pytest.mark.parametrize("fill", [b"\0", b"x"])
def test_a_file_of_at_most_64_kib_is_one_chunk(
    page_bytes: int, size_bytes: int, fill: bytes
) -> None:
    n_pages = -(-size_bytes // page_bytes)
    expected = [(0, n_pages)] if size_bytes else []
    assert fed(size_bytes, fill * size_bytes, page_bytes) == (expected, [])


@pytest.mark.parametrize(
    ("size_bytes", "raw", "expected"),
    [
        (65537, b"x" * 65537, ([(0, 17)], [])),
        (65537, bytes(65537), ([], [(0, 17)])),
        (65537, b"x" * 65536 + b"\0", ([(0, 16)], [(16, 1)])),
        (65537, bytes(65536) + b"x", ([(16, 1)], [(0, 16)])),
        (1 << 20, b"x" * (1 << 20), ([(0, 256)], [])),
        ((1 << 20) + 1, b"x" * (1 << 20) + b"x", ([(0, 256), (256, 1)], [])),
    ],
    ids=["data", "zeros", "a short zero tail", "a short tail", "a whole chunk", "one byte more"],
)
def test_a_file_just_above_a_limit(
    size_bytes: int, raw: bytes, expected: tuple[list[Run], list[Run]]
) -> None:
    assert fed(size_bytes, raw) == expected


def test_a_file_with_more_or_fewer_pages_than_its_size_says_is_refused() -> None:
    for n_fed in (16, 18):
        cutter = Cutter(Profile(), 65537)
        cutter.feed(PageMarks.unmarked(n_fed))
        with pytest.raises(InvalidInput, match=f"{n_fed} pages were read of a file of 17"):
            cutter.finish()


def test_a_huge_hole_costs_no_memory() -> None:
    n_pages = 2**40 // 4096
    cutter = Cutter(Profile(), 2**40)
    found = [cutter.feed_zeros(n_pages - 1), cutter.feed(PageMarks.unmarked(1)), cutter.finish()]
    assert [(r.start, r.pages) for c in found for r in c.holes] == [(0, n_pages - 1)]
    assert [(r.start, r.pages) for c in found for r in c.chunks] == [(n_pages - 1, 1)]


@dataclass(frozen=True)
class Edit:
    """Pages taken out at a page, and others put in their place."""

    at: int
    removed: int
    inserted: int


def digests_of(kinds: Sequence[int], identities: Sequence[int]) -> list[tuple[int, ...]]:
    """The chunks of a file by what their pages are."""
    file = File(tuple(kinds), 4096, 4096)
    return [tuple(identities[r.start : r.start + r.pages]) for r in cut(file).chunks]


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.builds(Edit, st.integers(0, 6000), st.integers(0, 40), st.integers(0, 40)),
)
def test_only_chunks_near_an_edit_change(seed: int, edit: Edit) -> None:
    rng = np.random.default_rng(seed)
    kinds = (rng.random(6000) < 1 / 64).astype("u1").tolist()
    identities = list(range(6000))
    new = range(6000, 6000 + edit.inserted)
    after = slice(edit.at, edit.at + edit.removed)
    other_kinds, other_identities = kinds.copy(), identities.copy()
    other_kinds[after] = (rng.random(edit.inserted) < 1 / 64).astype("u1").tolist()
    other_identities[after] = new
    before_edit = digests_of(kinds, identities)
    after_edit = digests_of(other_kinds, other_identities)
    changed = set(after_edit) - set(before_edit)
    # A common cut makes all that follow common. Of 10,000 such edits none changed more than 5.
    assert len(changed) <= 8
    # The last chunk ends with the file, and so changes where something is appended.
    kept = [chunk for chunk in before_edit[:-1] if chunk and chunk[-1] < edit.at]
    assert after_edit[: len(kept)] == kept


def test_data_moved_by_whole_pages_shares_all_but_a_few_chunks() -> None:
    raw = np.random.default_rng(5).bytes(32 << 20)
    moved = np.random.default_rng(6).bytes(5 * 4096) + raw

    def names(data: bytes) -> set[bytes]:
        return {
            blake3(data[start * 4096 : (start + n) * 4096]).digest()
            for start, n in fed(len(data), data)[0]
        }

    assert len(names(raw)) > 100
    assert len(names(moved) - names(raw)) <= 3


def test_the_mean_chunk_of_random_data_is_about_260_kib() -> None:
    raw = np.random.default_rng(5).bytes(64 << 20)
    n_chunks = len(fed(len(raw), raw)[0])
    assert 220 << 10 < len(raw) / n_chunks < 310 << 10


def test_constants_are_derived_as_the_specification_says() -> None:
    assert constants().shape == (58,)
    for j, constant in enumerate(constants().tolist()):
        text = f"snapcask page-cdc-1 constant {j}".encode()
        assert constant == int.from_bytes(blake3(text).digest()[:8], "little") | 1
    assert constants()[0] == 0x7D8161289FDD234D
    assert constants()[57] == 0xC331DA4D227C1863


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
def test_fingerprints_are_these(page_bytes: int) -> None:
    stride = page_bytes // 4096
    pages = {
        0xC331DA4D227C1863: bytes(page_bytes),
        0xEAD98E6DAB354120: b"\xff" * page_bytes,
        0x40B33B75C2593BB0: b"\1" + bytes(page_bytes - 1),
        0x286140A851C98A10: bytes(72 * stride) + b"\1" + bytes(page_bytes - 1 - 72 * stride),
    }
    found = fingerprints(b"".join(pages.values()), Profile(page_bytes))
    assert found.tolist() == list(pages)
    mixed = {4096: 0x7F3848E3DECC7B43, 16384: 0xC056FB93C7BC7BE3, 65536: 0x0D17A8ADE06C8763}
    counting = bytes(i % 256 for i in range(page_bytes))
    assert fingerprints(counting, Profile(page_bytes))[0] == mixed[page_bytes]


@settings(max_examples=30)
@given(st.sampled_from(PAGE_SIZES), st.integers(0, 2**32 - 1))
def test_fingerprints_are_those_of_the_model(page_bytes: int, seed: int) -> None:
    block = np.random.default_rng(seed).bytes(3 * page_bytes)
    stride = 9 * page_bytes // 4096
    for page, found in enumerate(fingerprints(block, Profile(page_bytes)).tolist()):
        raw = block[page * page_bytes : (page + 1) * page_bytes]
        words = struct.unpack(f"<{page_bytes // 8}Q", raw)[::stride][:57]
        terms = [w * c for w, c in zip(words, constants().tolist(), strict=False)]
        assert found == (constants()[57].item() + sum(terms)) % 2**64


@pytest.mark.parametrize("page_bytes", PAGE_SIZES)
@pytest.mark.parametrize("n_runs", [3, 100])
def test_marks_tell_zero_pages_from_those_that_only_look_so(page_bytes: int, n_runs: int) -> None:
    """Byte 8 lies in a word that is not sampled."""
    zero, looks_zero = bytes(page_bytes), bytes(8) + b"\1" + bytes(page_bytes - 9)
    noise = np.random.default_rng(1).bytes(page_bytes)
    block = (noise + zero + looks_zero + zero) * n_runs
    marks = page_marks(block, Profile(page_bytes))
    assert marks.zeros.tolist() == [False, True, False, True] * n_runs
    assert not (marks.zeros & marks.hits).any()


@pytest.mark.parametrize(("page_bytes", "bits"), [(4096, 6), (16384, 4), (65536, 2)])
def test_a_page_hits_when_the_top_bits_of_its_fingerprint_are_zero(
    page_bytes: int, bits: int
) -> None:
    block = np.random.default_rng(2).bytes(400 * page_bytes)
    profile = Profile(page_bytes)
    prints = fingerprints(block, profile).tolist()
    assert page_marks(block, profile).hits.tolist() == [p >> (64 - bits) == 0 for p in prints]
    assert any(p >> (64 - bits) == 0 for p in prints)


def test_marks_do_not_depend_on_how_pages_lie_in_memory() -> None:
    block = np.random.default_rng(3).bytes(64 * 4096)
    whole = page_marks(block, Profile())
    odd = memoryview(b"x" + block)[1:]
    assert page_marks(odd, Profile()).hits.tolist() == whole.hits.tolist()
    parts = [page_marks(block[i : i + 4096], Profile()).hits[0] for i in range(0, len(block), 4096)]
    assert parts == whole.hits.tolist()


def test_a_block_that_is_not_whole_pages_is_refused() -> None:
    with pytest.raises(InvalidInput, match="4097 bytes is not whole pages"):
        page_marks(bytes(4097), Profile())
    assert len(page_marks(b"", Profile()).hits) == 0


def test_a_profile_that_is_not_known_is_refused() -> None:
    with pytest.raises(Unsupported, match="'page-cdc-2' is not known"):
        Profile(name="page-cdc-2")
    with pytest.raises(InvalidInput, match="page size 8192"):
        Profile(8192)
