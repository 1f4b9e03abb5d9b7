"""Fixtures: a store, a snapshot, and the command within the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from snapcask import interrupts
from snapcask.__main__ import main
from tests.snapcask.support import Outcome, make_snapshot

Call = Callable[..., Outcome]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs the command in this process, whose signal handlers it leaves alone."""
    monkeypatch.setattr(interrupts, "install", lambda: None)

    def run(*arguments: str | Path) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def store(tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new store, which the environment names."""
    root = tmp_path / "store"
    assert call("init", root).code == 0
    monkeypatch.setenv("SNAPCASK_STORE", str(root))
    return root


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A small directory to push."""
    return make_snapshot(tmp_path / "snapshot")
