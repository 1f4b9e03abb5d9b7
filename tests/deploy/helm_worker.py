"""Real Helm in a process of its own: its Go runtime has no place in the tests' process.

Reads JSON with `chart` and `jobs` (each `name`, `do` (`render` or `lint`), `values`), writes for
each job its `name`, and `files` (path -> text), `messages` or `error`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python

RELEASE = "snapcask"
NAMESPACE = "storage"
_WARNING = 2


def main() -> None:
    """Do the jobs of standard input."""
    asked = json.load(sys.stdin)
    chart = helm_python.Chart.load(asked["chart"])
    json.dump([_done(chart, asked["chart"], job) for job in asked["jobs"]], sys.stdout)


def _done(chart: helm_python.Chart, path: str, job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": job["name"]}
    try:
        if job["do"] == "lint":
            report = helm_python.lint(path, job["values"], strict=True, namespace=NAMESPACE)
            found["messages"] = [
                f"{message['path']}: {message['error']}"
                for message in report["messages"]
                if message["severity"] >= _WARNING
            ] + report["errors"]
        else:
            found["files"] = chart.render(job["values"], name=RELEASE, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        found["error"] = str(error)
    return found


if __name__ == "__main__":
    main()
