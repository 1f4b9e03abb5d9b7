"""The metadata benchmark at a small size: what each part of a push costs for a chunk."""

from pathlib import Path

import pytest

from benchmarks.bench_metadata import Metadata, measure_real, measure_synthetic
from benchmarks.report import Report, machine

MIB = 1024 * 1024
PACK_FRAME_BYTES = 3 * 4096
"""Header, and what fills the pages of table and footer, of one pack."""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Metadata:
    folder = tmp_path_factory.mktemp("metadata")
    report = Report("tiny", machine(folder))
    first, replica = measure_synthetic(folder, 200 * MIB, 64 * MIB, report)
    assert first.n_new == first.n_chunks == replica.n_chunks
    assert [row.values.get("target_b") for row in report.rows] == [None, 60]
    return replica


def test_a_replica_has_new_chunks_as_gpu_processes_do(replica: Metadata) -> None:
    assert 300 < replica.n_chunks < 1000
    assert replica.n_new / replica.n_chunks == pytest.approx(0.26, abs=0.02)


def test_a_tree_costs_a_digest_and_little_more_for_a_chunk(replica: Metadata) -> None:
    assert 33 * replica.n_chunks < replica.part_bytes["trees"] < 42 * replica.n_chunks


def test_a_placement_costs_a_run_where_new_chunks_begin_and_end(replica: Metadata) -> None:
    assert 0 < replica.part_bytes["placements"] < 6 * replica.n_chunks


def test_only_new_chunks_are_in_tables_and_index(replica: Metadata) -> None:
    assert replica.part_bytes["index"] < 14 * replica.n_new + 300
    assert replica.part_bytes["packs"] < 37 * replica.n_new + PACK_FRAME_BYTES


def test_a_replica_costs_sixty_bytes_a_chunk_and_the_frame_of_a_pack(replica: Metadata) -> None:
    assert replica.written_bytes <= 60 * replica.n_chunks + PACK_FRAME_BYTES
    assert replica.kept_bytes <= replica.written_bytes


def test_the_real_snapshots_are_reported(tmp_path: Path) -> None:
    report = Report("tiny", machine(tmp_path))
    found = measure_real(tmp_path, 64 * MIB, report)
    if not found:
        pytest.skip("the shared snapshots are not there")
    assert [row.case for row in report.rows] == ["x-replica-0", "x-replica-1", "y-replica-0"]
    assert all(result.written_bytes < 100_000 for result in found)
