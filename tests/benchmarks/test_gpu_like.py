"""Synthetic snapshots have the statistics that they claim, at any size, from the seed alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from benchmarks.gpu_like import PAGE, PRIVATE_BYTES, ZERO_SHARES, GpuLike, Kind
from benchmarks.report import HERE

MIB = 1 << 20


def whole(snapshot: GpuLike) -> bytes:
    buffer = bytearray(snapshot.size_bytes)
    snapshot.read_into(memoryview(buffer), 0)
    return bytes(buffer)


def pages_of(data: bytes) -> set[bytes]:
    zero = bytes(PAGE)
    pages = {data[start : start + PAGE] for start in range(0, len(data), PAGE)}
    return pages - {zero}


def test_any_part_reads_as_it_does_in_the_whole() -> None:
    snapshot = GpuLike(Kind(16 * MIB, order=2))
    data = whole(snapshot)
    for offset, size_bytes in ((0, PAGE), (5 * PAGE, 300 * PAGE), (len(data) - PAGE, PAGE)):
        buffer = bytearray(size_bytes)
        snapshot.read_into(memoryview(buffer), offset)
        assert buffer == data[offset : offset + size_bytes]
    assert whole(GpuLike(Kind(16 * MIB, order=2))) == data


@pytest.mark.parametrize("model", range(1, 6))
def test_a_quarter_to_two_fifths_of_the_pages_are_zero(model: int) -> None:
    snapshot = GpuLike(Kind(32 * MIB, model=model))
    pages = np.frombuffer(whole(snapshot), np.uint8).reshape(-1, PAGE)
    n_zero = int((~pages.any(axis=1)).sum())
    assert n_zero * PAGE == snapshot.zero_bytes
    assert ZERO_SHARES[0] - 0.01 < n_zero / len(pages) < ZERO_SHARES[1] + 0.01


def test_no_page_of_data_comes_twice_and_none_can_be_compressed() -> None:
    data = whole(GpuLike(Kind(16 * MIB)))
    zero = bytes(PAGE)
    n_data = sum(data[start : start + PAGE] != zero for start in range(0, len(data), PAGE))
    assert len(pages_of(data)) == n_data
    joined = b"".join(pages_of(data))
    assert len(zstandard.compress(joined)) > 0.99 * len(joined)


def test_replicas_share_all_but_private_pages_and_other_models_only_common_ones() -> None:
    first, replica, other = (
        pages_of(whole(GpuLike(kind)))
        for kind in (Kind(64 * MIB), Kind(64 * MIB, replica=1), Kind(64 * MIB, model=2))
    )
    private_pages = common_pages = int(0.05 * 64 * MIB) // PAGE
    assert len(first - replica) == len(replica - first) == private_pages
    assert len(first & other) == common_pages


def test_weights_of_a_replica_are_shifted_by_pages() -> None:
    first, replica = (whole(GpuLike(Kind(32 * MIB, replica=n))) for n in (0, 1))
    where = {first[s : s + PAGE]: s for s in range(0, len(first), PAGE)}
    shifts = {
        start - where[page]
        for start in range(0, len(replica), PAGE)
        if (page := replica[start : start + PAGE]) in where and page != bytes(PAGE)
    }
    assert len(shifts) > 50


def test_a_large_snapshot_takes_no_more_than_its_layout() -> None:
    snapshot = GpuLike(Kind(100 << 30))
    assert snapshot.size_bytes == 100 << 30
    replica = GpuLike(Kind(100 << 30, replica=1))
    assert replica.zero_bytes == snapshot.zero_bytes
    buffer = bytearray(MIB)
    snapshot.read_into(memoryview(buffer), 70 << 30)
    assert any(buffer)
    assert PRIVATE_BYTES == 500_000_000


def test_what_is_too_small_for_its_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least"):
        Kind(MIB)


def test_one_can_be_written_for_other_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_like", str(tmp_path / "it"), "--gib", "0.01"]
    said = subprocess.check_output([*command, "--replica", "1"], text=True, cwd=HERE.parent)
    assert "zero" in said
    size_bytes = int(0.01 * (1 << 30))
    expected = whole(GpuLike(Kind(size_bytes, replica=1)))
    assert (tmp_path / "it" / "pages-1.img").read_bytes() == expected
