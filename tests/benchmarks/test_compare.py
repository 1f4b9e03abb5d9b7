"""Comparison of two files of benchmarks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compare import compare, differing_facts, main
from benchmarks.documents import read_reports, said_of_run
from benchmarks.report import Report, Samples, machine


def written(folder: Path, **rows: dict[str, float | Samples | str]) -> Path:
    report = Report("bench_x", machine(folder))
    for case, values in rows.items():
        report.add(case, **values)
    return report.write(folder)


def test_quantities_are_compared_case_by_case(tmp_path: Path) -> None:
    before = written(
        tmp_path / "a",
        one={"wall_s": Samples((1.0, 2.0, 3.0)), "n": 4.0, "note": "fine"},
        gone={"n": 1.0},
    )
    after = written(
        tmp_path / "b", one={"wall_s": Samples((2.0, 2.5, 3.0)), "n": 6.0}, new={"n": 1.0}
    )
    assert compare(read_reports(before), read_reports(after)) == [
        ["bench_x: one", "wall_s", "2", "2.5", "+25.0 % ~"],
        ["bench_x: one", "n", "4", "6", "+50.0 %"],
        ["bench_x: gone", "n", "1", "-", "only before"],
        ["bench_x: new", "n", "-", "1", "only after"],
    ]


def test_samples_that_do_not_overlap_are_told_from_noise(tmp_path: Path) -> None:
    before = written(tmp_path / "a", one={"wall_s": Samples((1.0, 1.1))})
    after = written(tmp_path / "b", one={"wall_s": Samples((2.0, 2.2))})
    assert compare(read_reports(before), read_reports(after))[0][-1] == "+100.0 %"


def test_machines_that_differ_are_named(tmp_path: Path) -> None:
    here = machine(tmp_path)
    paths = []
    for name, n_cores in (("a", 2), ("b", 64)):
        report = Report("bench_x", replace(here, n_cores=n_cores))
        report.add("one", n=1)
        paths.append(report.write(tmp_path / name))
    before, after = map(read_reports, paths)
    assert differing_facts(before, after) == ["n_cores: 2 -> 64"]
    assert differing_facts(before, before) == []


def test_files_of_the_suite_and_of_one_benchmark_are_read(tmp_path: Path) -> None:
    single = json.loads(written(tmp_path, one={"n": 1.0}).read_text())
    cases = [{"case": "x", "reports": [single]}, {"case": "y", "state": "skipped"}]
    document = {"suite": "quick", "ended_at": "now", "load_before": 1e6, "cases": cases}
    (tmp_path / "quick.json").write_text(json.dumps(document))
    assert read_reports(tmp_path / "quick.json")["x"].rows == {"one": {"n": 1.0}}
    assert "busy" in said_of_run(tmp_path / "quick.json")
    assert said_of_run(tmp_path / "bench_x.json") == ""


def test_several_rows_of_one_case_are_one(tmp_path: Path) -> None:
    report = Report("bench_x", machine(tmp_path))
    report.add("one", n=1.0)
    report.add("one", target=2.0)
    assert read_reports(report.write(tmp_path))["bench_x"].rows == {
        "one": {"n": 1.0, "target": 2.0}
    }


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, one={"n": 1.0}))
    main([path, path])
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        "bench_x:",
        "one",
        "n",
        "1",
        "1",
        "same",
    ]
