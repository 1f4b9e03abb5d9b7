"""CPU-seconds of push and pull, beside a bare loop in the same run: a guard, not a benchmark.

A ratio of two CPU times needs no stored absolute and bears a busy machine. Both take turns, the
best of each counts, and there are more rounds while that is not enough: noise only ever adds.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import snapcask
from benchmarks.bench_push import bare_loop, push_once
from benchmarks.report import Work, repeat
from benchmarks.snapshots import make_snapshot
from transfer.config import MIB
from transfer.pushing import ingest

SIZE_BYTES = 256 * MIB
PRESENT = {"known": 1.28, "new": 1.37, "pull": 1.48}
"""CPU-seconds over those of the bare loop, at this size, by what is measured."""

SLACK = 1.33
"""Times the present ratio that is let pass; a regression of 1.5 is not."""

MIN_ROUNDS, MAX_ROUNDS = 3, 12


@dataclass(frozen=True, slots=True)
class Case:
    """Work, the bare loop beside it, and what is done before each, untimed."""

    work: Work
    bare: Work
    before: Work


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a snapshot that is in the page cache, and a store that has it."""
    folder = tmp_path_factory.mktemp("guard")
    make_snapshot(folder / "snapshot", SIZE_BYTES)
    push_once(folder / "store", folder / "snapshot")
    return folder


def case(folder: Path, name: str) -> Case:
    snapshot, known, out = folder / "snapshot", folder / "store", folder / "out"
    written = (folder / "new", folder / "back", out)

    def empty() -> None:
        for path in written:
            shutil.rmtree(path, ignore_errors=True)
        out.mkdir()
        os.sync()

    pull = partial(snapcask.pull, "bench:x", folder / "back", store=str(known))
    works: dict[str, Work] = {
        "known": partial(push_once, known, snapshot),
        "new": partial(push_once, folder / "new", snapshot),
        "pull": pull,
    }
    bare = partial(bare_loop, snapshot, None if name == "known" else out)
    return Case(works[name], bare, empty)


def least_ratio(case: Case, enough: float, max_rounds: int = MAX_ROUNDS) -> float:
    """Least CPU time of the work over the least of the bare loop; stops early at `enough`."""
    work_s: list[float] = []
    bare_s: list[float] = []
    ratio = float("inf")
    for number in range(max_rounds):
        bare_s += repeat(case.bare, 1, before=case.before).cpu_s.values
        work_s += repeat(case.work, 1, before=case.before).cpu_s.values
        ratio = min(work_s) / min(bare_s)
        if number + 1 >= MIN_ROUNDS and ratio <= enough:
            break
    return ratio


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESENT)
def test_cpu_time_is_not_far_above_that_of_a_bare_loop(folder: Path, name: str) -> None:
    limit = PRESENT[name] * SLACK
    assert least_ratio(case(folder, name), limit) <= limit


@pytest.mark.slow
def test_the_guard_notices_work_that_was_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = ingest._digest

    def wasteful(*arguments: Any) -> bytes:
        for _ in range(2):
            digest(*arguments)
        return digest(*arguments)

    monkeypatch.setattr(ingest, "_digest", wasteful)
    limit = PRESENT["known"] * SLACK
    assert least_ratio(case(folder, "known"), limit, MIN_ROUNDS + 2) > limit
