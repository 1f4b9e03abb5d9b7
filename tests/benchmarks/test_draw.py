"""The page of what was measured, from small reports."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.charts import pictures
from benchmarks.charts_s3 import PHASES_SHOWN
from benchmarks.documents import Written, read_reports
from benchmarks.draw import found_files, main
from benchmarks.plots import Bar, Bars, Line, Lines, Stacks, svg
from benchmarks.report import Report, Samples, machine
from transfer.dedup import WAYS


def a_suite(folder: Path) -> Path:
    """A file of the suite with a case of each chart."""
    here = machine(folder)
    chunking, push = Report("bench_chunking", here), Report("bench_push", here)
    for way in WAYS:
        for name in ("first", "second"):
            chunking.add(f"{way.name}: {name}", new_mb=10.0)
    for kind in ("new", "known"):
        for who in ("push", "bare loop"):
            rate = Samples((0.5, 0.6))
            push.add(f"{who}, {kind}", cpu_s_per_gb=Samples((0.6,)), gb_s=rate)
    push.add("push : bare loop, new", ratio=1.4)
    push.add("write, O_DIRECT", gb_s=Samples((0.9,)))
    advice = Report("bench_advice", here)
    advice.add("as <they> come", second_mb=30.0)
    advice.add("both", second_mb=12.0)
    scales = []
    for n_chunks in (1000, 4000):
        scale = Report("bench_scale", here)
        for row in ("push, all chunks new", "push, all chunks known", "push, replica, 26 % new"):
            scale.add(row, n_chunks=n_chunks, peak_mb=100.0, cpu_us_per_chunk=70.0)
        scales.append(scale)
    reports = {"chunking": chunking, "advice": advice, "push": push}
    reports |= {"scale": scales[1], "scale-tenth": scales[0]}
    cases = [
        {"case": name, "reports": [json.loads(report.write(folder / name).read_text())]}
        for name, report in reports.items()
    ]
    document = {"suite": "quick", "ended_at": "now", "load_before": 0.0, "cases": cases}
    path = folder / "quick.json"
    path.write_text(json.dumps(document))
    return path


def test_each_report_gives_its_charts(tmp_path: Path) -> None:
    drawn = pictures(read_reports(a_suite(tmp_path)))
    assert [p.name for p in drawn] == ["dedup", "advice", "push", "cpu", "memory", "growth"]
    push = drawn[2].chart
    assert isinstance(push, Bars)
    assert push.limits == (("disk write", 0.9),)
    assert [bar.ours for bar in push.bars] == [True, False, True, False]
    dedup = drawn[0].chart
    assert isinstance(dedup, Lines)
    assert dedup.lines[0].ys == (10.0, 20.0)


def test_a_chart_is_of_a_case_that_is_there(tmp_path: Path) -> None:
    reports = read_reports(a_suite(tmp_path))
    reports["scale-hundredth"] = reports.pop("scale")
    drawn = pictures(reports)
    assert {"memory", "growth"} <= {picture.name for picture in drawn}
    assert {picture.case for picture in drawn} <= set(reports)


def test_a_slow_link_is_drawn_beside_its_bandwidth_and_the_longest_is_chosen(
    tmp_path: Path,
) -> None:
    report = Report("link", machine(tmp_path))
    for link, rate in (("20 ms, 1 Gbit/s", 0.1), ("100 ms, 1 Gbit/s", 0.05)):
        for row in ("pull, snapcask", "pull, s5cmd", "push, snapcask"):
            report.add(f"{link}: {row}", gb_s=Samples((rate,)), of_limit=rate * 8)
        report.add(f"{link}: aws s3 cp", note="not installed")
        report.add(f"{link}: limit: bandwidth", gb_s=0.125)
    report.add("direct: pull, snapcask", gb_s=0.7)
    report.add("write, O_DIRECT", gb_s=0.9)
    near, picture = pictures({"link": read_reports(report.write(tmp_path))["link"]})
    assert isinstance(near.chart, Bars)
    assert [bar.value for bar in near.chart.bars] == [0.7]
    assert near.chart.limits == (("disk write", 0.9),)
    assert "100 ms" in picture.title
    assert isinstance(picture.chart, Bars)
    shown = [(bar.label, bar.value, bar.ours) for bar in picture.chart.bars]
    assert shown == [
        ("snapcask: push", 0.05, True),
        ("snapcask: pull", 0.05, True),
        ("s5cmd: pull", 0.05, False),
    ]
    assert picture.chart.limits == (("bandwidth", 0.125),)


def test_a_start_is_drawn_as_its_phases_follow(tmp_path: Path) -> None:
    report = Report("ready", machine(tmp_path))
    seconds = {phase: 1.0 for phase in PHASES_SHOWN} | {"load_s": 2.5}
    report.add("nothing on the node", **seconds, total_s=7.5)
    report.add("limit: link", gb_s=1.0)
    [picture] = pictures({"ready": read_reports(report.write(tmp_path))["ready"]})
    assert isinstance(picture.chart, Stacks)
    [stack] = picture.chart.stacks
    assert stack.label == "nothing on the node"
    assert sum(stack.parts) == 7.5
    drawn = svg(picture.chart)
    ET.fromstring(drawn)
    assert "fetch, verify, write" in drawn
    assert ">7.5<" in drawn


def test_no_reports_give_no_charts() -> None:
    nothing: dict[str, Written] = {}
    assert pictures(nothing) == []


def test_the_page_stands_alone_and_has_every_chart_and_command(tmp_path: Path) -> None:
    path, out, figures = a_suite(tmp_path), tmp_path / "report.html", tmp_path / "figures"
    main([str(path), "--out", str(out), "--figures", str(figures)])
    text = out.read_text()
    assert text.count("<svg") == 6 == len(list(figures.glob("*.svg")))
    addresses = set(re.findall(r'(?:src|href|url)\s*[=(]\s*"?(https?:[^"\s)]+)', text))
    assert {address for address in addresses if "w3.org" not in address} == set()
    assert "as &lt;they&gt; come" in text
    assert "as <they> come" not in text
    assert "quick suite, ended now" in text
    assert re.search(r"numpy \d", text)
    for figure in figures.iterdir():
        ET.parse(figure)


def test_the_same_data_give_the_same_drawing() -> None:
    chart = Bars("GB/s", (Bar("ours", 1.0, ours=True), Bar("other", 2.0)), (("disk", 3.0),))
    assert svg(chart) == svg(chart)
    assert "disk 3" in svg(chart)
    assert "second" in svg(Lines("x", "y", (Line("second", (1.0, 2.0), (3.0, 4.0)),)))


def test_the_full_suite_is_preferred(tmp_path: Path) -> None:
    for name in ("bench_b.json", "quick.json", "full.json"):
        assert found_files(tmp_path) != [tmp_path / name]
        (tmp_path / name).write_text("{}")
        assert found_files(tmp_path) == [tmp_path / name]


def test_nothing_measured_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.draw.OUTPUT_FOLDER", tmp_path)
    with pytest.raises(SystemExit, match="make bench QUICK=1"):
        main([])
