"""Real GPU processes, frozen by the driver: their weights are in the capture, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bench_gpu_dedup import SERVERS, measure
from benchmarks.report import Report, machine
from imgfmt.errors import Unsupported
from restore.cuda_driver import CudaDriver

pytestmark = pytest.mark.gpu

WEIGHTS_MB = 200


@pytest.mark.parametrize("where", ["cuda", "torch"])
def test_frozen_replicas_share_their_weights(
    driver: CudaDriver, tmp_path: Path, where: str
) -> None:
    if where == "torch":
        pytest.importorskip("torch")
    report = Report("tiny", machine(tmp_path))
    try:
        first, replica, reordered, tuned = measure(SERVERS, tmp_path, WEIGHTS_MB, where, report)
    except Unsupported as error:
        pytest.skip(str(error))
    print(report.table())
    assert first["captured_mb"] > WEIGHTS_MB
    assert replica["bound_mb"] < first["bound_mb"] - 0.9 * WEIGHTS_MB
    if where == "torch":  # the driver alone does not place every allocation on a page boundary
        assert reordered["bound_mb"] < first["bound_mb"] - 0.9 * WEIGHTS_MB
    assert tuned["bound_mb"] > replica["bound_mb"]
