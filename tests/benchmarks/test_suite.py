"""The suite runs its cases, gathers their JSON, and goes on after a case that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import suite
from benchmarks.report import HERE
from benchmarks.suite import CASES, Case, main, run_suite, said_of_time

SCRIPT = """
import os
import sys
from pathlib import Path
from benchmarks.report import Report, machine
report = Report("bench_tiny", machine(Path(".")))
report.add("it", n=int(sys.argv[1]))
report.add("shared", limits=os.environ.get("BENCH_LIMITS", "no"))
report.write()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has a benchmark that only writes a report."""
    (tmp_path / "bench_tiny.py").write_text(SCRIPT)
    monkeypatch.setattr(suite, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


def cases_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return found


def test_reports_of_all_cases_are_in_one_file_with_their_states(folder: Path) -> None:
    cases = [
        Case("good", "bench_tiny", "1 0", "2 0"),
        Case("bad", "bench_tiny", "1 3", "2 3"),
        Case("not here", "bench_tiny", "1 0", "2 0", lambda: "needs a moon"),
        Case("after", "bench_tiny", "4 0", "5 0"),
    ]
    path, failed = run_suite(cases, quick=True, folder=folder / "out")
    assert path == folder / "out" / "quick.json"
    assert failed == ["bad"]
    found = cases_of(path)
    assert [entry["state"] for entry in found] == ["ok", "failed", "skipped", "ok"]
    assert found[2]["why"] == "needs a moon"
    assert found[0]["reports"][0]["rows"][0] == {"case": "it", "n": 1}
    assert found[0]["reports"][0]["machine"]["n_cores"] >= 1
    assert found[0]["reports"][0]["command"].endswith("bench_tiny.py 1 0")
    assert found[0]["seconds"] > 0
    assert found[0]["cpu_seconds"] > 0


def test_a_mode_has_its_own_arguments_and_file(folder: Path) -> None:
    path, _ = run_suite([Case("x", "bench_tiny", "1 0", "2 0")], quick=False, folder=folder / "out")
    assert path.name == "full.json"
    assert cases_of(path)[0]["reports"][0]["rows"][0] == {"case": "it", "n": 2}


def test_only_quick_cases_share_what_was_measured_of_the_machine(folder: Path) -> None:
    cases = [Case("x", "bench_tiny", "1 0", "1 0"), Case("y", "bench_tiny", "1 0", "1 0")]
    shared = {}
    for quick in (True, False):
        path, _ = run_suite(cases, quick=quick, folder=folder / "out")
        shared[quick] = [entry["reports"][0]["rows"][1]["limits"] for entry in cases_of(path)]
    first, second = shared[True]
    assert first == second != "no"
    assert not Path(first).parent.exists()
    assert shared[False] == ["no", "no"]


def test_every_case_is_of_a_benchmark_that_is_there() -> None:
    scripts = {path.stem for path in HERE.glob("bench_*.py")}
    assert {case.script for case in CASES} == scripts
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_benchmark_is_run_by_a_test() -> None:
    tests = "".join(p.read_text(encoding="utf-8") for p in Path(__file__).parent.glob("test_b*.py"))
    missing = [path.stem for path in HERE.glob("bench_*.py") if path.stem not in tests]
    assert missing == []


def test_a_run_says_what_took_longest(tmp_path: Path) -> None:
    seconds = {"a": 1.0, "b": 30.0, "c": 2.0, "d": 9.0}
    cases = [{"case": name, "seconds": took} for name, took in seconds.items()]
    path = tmp_path / "quick.json"
    path.write_text(json.dumps({"cases": [*cases, {"case": "skipped"}]}))
    assert said_of_time(path) == "took 42 s; the longest: b 30 s, d 9 s, c 2 s"


def test_an_unknown_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nonsense"])
    assert "no case nonsense" in capsys.readouterr().err
