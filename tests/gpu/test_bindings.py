"""The calls that loading makes, through the real `cuda-bindings` to a stand-in for the libraries.

No GPU is needed, but snapcask[gpu] and a C compiler. What a fake module would believe, the bindings
do not: names, types and numbers of arguments, and what they return.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from restore.cuda_hasher import _cache_path, _keep
from tests.restore.test_hash_kernel import compiled_for_the_cpu

HERE = Path(__file__).parent


def _has_cufile() -> bool:
    """Whether NVIDIA's wheel of cuFile is installed, which the bindings find before a stand-in."""
    try:
        return bool(version("nvidia-cufile"))
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(_has_cufile(), reason="the real cuFile is found before a stand-in"),
    pytest.mark.skipif(not find_spec("cuda"), reason="needs snapcask[gpu]"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]


def tells_counts() -> bool:
    """Whether the bindings that are installed tell what cuFile read."""
    release = tuple(int(part) for part in version("cuda-bindings").split(".")[:3])
    return release >= (13, 1) or (12, 9, 5) <= release < (13,)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins, the hash kernel compiled for the CPU, and a cache of kernels.

    What is in the cache is not looked at, but keeps NVRTC away, which wants the real libcuda.
    """
    folder = tmp_path_factory.mktemp("libraries")
    compiled_for_the_cpu(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        _keep(_cache_path("sm_90"), b"kernel")
    for source, library in (("cuda", "libcuda.so.1"), ("cufile", "libcufile.so.0")):
        made = str(HERE / f"stand_in_{source}.c"), "-ldl", "-lpthread"
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / library), *made]
        subprocess.run(command, check=True)
    return folder


def run(libraries: Path, root: Path, *script: str, **environment: str) -> str:
    """What a script says that uses the stand-ins."""
    known = {
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path]),
        "STAND_IN_STATS": str(root / "stats"),
        "STAND_IN_KERNEL": str(libraries / "kernel.so"),
        "XDG_CACHE_HOME": str(libraries / "cache"),
    }
    done = subprocess.run(
        [sys.executable, *script],
        env={**os.environ, **known, **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def used(libraries: Path, root: Path, fails: str = "") -> dict[str, Any]:
    """What was found by loading and freezing."""
    script = str(HERE / "use_bindings.py"), str(root)
    found: dict[str, Any] = json.loads(run(libraries, root, *script, STAND_IN_FAILS=fails))
    return found


def test_loads_and_freezing_call_the_bindings_as_they_are(libraries: Path, tmp_path: Path) -> None:
    found = used(libraries, tmp_path)
    assert found["device"] == "Stand-in"
    assert found["image"]
    assert found["directory"]
    assert found["gpudirect"]
    assert found["by the device"]
    assert found["device_checked_bytes"] > 8 << 20
    if tells_counts():
        assert found["why_not_direct"] == ""
        assert found["gpudirect_bytes"] > 8 << 20
    else:
        assert "does not tell what cuFile read" in found["why_not_direct"]
        assert found["gpudirect_bytes"] == 0
    refused, after_refusal, lock_ms, state = found["freezing"]
    assert "can't be frozen: CUDA_ERROR_STAND_IN (401)" in refused
    assert (after_refusal, state) == (0, 2)  # running, frozen
    assert lock_ms > 0
    assert (found["left"], found["left_files"]) == (0, 0)


@pytest.mark.parametrize("fails", ["1", "-4"])  # a trial, a read of the load
def test_an_error_of_cufile_is_seen_however_it_is_told(
    libraries: Path, tmp_path: Path, fails: str
) -> None:
    found = used(libraries, tmp_path, fails)
    assert bool(found["why_not_direct"]) is (fails == "1" or not tells_counts())
    assert found["gpudirect"]
    assert (found["left"], found["left_files"]) == (0, 0)


def test_a_cufile_that_does_not_start_is_told(libraries: Path, tmp_path: Path) -> None:
    found = used(libraries, tmp_path, fails="open")
    assert "cuFile does not start" in found["why_not_direct"]
    assert "5001" in found["why_not_direct"]
    assert found["gpudirect"]
    assert found["gpudirect_bytes"] == 0
    assert (found["left"], found["left_files"]) == (0, 0)


def test_the_dedup_benchmark_runs_from_its_options_to_its_report(
    libraries: Path, tmp_path: Path
) -> None:
    script = str(HERE.parents[1] / "benchmarks/bench_gpu_dedup.py")
    options = "--framework", "cuda", "--weights-mb", "24", "--folder", str(tmp_path)
    run(libraries, tmp_path, script, *options, BENCH_OUT=str(tmp_path / "out"))
    document = json.loads((tmp_path / "out/bench_gpu_dedup.json").read_text())
    *rows, of_all = document["rows"]
    assert len(rows) == 4
    assert all(row["bound_mb"] < rows[0]["bound_mb"] - 10 for row in rows[1:])
    assert of_all["note"] == "cuda: Stand-in, driver's CUDA 13.0"
