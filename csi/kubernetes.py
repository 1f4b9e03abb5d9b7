"""The little that the driver may do with the Kubernetes API: events for Pods, and a start-up taint.

Volumes need none of it. It talks plain HTTPS as the Pod's own service account, and what fails is
logged and otherwise ignored.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from csi.requests import Pod
from imgfmt.errors import StoreUnavailable

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
MAX_QUEUED = 100
MAX_MESSAGE_CHARS = 1024
SAME_S = 300.0
"""The same event is written once in so many seconds: kubelet repeats what fails."""

_TIMEOUT_S = 10.0
_POLL_S = 2.0
_MAX_POLL_S = 60.0
_MAX_ANSWER_BYTES = 4 << 20

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Api:
    """Where the API is, and the folder with the service account's token."""

    host: str
    port: int
    account: str = ACCOUNT
    tls: bool = True

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] = os.environ) -> Api:
        """The API of the cluster that this process runs in. Raises StoreUnavailable."""
        host = environment.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise StoreUnavailable(
                "events and taints need the Kubernetes API, and this is no Pod; set"
                " kubernetes.events to false and removeTaint to null"
            )
        return cls(host, int(environment.get("KUBERNETES_SERVICE_PORT", "443")))

    def call(self, method: str, path: str, body: object = None, kind: str = "json") -> Any:
        """What the API answers. Raises StoreUnavailable. Blocks."""
        what = f"{method} {path}"
        headers = {"Accept": "application/json"}
        try:
            with open(os.path.join(self.account, "token"), encoding="ascii") as file:
                headers["Authorization"] = f"Bearer {file.read().strip()}"
            connection = self._connection()
            try:
                raw = None if body is None else json.dumps(body).encode()
                if raw is not None:
                    headers["Content-Type"] = f"application/{kind}"
                connection.request(method, path, raw, headers)
                answer = connection.getresponse()
                found = answer.read(_MAX_ANSWER_BYTES)
            finally:
                connection.close()
            if answer.status >= 300:
                raise StoreUnavailable(f"Kubernetes API: {what}: status {answer.status}")
            return json.loads(found or b"null")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise StoreUnavailable(f"Kubernetes API: {what}: {error}") from error

    def _connection(self) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        context = ssl.create_default_context(cafile=os.path.join(self.account, "ca.crt"))
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=_TIMEOUT_S, context=context
        )


class PodEvents:
    """`csi.events.Events` that are written by `run`; where it lags, some are lost."""

    def __init__(
        self, api: Api, driver: str, node: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._driver = driver
        self._node = node
        self._now_s = now_s
        self._queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(MAX_QUEUED)
        self._last_s: dict[tuple[str, str, str], float] = {}

    def warning(self, pod: Pod, reason: str, message: str) -> None:
        """See `Events.warning`."""
        if pod.namespace is None or pod.name is None:
            return
        key = pod.uid or pod.name, reason, message
        now_s = self._now_s()
        if now_s - self._last_s.get(key, float("-inf")) < SAME_S:
            return
        self._last_s = {k: at for k, at in self._last_s.items() if now_s - at < SAME_S}
        self._last_s[key] = now_s
        path = f"/api/v1/namespaces/{quote(pod.namespace, safe='')}/events"
        try:
            self._queue.put_nowait((path, self._event(pod, reason, message)))
        except asyncio.QueueFull:
            _log.warning("an event is lost: too many wait", extra={"pod": pod.name})

    def _event(self, pod: Pod, reason: str, message: str) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        involved = {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace,
                    "name": pod.name, "uid": pod.uid or ""}  # fmt: skip
        name = f"{(pod.name or '')[:200]}.{secrets.token_hex(8)}"
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": pod.namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message[:MAX_MESSAGE_CHARS],
            "type": "Warning",
            "source": {"component": self._driver, "host": self._node},
            "reportingComponent": self._driver,
            "reportingInstance": self._node,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }

    async def run(self) -> None:
        """Write events as they come, until cancelled."""
        while True:
            path, event = await self._queue.get()
            try:
                await asyncio.to_thread(self._api.call, "POST", path, event)
            except StoreUnavailable as error:
                _log.warning(str(error), extra={"pod": event["involvedObject"]["name"]})


async def remove_taint(api: Api, key: str, driver: str, node: str, poll_s: float = _POLL_S) -> None:
    """Remove a taint from the node once its CSINode shows the driver, not before."""
    while True:
        try:
            if await asyncio.to_thread(_try_to_remove, api, key, driver, node):
                return
        except StoreUnavailable as error:
            _log.warning(str(error), extra={"node": node})
        await asyncio.sleep(poll_s)
        poll_s = min(_MAX_POLL_S, poll_s * 1.5)


def _try_to_remove(api: Api, key: str, driver: str, node: str) -> bool:
    """Whether the taint is gone. Blocks."""
    name = quote(node, safe="")
    found = api.call("GET", f"/apis/storage.k8s.io/v1/csinodes/{name}")
    drivers = (found.get("spec") or {}).get("drivers") or []
    if driver not in [one.get("name") for one in drivers]:
        return False
    path = f"/api/v1/nodes/{name}"
    taints = (api.call("GET", path).get("spec") or {}).get("taints") or []
    left = [taint for taint in taints if taint.get("key") != key]
    if len(left) == len(taints):
        return True
    change = [
        {"op": "test", "path": "/spec/taints", "value": taints},
        {"op": "replace", "path": "/spec/taints", "value": left},
    ]
    api.call("PATCH", path, change, kind="json-patch+json")
    _log.info("taint removed", extra={"taint": key, "node": node})
    return True


@asynccontextmanager
async def helping(*work: Callable[[], Any]) -> AsyncIterator[None]:
    """Run these coroutines beside what happens meanwhile, and cancel them in the end."""
    tasks: list[asyncio.Task[None]] = []
    group = asyncio.TaskGroup()
    await group.__aenter__()
    try:
        tasks += [group.create_task(one()) for one in work]
        yield
    finally:
        for task in tasks:
            task.cancel()
        await group.__aexit__(None, None, None)
