"""Every benchmark says what it measures and how it is run."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    "name",
    [
        "advice",
        "chunking",
        "dedup",
        "metadata",
        "peers",
        "push",
        "receive_processes",
        "scale",
        "verbs",
    ],
)
def test_a_benchmark_has_help(name: str) -> None:
    script = BENCHMARKS / f"bench_{name}.py"
    said = subprocess.check_output([sys.executable, str(script), "--help"], text=True)
    assert "Run:" in said
    assert f"make bench BENCH={name}" in " ".join(said.split())
