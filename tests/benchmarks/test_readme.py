"""README.md's table of figures, from a small run of the suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.readme import BEGIN, END, LINES, figures, main, row_of
from benchmarks.report import HERE, Report, Samples, machine
from benchmarks.suite import CASES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A file of the suite with three cases."""
    here = machine(tmp_path)
    chunking, push, peers = (Report(f"bench_{n}", here) for n in ("chunking", "push", "peers"))
    for way, sizes in (("page-CDC", (36, 22, 24)), ("fixed 64 KiB", (30, 20, 20))):
        for name, new_mb in zip(("x-replica-0", "x-replica-1", "y-replica-0"), sizes, strict=True):
            chunking.add(f"{way}: {name}", new_mb=new_mb)
    push.add("push, new", cpu_s_per_gb=Samples((0.6, 0.7, 0.65)))
    push.add("bare loop, new", cpu_s_per_gb=Samples((0.5,)))
    push.add("write, O_DIRECT", gb_s=Samples((1.0,)))
    for name, cpu_s in (("snapcask", 1.5), ("borg", 3.3), ("cp", 0.4), ("tar | zstd -1", 2.0)):
        peers.add(f"{name}: first", cpu_s=Samples((cpu_s,)))
    peers.add("restic", note="not installed")
    cases = [
        {"case": report.name[6:], "reports": [json.loads(report.write(tmp_path).read_text())]}
        for report in (chunking, push, peers)
    ]
    document = {"suite": "full", "ended_at": "now", "load_before": 0.0, "cases": cases}
    path = tmp_path / "full.json"
    path.write_text(json.dumps(document))
    return path


def test_each_row_has_its_figure_what_is_beside_it_and_its_command(run: Path) -> None:
    _, of_machine, legend, _, _, _, *rows = figures(run).splitlines()
    assert of_machine == "The machine's limits in it, GB/s: disk write 1."
    assert "bold" in legend
    cells = [[cell.strip() for cell in row[2:-2].split(" | ")] for row in rows]
    assert [row[1] for row in cells] == [
        "36 + 22 + 24 MB", "0.65 CPU-seconds a GB", "1.5 CPU-seconds",
    ]  # fmt: skip
    assert cells[1][2] == "limit: bare loop 0.5"
    assert all(row[3].startswith("`") for row in cells)


def test_where_a_peer_is_better_or_missing_the_row_says_so(run: Path) -> None:
    chunking, _, peers = figures(run).splitlines()[-3:]
    assert "**fixed 64 KiB 30 + 20 + 20**" in chunking  # less in all
    assert "| restic not measured, borg 3.3, casync not measured, **cp 0.4**, " in peers
    assert r"tar \| zstd -1 2 |" in peers


def test_rows_are_of_cases_that_the_suite_has() -> None:
    assert {line.case for line in LINES} <= {case.name for case in CASES}
    assert row_of({}, LINES[0]) == ""


def test_the_table_replaces_what_is_between_the_marks(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        main([str(run), "--write", "--page", str(page)])
        assert page.read_text() == f"before\n{BEGIN}\n{figures(run)}\n{END}\nafter\n"


def test_a_page_without_marks_is_left_alone(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="figures: begin"):
        main([str(run), "--write", "--page", str(page)])
    assert page.read_text() == "nothing"


def test_the_readme_has_the_marks() -> None:
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    assert 0 < text.index(BEGIN) < text.index(END)
