"""Compare two JSON files of benchmarks, case by case: before and after.

    python benchmarks/compare.py BEFORE.json AFTER.json

Both are files of one benchmark or of the suite. A change that the samples of the two runs cannot
tell from noise, because their ranges overlap, is marked with a tilde. Nothing is called better or
worse: that depends on the quantity, which its name says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import Written, extremes, middle, read_reports

FACTS = ("cpu_model", "n_cores", "kernel", "filesystem", "python", "git_commit")
HEAD = ("benchmark: case", "quantity", "before", "after", "change")


def compare(before: Mapping[str, Written], after: Mapping[str, Written]) -> list[list[str]]:
    """A line a quantity: where, what, before, after, change. Those of one side only say so."""
    lines: list[list[str]] = []
    for name in list(dict.fromkeys([*before, *after])):
        old = before[name].rows if name in before else {}
        new = after[name].rows if name in after else {}
        for case in dict.fromkeys([*old, *new]):
            lines += _compare_case(f"{name}: {case}", old.get(case, {}), new.get(case, {}))
    return lines


def _compare_case(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[str]]:
    lines = []
    for quantity in dict.fromkeys([*old, *new]):
        was, now = old.get(quantity), new.get(quantity)
        if middle(was) is None and middle(now) is None:
            continue  # notes
        lines.append([where, quantity, _shown(was), _shown(now), _change(was, now)])
    return lines


def _shown(value: object) -> str:
    number = middle(value)
    return "-" if number is None else f"{number:.4g}"


def _change(was: object, now: object) -> str:
    before, after = middle(was), middle(now)
    if before is None or after is None:
        return "only after" if before is None else "only before"
    if before == after:
        return "same"
    if before == 0:
        return "from 0"
    old, new = extremes(was), extremes(now)
    overlap = old is not None and new is not None and old[0] <= new[1] and new[0] <= old[1]
    return f"{(after / before - 1) * 100:+.1f} %{' ~' if overlap else ''}"


def differing_facts(before: Mapping[str, Written], after: Mapping[str, Written]) -> list[str]:
    """What differs between the machines of the two, for a comparison may say just that."""
    lines = []
    for fact in FACTS:
        old, new = ({str(r.machine[fact]) for r in reports.values()} for reports in (before, after))
        if old != new:
            lines.append(f"{fact}: {', '.join(sorted(old))} -> {', '.join(sorted(new))}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    before, after = read_reports(options.before), read_reports(options.after)
    print(*differing_facts(before, after), "", sep="\n")
    lines = [list(HEAD), *compare(before, after)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left = f"{line[0]:<{widths[0]}}  {line[1]:<{widths[1]}}"
        right = [f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:], strict=True)]
        print(left, *right, sep="  ")


if __name__ == "__main__":
    main()
