"""Every benchmark says what it measures and how it is run."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from benchmarks.report import HERE

NEEDS = {"csi": "grpc", "load": "cuda", "receive": "aiobotocore", "s3": "boto3", "ready": "boto3"}
"""Packages without which a benchmark cannot even say what it does."""


@pytest.mark.parametrize(
    "name", sorted(p.stem.removeprefix("bench_") for p in HERE.glob("bench_*"))
)
def test_a_benchmark_has_help(name: str) -> None:
    if (package := NEEDS.get(name)) and not find_spec(package):
        pytest.skip(f"needs {package}")
    script = HERE / f"bench_{name}.py"
    said = subprocess.check_output([sys.executable, str(script), "--help"], text=True)
    assert "Run:" in said
    assert f"make bench BENCH={name}" in " ".join(said.split())
