"""The chunking benchmark at a tiny size, and its dedup targets on the real snapshots."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_chunking import (
    TARGETS_MB,
    inputs,
    measure_dedup,
    measure_speed,
)
from benchmarks.report import Report, Samples, machine
from benchmarks.snapshots import (
    PAGE,
    REPLICAS,
    cuts,
    make_half_shared,
    make_process_like,
    make_replica,
    make_snapshot,
    mapped,
    unpack_replicas,
)
from imgfmt.chunking import Profile

MIB = 1024 * 1024


def new_report(folder: Path) -> Report:
    return Report("tiny", machine(folder))


def test_every_kind_of_data_gets_a_rate_beside_the_limits(tmp_path: Path) -> None:
    report = new_report(tmp_path)
    measure_speed(2 * MIB, 2, report)
    assert [row.case for row in report.rows] == [
        "cut, random",
        "cut, 30 % zero pages, scattered",
        "cut, 30 % zero pages, in runs of 64",
        "cut, all zero",
        "limit: BLAKE3",
        "limit: memory copy",
    ]
    for row in report.rows:
        rate = row.values["gb_per_cpu_s"]
        assert isinstance(rate, Samples)
        assert len(rate.values) == 2
        assert min(rate.values) > 0


def test_the_inputs_have_the_zero_pages_they_promise() -> None:
    data = inputs(8 * MIB)
    pages = {name: np.frombuffer(view, np.uint8).reshape(-1, PAGE) for name, view in data.items()}
    n_pages = {name: int(found.any(axis=1).sum()) for name, found in pages.items()}
    assert n_pages["random"] == 2048
    assert n_pages["30 % zero pages, scattered"] == pytest.approx(0.7 * 2048, abs=150)
    assert n_pages["30 % zero pages, in runs of 64"] == pytest.approx(0.7 * 2048, abs=800)
    assert n_pages["all zero"] == 0


def test_page_cdc_finds_shifted_data_and_fixed_offsets_do_not(tmp_path: Path) -> None:
    first = make_snapshot(tmp_path / "first", 32 * MIB)
    second = make_half_shared(tmp_path / "second", first)
    found = measure_dedup([first, second], {}, new_report(tmp_path))
    added = {name: new_bytes[1] / (32 * MIB) for name, new_bytes in found.items()}
    assert added["single pages (the bound)"] == pytest.approx(0.5, abs=0.01)
    assert 0.5 <= added["page-CDC"] < 0.65
    assert added["fixed 64 KiB"] > 0.99
    assert added["fixed 1 MiB"] > 0.99


def test_a_replica_has_the_share_of_new_chunks_that_was_asked_for(tmp_path: Path) -> None:
    first = make_process_like(tmp_path / "first", 64 * MIB)
    replica = make_replica(tmp_path / "replica", first, 0.25)
    found = measure_dedup([first, replica], {}, new_report(tmp_path))
    whole, added = found["page-CDC"]
    assert added / whole == pytest.approx(0.25, abs=0.06)
    n_chunks = len(cuts(mapped(first / "pages-1.img"), Profile()))
    n_new_pages = found["single pages (the bound)"][1] // PAGE
    assert n_new_pages == pytest.approx(n_chunks / 4, abs=1)
    assert whole / (first / "pages-1.img").stat().st_size == pytest.approx(0.59, abs=0.12)


def test_the_real_snapshots_add_no_more_than_the_targets(tmp_path: Path) -> None:
    folders = unpack_replicas(tmp_path)
    if not folders:
        pytest.skip("the shared snapshots are not there")
    report = new_report(tmp_path)
    found = measure_dedup(folders, TARGETS_MB, report)
    assert tuple(folder.name for folder in folders) == REPLICAS
    for name, new_bytes in zip(REPLICAS, found["page-CDC"], strict=True):
        assert new_bytes <= TARGETS_MB[name] * 1e6
    for bound, new_bytes in zip(found["single pages (the bound)"], found["page-CDC"], strict=True):
        assert bound <= new_bytes
    assert [row.values.get("target_mb") for row in report.rows[:4]] == [36.5, 25.0, 25.0, None]


def test_no_archive_means_no_snapshots(tmp_path: Path) -> None:
    assert unpack_replicas(tmp_path, tmp_path / "missing.tar.zst") == []
