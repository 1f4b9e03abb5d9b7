"""The phases that a verb reports sum to its total, which is no longer than the call took."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.snapcask.conftest import Call

ROUNDING_S = 1e-5


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, which the environment names."""
    monkeypatch.setenv("SNAPCASK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SNAPCASK_ALLOW_ROOT_FILESYSTEM", "1")
    return tmp_path / "cache"


@pytest.mark.parametrize("verb", ["push", "pull", "prefetch", "cp", "verify"])
def test_phases_sum_to_the_total(
    call: Call, store: Path, cache: Path, snapshot: Path, tmp_path: Path, verb: str
) -> None:
    assert call("push", snapshot, "a:1").code == 0
    assert call("init", tmp_path / "other").code == 0
    arguments = {
        "push": (snapshot, "b:1"),
        "pull": ("a:1", tmp_path / "out"),
        "prefetch": ("a:1",),
        "cp": ("a:1", "--to", tmp_path / "other"),
        "verify": ("a:1",),
    }
    begun_s = time.perf_counter()
    seconds = call(verb, *arguments[verb], "--json").document["seconds"]
    wall_s = time.perf_counter() - begun_s
    total_s = seconds.pop("total")
    assert len(seconds) > 1
    assert all(phase_s >= 0 for phase_s in seconds.values())
    assert sum(seconds.values()) == pytest.approx(total_s, abs=ROUNDING_S)
    assert 0 < total_s <= wall_s


def test_a_cold_prefetch_fetches_and_a_warm_one_says_that_it_did_not(
    call: Call, store: Path, cache: Path, snapshot: Path
) -> None:
    pushed = call("push", snapshot, "a:1", "--json").document
    cold = call("prefetch", "a:1", "--json").document
    warm = call("prefetch", "a:1", "--json").document
    assert cold["fetched_bytes"] >= pushed["new_bytes"]
    assert (warm["fetched_bytes"], warm["built"]) == (0, 0)
