"""From a call of kubelet to an event of the Pod: the driver as it runs in a cluster, over TLS."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import kubernetes_validate
import pytest
import trustme

from csi.kubernetes import ACCOUNT
from imgfmt.rules import Rule
from tests.csi.driver import NODE, Caller, Driver
from tests.csi.pods import PodVolume, code_of, ours, tagged
from tests.filesystems import run
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected

pytestmark = pytest.mark.root

NODES = snapshot(1, mib=2)
TOKEN = "token-of-the-account"
VERSIONS = ("1.29", "1.36")


class LittleApi:
    """An API server that takes events of the namespaces `allowed`, from who has the token."""

    def __init__(self, authority: trustme.CA) -> None:
        self.events: list[dict[str, Any]] = []
        self.refused: list[int] = []
        self.allowed = {"team-a"}
        little = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = little._status(self.path, self.headers.get("Authorization"), body)
                (little.events.append(body) if status == 201 else little.refused.append(status))
                raw = json.dumps(body if status == 201 else {"code": status}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _status(self, path: str, authorization: str | None, event: dict[str, Any]) -> int:
        if authorization != f"Bearer {TOKEN}":
            return 401
        for namespace in self.allowed:
            if path == f"/api/v1/namespaces/{namespace}/events":
                return 201 if event["metadata"]["namespace"] == namespace else 400
        return 403

    @property
    def port(self) -> int:
        """Where it listens on 127.0.0.1."""
        return self._server.server_port

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self, n_events: int, n_refused: int = 0) -> list[dict[str, Any]]:
        """All events, as soon as there are so many."""
        until_s = time.monotonic() + 20
        while len(self.events) < n_events or len(self.refused) < n_refused:
            assert time.monotonic() < until_s, (self.events, self.refused)
            time.sleep(0.005)
        return self.events


@pytest.fixture
def api(stopped: Driver) -> Iterator[LittleApi]:
    """An API server; the driver has a service account as a Pod has, and events are wanted."""
    authority = trustme.CA()
    run("mount", "-t", "tmpfs", "tmpfs", "/run")  # of this test's mount namespace alone
    account = Path(ACCOUNT).resolve()
    account.mkdir(parents=True)
    (account / "token").write_text(f"{TOKEN}\n")
    authority.cert_pem.write_to_path(account / "ca.crt")
    made = LittleApi(authority)
    stopped.environment = {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(made.port),
    }
    stopped.settings = {"kubernetes": {"events": True}}
    yield made
    stopped.kill()
    made.close()
    run("umount", "/run")


@pytest.fixture
def caller(stopped: Driver, api: LittleApi) -> Iterator[Caller]:
    """A client of the driver, which runs."""
    made = Caller(stopped.start().socket)
    yield made
    made.close()


def refused(caller: Caller, pod: PodVolume) -> tuple[str, str]:
    """Code and text of a publication that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", pod.publish())
    assert not ours(pod.folder)
    error: Any = caught.value
    return code_of(error), error.details()


def for_another_node(driver: Driver) -> str:
    """An image that refuses this node."""
    rules = (Rule.parse("cpu.arch=vax"),)
    tree = driver.store.add_tree(NODES)
    return tagged(driver.store, "vax", driver.store.add_image(tree, compat=rules))


def test_an_image_that_is_not_there_becomes_an_event_of_the_pod(
    stopped: Driver, api: LittleApi, caller: Caller
) -> None:
    pod = PodVolume(stopped.kubelet, "u-1", {"image": "models/none:v1"})
    for _ in range(3):  # kubelet repeats what fails, and the event is written once
        code, text = refused(caller, pod)
    assert code == "NOT_FOUND"
    other = PodVolume(stopped.kubelet, "u-2", {"image": "models/none:v1"})
    refused(caller, other)
    first, second = api.wait(2)
    assert first["message"] == text
    assert "models/none:v1" in text
    assert (first["type"], first["reason"]) == ("Warning", "FailedMountSnapshot")
    assert first["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "namespace": "team-a", "name": "pod-u-1", "uid": "u-1",
    }  # fmt: skip
    assert first["source"] == {"component": "csi.snapcask.dev", "host": NODE}
    assert second["involvedObject"]["uid"] == "u-2"
    for event in (first, second):
        for version in VERSIONS:
            kubernetes_validate.validate(event, version, strict=True)


@pytest.mark.parametrize(
    ("wish", "reason", "told"),
    [
        ("fail", "FailedMountSnapshot", "or set the volume attribute onMismatch"),
        ("mount", "SnapshotMismatch", "mounted all the same"),
        ("empty", "SnapshotMismatch", "the volume is empty"),
    ],
)
def test_an_image_that_refuses_the_node_becomes_an_event_that_names_the_rule(
    stopped: Driver, api: LittleApi, caller: Caller, wish: str, reason: str, told: str
) -> None:
    attributes = {"image": for_another_node(stopped), "onMismatch": wish}
    pod = PodVolume(stopped.kubelet, "u-1", attributes)
    if wish == "fail":
        assert refused(caller, pod)[0] == "FAILED_PRECONDITION"
    else:
        caller.call("NodePublishVolume", pod.publish())
    if wish == "mount":
        assert contents(pod.target) == expected(NODES)
    (event,) = api.wait(1)
    assert event["reason"] == reason
    for word in ("cpu.arch", "'vax'", told):
        assert word in event["message"]
    caller.call("NodeUnpublishVolume", pod.unpublish())


def test_what_the_policy_refuses_becomes_an_event(stopped: Driver, api: LittleApi) -> None:
    stopped.settings = {**stopped.settings, "policy": {"namespaces": {"team-b": ["models"]}}}
    name = tagged(stopped.store, "models/a", stopped.store.add(NODES))
    caller = Caller(stopped.start().socket)
    refused(caller, PodVolume(stopped.kubelet, "u-1", {"image": name}))
    (event,) = api.wait(1)
    assert "namespace team-a may not mount image models/a:v1" in event["message"]
    caller.close()


def test_an_api_that_takes_no_events_hinders_no_volume(
    stopped: Driver, api: LittleApi, caller: Caller
) -> None:
    api.allowed.clear()
    name = for_another_node(stopped)
    refused(caller, PodVolume(stopped.kubelet, "u-1", {"image": name}))
    api.wait(0, n_refused=1)
    assert api.refused == [403]
    api.close()
    pod = PodVolume(stopped.kubelet, "u-2", {"image": name, "onMismatch": "mount"})
    caller.call("NodePublishVolume", pod.publish())
    assert contents(pod.target) == expected(NODES)
    assert TOKEN not in stopped.log()
    caller.call("NodeUnpublishVolume", pod.unpublish())


def test_an_empty_volume_needs_no_room_for_the_image_it_refuses(
    stopped: Driver, api: LittleApi
) -> None:
    cache = {**stopped.configuration()["cache"], "maxBytes": 1000}
    stopped.settings = {**stopped.settings, "cache": cache}
    name = for_another_node(stopped)
    caller = Caller(stopped.start().socket)
    pod = PodVolume(stopped.kubelet, "u-1", {"image": name, "onMismatch": "empty"})
    caller.call("NodePublishVolume", pod.publish())
    assert [path.name for path in pod.target.iterdir()] == ["snapcask-status.json"]
    code, text = refused(
        caller, PodVolume(stopped.kubelet, "u-2", {"image": name, "onMismatch": "mount"})
    )
    assert (code, "cache.maxBytes" in text) == ("RESOURCE_EXHAUSTED", True)
    api.wait(3)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    caller.close()
