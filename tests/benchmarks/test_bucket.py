"""Benchmarks take the suite's S3 server where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("boto3")

from benchmarks.bucket import bucket_server


def test_the_server_of_the_suite_is_used_and_none_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_S3", "http://127.0.0.1:1")
    with bucket_server(tmp_path / "server") as server:
        assert server.endpoint == "http://127.0.0.1:1"
    assert not (tmp_path / "server").exists()
