"""The rights of the node's account against what the driver's client really asks the API for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from csi.kubernetes import ACCOUNT, Api, PodEvents, remove_taint
from csi.requests import Pod
from tests.deploy.chart import Rendered, container, mount, volume

_TAINT = "csi.snapcask.dev/agent-not-ready"
_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch"}


@dataclass
class Asked:
    """An API that answers from `found` and notes what it was asked."""

    calls: set[tuple[str, str]] = field(default_factory=set)
    told: threading.Event = field(default_factory=threading.Event)

    def call(self, method: str, path: str, body: object = None, kind: str = "json") -> Any:
        """See `Api.call`."""
        words = path.strip("/").split("/")
        resource = words[words.index("v1") + 1]
        if resource == "namespaces" and len(words) > words.index("v1") + 3:
            resource = words[words.index("v1") + 3]
        self.calls.add((resource, _VERBS[method]))
        if resource == "events":
            self.told.set()
        if resource == "csinodes":
            return {"spec": {"drivers": [{"name": "csi.snapcask.dev"}]}}
        return {"spec": {"taints": [{"key": _TAINT}]}}


def _rights(chart: Rendered) -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for role in chart.all("ClusterRole")
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_node_may_do_what_its_client_does_and_nothing_more(
    charts: Mapping[str, Rendered],
) -> None:
    async def everything(asked: Asked) -> None:
        api = cast("Api", asked)
        await remove_taint(api, _TAINT, "csi.snapcask.dev", "node-1")
        events = PodEvents(api, "csi.snapcask.dev", "node-1")
        events.warning(Pod("team-a", "llama", "1"), "FailedMountSnapshot", "it is not there")
        writing = asyncio.ensure_future(events.run())
        await asyncio.to_thread(asked.told.wait, 5)
        writing.cancel()

    asked = Asked()
    asyncio.run(asyncio.wait_for(everything(asked), 10))
    assert asked.calls == _rights(charts["events and taint"])
    assert {call for call in asked.calls if call[0] == "events"} == _rights(charts["least"])


def test_the_token_lies_where_the_client_looks_for_it(charts: Mapping[str, Rendered]) -> None:
    node = charts["least"].one("DaemonSet")
    assert mount(container(node, "driver"), "api-token")["mountPath"] == ACCOUNT
    paths = set()
    for source in volume(node, "api-token")["projected"]["sources"]:
        (found,) = source.values()
        paths |= {found["path"]} if "path" in found else {item["path"] for item in found["items"]}
    assert {"token", "ca.crt"} <= paths
