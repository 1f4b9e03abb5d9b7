"""Fixtures: a driver with real mounts in a mount namespace of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from csi.proto import csi_pb2 as pb
from tests.csi.driver import Caller, Driver, a_driver, unmount_all
from tests.filesystems import Disk


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Driver]:
    """A driver that is not started yet."""
    with a_driver(tmp_path) as made:
        yield made


@pytest.fixture
def xfs(stopped: Driver) -> Disk:
    """The disk of its cache."""
    assert stopped.disk is not None
    return stopped.disk


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """A driver that all tests of a module use."""
    with a_driver(tmp_path_factory.mktemp("driver")) as made:
        yield made.start()


@pytest.fixture
def driver(running: Driver) -> Iterator[Driver]:
    """A driver that runs and has no volumes; after the test they are taken away."""
    running.log_start = running.log_path.stat().st_size
    yield running
    client = Caller(running.socket)
    for record in (running.cache / "csi" / "volumes").glob("*.json"):
        found = json.loads(record.read_text())
        client.call(
            "NodeUnpublishVolume",
            pb.NodeUnpublishVolumeRequest(
                volume_id=found["volume_id"], target_path=found["target"]
            ),
        )
    client.close()
    unmount_all(running.kubelet)
    for path in running.kubelet.iterdir():
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


@pytest.fixture
def caller(driver: Driver) -> Iterator[Caller]:
    """A client of it."""
    made = Caller(driver.socket)
    yield made
    made.close()
