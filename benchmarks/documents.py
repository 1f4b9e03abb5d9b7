"""The JSON that benchmarks wrote, read back: single reports and those of the suite alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUSY_LOAD = 0.5
"""Processes that ran or waited for each core before a run, above which the page says so."""


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
    rows: dict[str, dict[str, Any]] = {}
    for row in document["rows"]:  # a case may have several, with what it is held against
        rows.setdefault(row["case"], {}).update(row)
    for row in rows.values():
        del row["case"]
    return Written(document["name"], document.get("command", ""), document["machine"], rows)


def middle(value: object) -> float | None:
    """The median of samples, a number itself, nothing of a text."""
    if isinstance(value, Mapping):
        return float(value["median"])
    return float(value) if isinstance(value, int | float) else None


def extremes(value: object) -> tuple[float, float] | None:
    """Least and greatest of samples."""
    return (value["min"], value["max"]) if isinstance(value, Mapping) else None


def said_of_run(path: Path) -> str:
    """A sentence about a run of the suite: mode, time, how busy the machine was. "" of others."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if "suite" not in document:
        return ""
    machines = [r["machine"] for case in document["cases"] for r in case.get("reports", ())]
    n_cores = max((machine["n_cores"] for machine in machines), default=1)
    load = document["load_before"]
    busy = "; the machine was busy with other work" if load > BUSY_LOAD * n_cores else ""
    said = f"{document['suite']} suite, ended {document['ended_at']}"
    return f"{said}, load before it {load:.1f} on {n_cores} cores{busy}"
