"""Fixtures: everything that Helm is asked, in one process, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy.chart import BASE, MATRIX, Rendered, helm, merged, rendered
from tests.deploy.refusals import REFUSED


@pytest.fixture(scope="session")
def helm_answers() -> Mapping[str, Mapping[str, Any]]:
    """What Helm said to each job: `render NAME` and `lint NAME` of the matrix, `refuse NAME`."""
    jobs = []
    for name, values in MATRIX.items():
        laid = merged(BASE, values)
        jobs += [{"name": f"{do} {name}", "do": do, "values": laid} for do in ("render", "lint")]
    jobs.append({"name": "lint nothing", "do": "lint", "values": {}})
    for name, (values, _) in REFUSED.items():
        jobs.append({"name": f"refuse {name}", "do": "render", "values": merged(BASE, values)})
    return helm(jobs)


@pytest.fixture(scope="session")
def charts(helm_answers: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Rendered]:
    """The renderings of the matrix, by name."""
    return {name: rendered(helm_answers[f"render {name}"]) for name in MATRIX}


@pytest.fixture(params=sorted(MATRIX))
def chart(request: pytest.FixtureRequest, charts: Mapping[str, Rendered]) -> Rendered:
    """Each rendering of the matrix."""
    return charts[request.param]
