"""The frame of a benchmark: the folder goes away, the report stays, unless the work failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.frame import gigabytes, options_of, reporting
from benchmarks.limits import ProbeConfig
from benchmarks.report import HERE, Report


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where reports are written."""
    folder, write = tmp_path / "out", Report.write
    monkeypatch.setattr(Report, "write", lambda report: write(report, folder))
    return folder


def test_what_was_measured_is_shown_and_written_and_the_folder_is_gone(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting("bench_it", tmp_path) as (folder, report):
        (folder / "large").write_bytes(bytes(100))
        report.add("a case", n=3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    written = json.loads((out / "bench_it.json").read_text())
    assert written["rows"] == [{"case": "a case", "n": 3}]
    shown = capsys.readouterr().out
    assert "a case" in shown
    assert str(out / "bench_it.json") in shown


def test_limits_of_the_machine_come_last(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ProbeConfig(n_repeats=1, memory_bytes=1 << 20, file_bytes=4 << 20)
    monkeypatch.setattr("benchmarks.frame.ProbeConfig", lambda n_repeats: tiny)
    with reporting("bench_it", tmp_path, limits=True) as (_, report):
        report.add("a case", n=3)
    cases = [row["case"] for row in json.loads((out / "bench_it.json").read_text())["rows"]]
    assert cases[0] == "a case"
    assert {"memory copy", "BLAKE3", "write, O_DIRECT"} < set(cases[1:])


def test_work_that_fails_writes_no_report(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ZeroDivisionError), reporting("bench_it", tmp_path):
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_only_asked_options_are_there() -> None:
    options = options_of("it", gb=0.5).parse_args(["--folder", "/somewhere"])
    assert gigabytes(options) == 500_000_000
    assert options.folder == Path("/somewhere")
    assert not hasattr(options, "rounds")


@pytest.mark.parametrize("path", sorted(HERE.glob("bench_*.py")), ids=lambda path: path.stem)
def test_no_benchmark_makes_its_own_frame(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.stem != "bench_load":  # works in two folders and shows what it has if it fails
        assert "TemporaryDirectory(" not in text
        assert "reporting(" in text
