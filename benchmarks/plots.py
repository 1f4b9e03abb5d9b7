"""Charts as SVG text: bars with limits, stacked bars, lines. Only this imports matplotlib.

Text stays text and nothing is fetched, so a chart is small and takes the fonts of its page.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, assert_never

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

OURS, OTHER, LIMIT, TEXT, GRID = "#0b7285", "#adb5bd", "#c92a2a", "#343a40", "#e9ecef"
CYCLE = (OURS, "#e8590c", "#5f3dc4", "#2b8a3e", "#868e96", "#495057", "#ced4da")
WIDTH_IN = 7.2
MANY_NAMES = 4
"""Names below an axis that stand beside each other; more are slanted."""

STYLE: dict[Any, Any] = {  # matplotlib's keys are a type of 350 literals
    "svg.fonttype": "none",
    "svg.hashsalt": "snapcask",  # the same data give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.edgecolor": GRID,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. `ours` are in colour."""

    label: str
    value: float
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars below each other, with what the machine could do as lines across them."""

    unit: str
    bars: tuple[Bar, ...]
    limits: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one series. `of_bound` is drawn dashed."""

    label: str
    xs: tuple[float | str, ...]
    ys: tuple[float, ...]
    of_bound: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Several series over the same axis."""

    x: str
    y: str
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Stack:
    """One bar of parts that follow each other."""

    label: str
    parts: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Bars below each other, each of the same named parts."""

    unit: str
    names: tuple[str, ...]
    stacks: tuple[Stack, ...]


Chart = Bars | Lines | Stacks


def svg(chart: Chart) -> str:
    """The chart as an `<svg>` element."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, _height_in(chart)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
        match chart:
            case Bars():
                _draw_bars(axes, chart)
            case Stacks():
                _draw_stacks(axes, chart)
            case Lines():
                _draw_lines(axes, chart)
            case _:
                assert_never(chart)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]


def _height_in(chart: Chart) -> float:
    match chart:
        case Bars(bars=rows):
            return 0.36 * len(rows) + 0.9
        case Stacks(stacks=stacks):
            return 0.36 * len(stacks) + 1.2  # a line for the names of the parts
        case _:
            return 3.4


def _draw_stacks(axes: Axes, chart: Stacks) -> None:
    places = list(range(len(chart.stacks)))
    done = [0.0] * len(places)
    for number, name in enumerate(chart.names):
        widths = [stack.parts[number] for stack in chart.stacks]
        colour = CYCLE[number % len(CYCLE)]
        axes.barh(places, widths, left=done, height=0.66, color=colour, label=name)
        done = [before + width for before, width in zip(done, widths, strict=True)]
    axes.set_yticks(places, [stack.label for stack in chart.stacks])
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.set_xlim(0, max(done) * 1.12)
    for place, total in zip(places, done, strict=True):
        axes.text(total + max(done) * 0.01, place, f"{total:.3g}", va="center")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(
        frameon=False, fontsize=8, loc="outside upper left", ncols=len(chart.names),
        columnspacing=1.0, handlelength=1.0,
    )  # fmt: skip


def _draw_bars(axes: Axes, chart: Bars) -> None:
    values = [bar.value for bar in chart.bars]
    places = list(range(len(values)))
    colours = [OURS if bar.ours else OTHER for bar in chart.bars]
    axes.barh(places, values, height=0.66, color=colours)
    axes.set_yticks(places, [bar.label for bar in chart.bars])
    axes.invert_yaxis()
    axes.set_xlabel(chart.unit)
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    most = max([*values, *(limit for _, limit in chart.limits)])
    axes.set_xlim(0, most * 1.12)
    for place, value in zip(places, values, strict=True):
        axes.text(value + most * 0.01, place, f"{value:.3g}", va="center")
    for number, (label, limit) in enumerate(sorted(chart.limits, key=lambda item: item[1])):
        axes.axvline(limit, color=LIMIT, linewidth=1, linestyle=(0, (4, 3)))
        height = 1.01 + 0.075 * (number % 2) * 6 / max(len(values), 3)
        axes.text(
            limit, height, f"{label} {limit:.3g}", color=LIMIT, ha="center", va="bottom",
            fontsize=8, transform=axes.get_xaxis_transform(),
        )  # fmt: skip


def _draw_lines(axes: Axes, chart: Lines) -> None:
    for number, line in enumerate(chart.lines):
        axes.plot(
            line.xs,
            line.ys,
            label=line.label,
            color=CYCLE[number % len(CYCLE)],
            linestyle="--" if line.of_bound else "-",
            linewidth=2,
            marker="o",
            markersize=4,
        )
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.set_ylim(bottom=0)
    if not isinstance(chart.lines[0].xs[0], str):
        axes.set_xlim(left=0)
    elif len(chart.lines[0].xs) > MANY_NAMES:
        axes.tick_params(axis="x", labelrotation=30)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
