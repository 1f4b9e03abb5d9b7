"""A chart with what it shows, and how values are found in reports for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.documents import Written, middle
from benchmarks.plots import Bar, Chart

Reports = Mapping[str, Written]


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart, what it shows in a sentence, and the case of the suite that it is from."""

    name: str
    title: str
    says: str
    case: str
    chart: Chart


def value_of(reports: Reports, case: str, row: str, quantity: str) -> float | None:
    """A number, the median of samples; None where it is not there."""
    report = reports.get(case)
    return None if report is None else middle(report.rows.get(row, {}).get(quantity))


def limits_of(
    reports: Reports, case: str, names: Mapping[str, str]
) -> tuple[tuple[str, float], ...]:
    """What the machine could do, by rows of its limits, as they are to be named."""
    found = ((shown, value_of(reports, case, row, "gb_s")) for row, shown in names.items())
    return tuple((shown, value) for shown, value in found if value is not None)


def bars_of(
    reports: Reports, case: str, rows: Mapping[str, str], quantity: str, ours: str = "snapcask"
) -> tuple[Bar, ...]:
    """A bar for each row that is there, as it is to be named; those of `ours` in colour."""
    found = ((shown, value_of(reports, case, row, quantity)) for row, shown in rows.items())
    return tuple(Bar(shown, v, ours=shown.startswith(ours)) for shown, v in found if v is not None)
