"""The GPU dedup benchmark without a GPU: plain processes, and the freezing on a fake driver."""

from __future__ import annotations

import json
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_gpu_dedup, report
from benchmarks.bench_gpu_dedup import SERVERS, freeze, holds, main, weights
from imgfmt.errors import Unsupported
from restore.driver import DeviceFailed

WEIGHTS_MB = 24


def test_replicas_add_little_and_a_fine_tune_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report.Report.write, "__defaults__", (tmp_path / "out",))
    main(["--host-only", "--weights-mb", str(WEIGHTS_MB), "--folder", str(tmp_path)])
    document = json.loads((tmp_path / "out/bench_gpu_dedup.json").read_text())
    *rows, of_all = document["rows"]
    assert [row["case"] for row in rows] == [server.name for server in SERVERS]
    first, replica, reordered, tuned = rows
    for row in rows:
        assert row["captured_mb"] > WEIGHTS_MB
        assert row["bound_mb"] <= row["new_mb"] + 0.1  # of the store also small files
    assert first["new_mb"] > WEIGHTS_MB
    assert replica["new_mb"] < first["new_mb"] - 0.8 * WEIGHTS_MB
    assert reordered["bound_mb"] < first["bound_mb"] - 0.9 * WEIGHTS_MB
    assert tuned["bound_mb"] - replica["bound_mb"] == pytest.approx(WEIGHTS_MB / 4, rel=0.5)
    assert of_all["weights_mb"] == WEIGHTS_MB
    assert "nothing is frozen" in of_all["note"]
    assert "fixed_1_mib_mb" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_weights_depend_on_the_tensor_and_the_fine_tune_alone() -> None:
    first, replica, reordered, tuned = SERVERS
    assert np.array_equal(weights(0, first, 1), weights(0, reordered, 1))
    assert np.array_equal(weights(15, first, 1), weights(15, tuned, 1))
    assert not np.array_equal(weights(0, replica, 1), weights(0, tuned, 1))
    assert not np.array_equal(weights(0, first, 1), weights(1, first, 1))


def test_a_capture_without_the_weights_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = weights(15, SERVERS[0], 1)
    (tmp_path / "pages-1.img").touch()
    (tmp_path / "pages-2.img").write_bytes(b"x" * 4096 + halves.tobytes())
    assert holds(tmp_path, halves)
    (tmp_path / "pages-2.img").write_bytes(b"x" * 4096)
    assert not holds(tmp_path, halves)
    monkeypatch.setattr(bench_gpu_dedup, "holds", lambda folder, halves: False)
    with pytest.raises(RuntimeError, match="has not the weights"):
        main(["--host-only", "--weights-mb", "1", "--folder", str(tmp_path)])


class State(IntEnum):
    """As `CUprocessState`."""

    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2


class Arguments:
    timeoutMs = 0


class FakeCuda:
    """What of `cuda.bindings.driver` freezes a process. `fails` returns an error."""

    CUcheckpointLockArgs = Arguments
    CUprocessState = State

    def __init__(self, fails: str = "", stays: State | None = None) -> None:
        self.fails = fails
        self.stays = stays
        self.state = State.CU_PROCESS_STATE_RUNNING
        self.timeout_ms = 0

    def _done(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (999 if name == self.fails else 0, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._done("cuInit")

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_UNKNOWN"

    def cuCheckpointProcessLock(self, pid: int, arguments: Arguments) -> tuple[Any, ...]:
        assert self.state is State.CU_PROCESS_STATE_RUNNING
        self.timeout_ms = arguments.timeoutMs
        if self.fails != "lock":
            self.state = State.CU_PROCESS_STATE_LOCKED
        return self._done("lock")

    def cuCheckpointProcessCheckpoint(self, pid: int, arguments: None) -> tuple[Any, ...]:
        assert self.state is State.CU_PROCESS_STATE_LOCKED
        if self.fails != "checkpoint":
            self.state = self.stays or State.CU_PROCESS_STATE_CHECKPOINTED
        return self._done("checkpoint")

    def cuCheckpointProcessUnlock(self, pid: int, arguments: None) -> tuple[Any, ...]:
        assert self.state is State.CU_PROCESS_STATE_LOCKED
        self.state = State.CU_PROCESS_STATE_RUNNING
        return self._done("unlock")

    def cuCheckpointProcessGetState(self, pid: int) -> tuple[Any, ...]:
        return self._done("state", self.state)


def test_a_process_is_locked_with_a_limit_of_time_and_frozen() -> None:
    cuda = FakeCuda()
    freeze(1, cuda)
    assert cuda.state is State.CU_PROCESS_STATE_CHECKPOINTED
    assert cuda.timeout_ms > 0


@pytest.mark.parametrize("fails", ["cuInit", "lock", "checkpoint"])
def test_a_process_that_can_not_be_frozen_runs_on(fails: str) -> None:
    cuda = FakeCuda(fails)
    with pytest.raises(DeviceFailed, match=r"CUDA_ERROR_UNKNOWN \(999\)"):
        freeze(1, cuda)
    assert cuda.state is State.CU_PROCESS_STATE_RUNNING


def test_a_process_that_only_seems_frozen_is_noticed() -> None:
    with pytest.raises(DeviceFailed, match="not frozen"):
        freeze(1, FakeCuda(stays=State.CU_PROCESS_STATE_LOCKED))


def test_a_driver_without_the_functions_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(pid: int, arguments: Arguments) -> tuple[Any, ...]:
        raise RuntimeError('Function "cuCheckpointProcessLock" not found')

    cuda = FakeCuda()
    monkeypatch.setattr(cuda, "cuCheckpointProcessLock", absent)
    with pytest.raises(Unsupported, match="can't freeze"):
        freeze(1, cuda)


def test_without_a_gpu_the_way_without_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_gpu() -> str:
        raise Unsupported("this machine shows no GPU")

    monkeypatch.setattr(bench_gpu_dedup, "device_facts", no_gpu)
    with pytest.raises(SystemExit, match=r"shows no GPU; --host-only"):
        main(["--framework", "cuda"])
