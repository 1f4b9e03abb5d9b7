"""One static page of what was measured, with plots: benchmarks/out/report.html.

From the suite's JSON (`full.json`, else `quick.json`) or the files given. The page fetches nothing.
With `--figures FOLDER` the charts are also written there as SVG files. Run: `make bench-report`.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.charts import pictures
from benchmarks.documents import Written, extremes, middle, read_reports, said_of_run
from benchmarks.picking import Picture
from benchmarks.plots import TEXT, svg
from benchmarks.report import OUTPUT_FOLDER

CSS = """
:root { color-scheme: light dark; --ink: #212529; --soft: #6c757d; --card: #fff; --page: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9ecef; --soft: #adb5bd; --card: #1d2125; --page: #121416; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1560px; margin: 0 auto; padding: 2rem 1.2rem; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
.soft, figcaption { color: var(--soft); } code { font-size: .85em; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(430px, 1fr)); }
figure { margin: 0; padding: 1.1rem 1.3rem; background: var(--card); border-radius: 10px; }
figure p { margin: 0 0 .6rem; } figure svg { width: 100%; height: auto; color: var(--ink); }
details { margin: .5rem 0; padding: .6rem 1rem; background: var(--card); border-radius: 8px; }
summary { cursor: pointer; } div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
"""

FACTS = ("cpu_model", "n_cores", "memory_bytes", "kernel", "filesystem", "python", "git_commit")


def page(reports: Mapping[str, Written], drawn: Sequence[Picture], run: str) -> str:
    """The whole page."""
    cards = "\n".join(_card(picture, reports) for picture in drawn)
    tables = "\n".join(_table(case, report) for case, report in reports.items())
    facts = _machine(next(iter(reports.values()))) if reports else ""
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>snapcask: what was measured</title><style>{CSS}</style>
<main>
<h1>What was measured</h1>
<p class="soft">{facts}<br>{html.escape(run)}</p>
<div class="cards">
{cards}
</div>
<h2 style="margin-top:2rem">All figures</h2>
{tables}
</main></html>
"""


def _machine(report: Written) -> str:
    machine = report.machine
    shown = {name: machine.get(name, "?") for name in FACTS}
    shown["memory_bytes"] = f"{machine.get('memory_bytes', 0) / 1e9:.0f} GB of memory"
    shown["n_cores"] = f"{machine.get('n_cores', '?')} cores"
    shown["python"] = f"Python {machine.get('python', '?')}"
    shown["git_commit"] = f"commit {str(machine.get('git_commit', '?'))[:12]}"
    versions = [f"{name} {version}" for name, version in machine.get("packages", {}).items()]
    shown["packages"] = ", ".join(sorted(versions))
    return html.escape(" · ".join(str(value) for value in shown.values() if value))


def _card(picture: Picture, reports: Mapping[str, Written]) -> str:
    drawing = svg(picture.chart).replace(TEXT, "currentColor")
    command = html.escape(reports[picture.case].command)
    return (
        f"<figure><h2>{html.escape(picture.title)}</h2><p>{html.escape(picture.says)}</p>\n"
        f"{drawing}\n<figcaption><code>{command}</code></figcaption></figure>"
    )


def _table(case: str, report: Written) -> str:
    names = list(dict.fromkeys(name for row in report.rows.values() for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["case", *names])
    rows = "\n".join(
        f"<tr><td>{html.escape(row)}</td>"
        + "".join(f"<td>{html.escape(_cell(values.get(name, '')))}</td>" for name in names)
        + "</tr>"
        for row, values in report.rows.items()
    )
    return (
        f"<details><summary>{html.escape(case)} <code class=soft>{html.escape(report.command)}"
        f'</code></summary><div class="wide"><table><tr>{head}</tr>\n{rows}</table></div></details>'
    )


def _cell(value: object) -> str:
    number = middle(value)
    if number is None:
        return str(value)
    between = extremes(value)
    shown = f"{number:,.4g}" if abs(number) < 1e4 else f"{number:,.0f}"
    return f"{shown} [{between[0]:.3g} .. {between[1]:.3g}]" if between else shown


def found_files(folder: Path) -> list[Path]:
    """The suite's file, the full one if it is there; else those of single benchmarks."""
    for name in ("full.json", "quick.json"):
        if (folder / name).exists():
            return [folder / name]
    return sorted(folder.glob("bench_*.json"))


def write_figures(drawn: Sequence[Picture], folder: Path) -> None:
    """Each chart as a file of its own, on white, so that it can be read on any page."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in drawn:
        drawing = svg(picture.chart)
        end = drawing.index(">") + 1
        white = '<rect width="100%" height="100%" fill="#ffffff"/>'
        text = drawing[:end] + white + drawing[end:]
        clean = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        (folder / f"{picture.name}.svg").write_text(clean, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", help="JSON to draw (default: the suite's)")
    parser.add_argument("--out", type=Path, default=OUTPUT_FOLDER / "report.html")
    parser.add_argument("--figures", type=Path, help="folder for the charts as SVG files")
    options = parser.parse_args(arguments)
    files = options.files or found_files(OUTPUT_FOLDER)
    if not files:
        raise SystemExit("nothing was measured yet: run `make bench QUICK=1` first")
    reports: dict[str, Written] = {}
    for path in files:
        for case, report in read_reports(path).items():
            reports[case.removeprefix("bench_")] = report
    drawn = pictures(reports)
    run = "; ".join(said_of_run(path) for path in files if said_of_run(path))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(reports, drawn, run), encoding="utf-8")
    if options.figures:
        write_figures(drawn, options.figures)
    print(f"written: {options.out} ({len(drawn)} charts, from {', '.join(map(str, files))})")


if __name__ == "__main__":
    main()
