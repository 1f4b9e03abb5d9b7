"""What dedup would find agrees with what a push finds, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_push import push_once
from benchmarks.snapshots import make_half_shared, make_process_like, make_snapshot
from imgfmt.chunking import HOLE_PAGES
from imgfmt.errors import InvalidInput
from transfer.config import MIB
from transfer.dedup import (
    BLOCK_BYTES,
    BOUND,
    LEAD_BYTES,
    PAGE,
    PAGE_CDC,
    WAYS,
    Sample,
    ScaledProfile,
    Study,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two directories that share; files are longer than two blocks, and not whole pages."""
    folder = tmp_path_factory.mktemp("dedup")
    first = make_process_like(folder / "first", 40 * MIB)
    with (first / "pages-1.img").open("ab") as file:
        file.write(b"short end")
    (first / "small.img").write_bytes(b"small")
    (first / "empty.img").write_bytes(b"")
    return first, make_half_shared(folder / "second", first)


def test_page_cdc_finds_what_a_push_finds(pair: tuple[Path, Path], tmp_path: Path) -> None:
    study = Study()
    for directory in pair:
        found = study.add(directory)
        pushed = push_once(tmp_path / "store", directory)
        counts = pushed.counts
        of_way = found.by_way[PAGE_CDC.name]
        assert (of_way.new_bytes, of_way.n_new) == (counts.new_bytes, counts.new_chunks)
        assert of_way.n_chunks == counts.chunks
        assert found.logical_bytes == pushed.logical_bytes


def test_a_chunk_that_spans_two_blocks_is_found_again(tmp_path: Path) -> None:
    data = np.random.default_rng(4).bytes(BLOCK_BYTES + 4 * MIB)
    study = Study()
    for name, shift in (("first", b""), ("second", b"x" * PAGE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pages.img").write_bytes(shift + data)
        found = study.add(tmp_path / name)
    assert found.by_way[PAGE_CDC.name].n_new == 1


def test_no_way_finds_more_than_single_pages(pair: tuple[Path, Path]) -> None:
    study = Study()
    for directory in pair:
        found = study.add(directory).by_way
        assert all(found[BOUND.name].new_bytes <= found[way.name].new_bytes for way in WAYS)


def test_zero_bytes_are_those_of_whole_zero_pages(tmp_path: Path) -> None:
    (tmp_path / "a.img").write_bytes(bytes(3 * PAGE) + b"x" * PAGE + bytes(10))
    found = Study().add(tmp_path)
    assert found.zero_bytes == 3 * PAGE + 10
    assert found.by_way[BOUND.name].new_bytes == PAGE


def test_longer_chunks_are_fewer(tmp_path: Path) -> None:
    found = Study().add(make_snapshot(tmp_path / "random", 40 * MIB)).by_way
    n_chunks = [found[f"page-CDC{name}"].n_chunks for name in (", a quarter", "", ", four times")]
    assert n_chunks[0] > 2 * n_chunks[1] > 4 * n_chunks[2]


def test_what_is_kept_of_earlier_blocks_holds_the_longest_open_chunk() -> None:
    longest = max(way.scale for way in WAYS if way.scale is not None)
    profile = ScaledProfile(scale=longest)
    assert (profile.max_pages + HOLE_PAGES) * PAGE <= LEAD_BYTES
    assert all(BLOCK_BYTES % (way.step_pages * PAGE) == 0 for way in WAYS if way.step_pages)


def test_a_sample_is_bounded_and_estimates_what_it_left_out() -> None:
    sample = Sample(max_kept=4096)
    rng = np.random.default_rng(3)
    digests = [rng.bytes(32) for _ in range(100_000)]
    new = sum(sample.weight(digest) for digest in digests)
    assert new == pytest.approx(100_000, rel=0.05)
    assert sample.shift >= 4
    assert len(sample._seen) < 4096
    assert not any(sample.weight(digest) for digest in digests)


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"data")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "link").symlink_to(tmp_path / "target")
    assert Study().add(tmp_path / "directory").logical_bytes == 0


def test_a_file_that_shrinks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.img").write_bytes(b"data")
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(InvalidInput, match=r"a\.img became shorter"):
        Study().add(tmp_path)
