"""The JSON that benchmarks wrote, read back: single reports and those of the suite alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Written:
    """One report as it was written. `rows` are by case; a value is a number, a text or samples."""

    name: str
    command: str
    machine: Mapping[str, Any]
    rows: Mapping[str, Mapping[str, Any]]


def read_reports(path: Path) -> dict[str, Written]:
    """The reports of a file by the name of their case of the suite, or their own."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if "cases" not in document:
        return {document["name"]: _written(document)}
    return {
        case["case"]: _written(report)
        for case in document["cases"]
        for report in case.get("reports", ())
    }


def _written(document: Mapping[str, Any]) -> Written:
    rows = {row["case"]: {k: v for k, v in row.items() if k != "case"} for row in document["rows"]}
    return Written(document["name"], document.get("command", ""), document["machine"], rows)


def middle(value: object) -> float | None:
    """The median of samples, a number itself, nothing of a text."""
    if isinstance(value, Mapping):
        return float(value["median"])
    return float(value) if isinstance(value, int | float) else None


def extremes(value: object) -> tuple[float, float] | None:
    """Least and greatest of samples."""
    return (value["min"], value["max"]) if isinstance(value, Mapping) else None
