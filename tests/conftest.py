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


HERE = Path(__file__).parent


def _is_quick(config: pytest.Config) -> bool:
    """Whether this is `make quick`, which leaves out what these markers name."""
    return bool(config.option.markexpr.startswith("not (slow"))


def _is_thorough(path: Path) -> bool:
    return any(HERE / folder in (path, *path.parents) for folder in THOROUGH)


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis try fewer examples in `make quick`; `make test` tries all."""
    if _is_quick(config):
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load no module of which `make quick` would run nothing."""
    return True if _is_quick(config) and _is_thorough(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make quick` leaves out."""
    for item in items:
        if _is_thorough(item.path):
            item.add_marker(pytest.mark.thorough)
