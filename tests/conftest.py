"""What holds for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("snapcask", deadline=None)  # a busy machine is no failure
settings.register_profile("quick", parent=settings.get_profile("snapcask"), max_examples=25)
settings.load_profile("snapcask")

THOROUGH = ("benchmarks", "csi", "deploy", "mounts", "transfer/cache", "transfer/s3")
"""Folders whose tests run servers, mounts, many processes or benchmarks."""


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis try fewer examples in `make quick`; `make test` tries all."""
    if config.option.markexpr.startswith("not (slow"):
        settings.load_profile("quick")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out."""
    here = Path(__file__).parent
    folders = [here / folder for folder in THOROUGH]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.thorough)
