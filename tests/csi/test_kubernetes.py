"""Events and the start-up taint, against a small API server that notes what it is asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from csi.kubernetes import Api, PodEvents, helping, remove_taint
from csi.requests import Pod
from imgfmt.errors import StoreUnavailable

DRIVER, NODE, TAINT = "csi.snapcask.dev", "node-1", "csi.snapcask.dev/agent-not-ready"
OTHER = {"key": "other", "effect": "NoSchedule"}


class LittleApi:
    """Knows one node, whose CSINode shows the driver from the `shown_after`-th look on."""

    def __init__(self, shown_after: int = 0) -> None:
        self.calls: list[tuple[str, str, Any, dict[str, str]]] = []
        self.taints = [OTHER, {"key": TAINT, "effect": "NoExecute"}]
        self.shown_after = shown_after
        self.conflicts = 0

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and object."""
        if path.endswith("/csinodes/node-1"):
            looks = sum(1 for call in self.calls if call[1] == path)
            shown = looks > self.shown_after
            return 200, {"spec": {"drivers": [{"name": DRIVER}] if shown else None}}
        if path == "/api/v1/nodes/node-1" and method == "GET":
            return 200, {"spec": {"taints": self.taints}}
        if path == "/api/v1/nodes/node-1" and method == "PATCH":
            if self.conflicts or body[0]["value"] != self.taints:
                self.conflicts -= 1
                return 422, {}
            self.taints = body[1]["value"]
            return 200, {}
        if path == "/api/v1/namespaces/team-a/events" and method == "POST":
            return 201, body
        return 403, {}


@pytest.fixture
def little() -> LittleApi:
    """What the server does."""
    return LittleApi()


@pytest.fixture
def api(little: LittleApi, tmp_path: Path) -> Iterator[Api]:
    """The served API."""
    (tmp_path / "token").write_text("a-token\n")

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            little.calls.append((self.command, self.path, body, dict(self.headers)))
            status, found = little.answer(self.command, self.path, body)
            raw = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = do_PATCH = _do

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Api("127.0.0.1", server.server_port, str(tmp_path), tls=False)
    server.shutdown()
    server.server_close()
    thread.join()


async def until_called(little: LittleApi, times: int) -> None:
    """Wait until the API was asked so often."""
    for _ in range(2000):
        if len(little.calls) >= times:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(little.calls)


def test_an_event_names_the_pod_and_is_written_once(api: Api, little: LittleApi) -> None:
    clock = [0.0]

    async def work() -> None:
        events = PodEvents(api, DRIVER, NODE, now_s=lambda: clock[0])
        pod = Pod("team-a", "pod-1", "uid-1")
        async with helping(events.run):
            for _ in range(3):
                events.warning(pod, "SnapshotMismatch", "cpu.arch: it wants 'x'")
            events.warning(Pod(), "SnapshotMismatch", "of nobody")
            clock[0] = 1000.0
            events.warning(pod, "SnapshotMismatch", "cpu.arch: it wants 'x'")
            await until_called(little, 2)

    asyncio.run(work())
    assert len(little.calls) == 2
    method, path, event, headers = little.calls[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/team-a/events")
    assert headers["Authorization"] == "Bearer a-token"
    assert event["involvedObject"]["name"] == "pod-1"
    assert event["involvedObject"]["uid"] == "uid-1"
    assert (event["type"], event["reason"]) == ("Warning", "SnapshotMismatch")
    assert "cpu.arch" in event["message"]


def test_events_that_can_t_be_written_are_dropped(api: Api, little: LittleApi) -> None:
    async def work() -> None:
        events = PodEvents(api, DRIVER, NODE)
        async with helping(events.run):
            events.warning(Pod("forbidden", "p", "u"), "X", "y")
            events.warning(Pod("team-a", "p", "v"), "X", "y")
            await until_called(little, 2)

    asyncio.run(work())
    assert [call[1] for call in little.calls][1] == "/api/v1/namespaces/team-a/events"


def test_the_taint_goes_only_when_csinode_shows_the_driver(api: Api, little: LittleApi) -> None:
    little.shown_after, little.conflicts = 2, 1
    asyncio.run(remove_taint(api, TAINT, DRIVER, NODE, poll_s=0.005))
    assert little.taints == [OTHER]
    patches = [i for i, call in enumerate(little.calls) if call[0] == "PATCH"]
    looks = [i for i, call in enumerate(little.calls) if call[1].endswith("csinodes/node-1")]
    assert len(patches) == 2  # the first met somebody else's change
    assert patches[0] > looks[2]
    assert little.calls[patches[0]][3]["Content-Type"] == "application/json-patch+json"


def test_outside_a_cluster_it_says_so() -> None:
    with pytest.raises(StoreUnavailable, match="no Pod"):
        Api.in_cluster({})
