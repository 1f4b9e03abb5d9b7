"""The chart gives the driver kubelet's folder of Pods, and not all of kubelet's: that suffices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from tests.csi.driver import Caller, a_driver
from tests.csi.namespaces import make_shared
from tests.csi.pods import PodVolume, code_of, ours, tagged
from tests.deploy.chart import Rendered
from tests.filesystems import run
from tests.transfer.cache.support import snapshot

pytestmark = pytest.mark.root


def test_the_driver_mounts_with_what_the_chart_gives_it(
    charts: Mapping[str, Rendered], tmp_path: Path
) -> None:
    told = json.loads(charts["policy"].config_text())
    with a_driver(tmp_path) as driver:
        run("mount", "--make-private", driver.kubelet)  # only the folder of Pods reaches the host
        make_shared(driver.kubelet / "pods")
        image = tagged(driver.store, "models/llama-8b", driver.store.add(snapshot(1, mib=1)))
        driver.settings = {
            **told,
            "stores": {"main": {"url": str(driver.store.root)}},
            "defaultStore": "main",
            "kubeletDir": f"{driver.kubelet}/pods",
            "cache": {**told["cache"], "path": str(driver.cache), "beginFree": 0, "endFree": 0},
            "kubernetes": {"events": False},
            "metricsAddress": None,
        }
        driver.start("--service", "node")
        caller = Caller(driver.socket)
        assert caller.call("Probe", pb.ProbeRequest()).ready.value
        volume = PodVolume(driver.kubelet, "pod-1", {"image": image})
        caller.call("NodePublishVolume", volume.publish())
        assert [entry.directory for entry in ours(driver.kubelet / "pods")] == [str(volume.target)]
        assert any(volume.target.iterdir())
        refused = PodVolume(driver.kubelet, "pod-2", {"image": image}, namespace="team-b")
        with pytest.raises(grpc.RpcError) as caught:
            caller.call("NodePublishVolume", refused.publish())
        assert code_of(caught.value) == "PERMISSION_DENIED"
        caller.call("NodeUnpublishVolume", volume.unpublish())
        assert not volume.target.exists()
        caller.close()
