"""A store whose directory is not there: a mount that is away comes back, so it is asked again."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from csi.preparing import within
from csi.proto import csi_pb2 as pb
from imgfmt.errors import StoreUnavailable
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, tagged
from tests.csi.test_names import create, refused
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected

pytestmark = pytest.mark.root

NODES = snapshot(1, mib=2)


def test_a_store_that_is_not_mounted_is_waited_for(stopped: Driver) -> None:
    one = tagged(stopped.store, "models/one", stopped.store.add(NODES))
    two = tagged(stopped.store, "models/two", stopped.store.add(snapshot(2, mib=2)))
    root, away = stopped.store.root, stopped.root / "away"
    root.rename(away)
    caller = Caller(stopped.start().socket)
    pod = PodVolume(stopped.kubelet, "p", {"image": one})
    for folder_is_there in (False, True):
        if folder_is_there:  # the mount point of what is away
            root.mkdir()
        code, text = refused(caller, "NodePublishVolume", pod.publish())
        assert code == "UNAVAILABLE"
        assert f"{root} is not a snapcask store; is it mounted?" in text
    root.rmdir()
    away.rename(root)
    caller.call("NodePublishVolume", pod.publish())
    assert contents(pod.target) == expected(NODES)
    root.rename(away)  # it was open by then
    cold = PodVolume(stopped.kubelet, "q", {"image": two})
    assert refused(caller, "NodePublishVolume", cold.publish())[0] == "UNAVAILABLE"
    assert refused(caller, "CreateVolume", create("v", image=one))[0] == "UNAVAILABLE"
    away.rename(root)
    caller.call("NodePublishVolume", cold.publish())
    caller.close()


@pytest.mark.parametrize(
    ("timeout_s", "told"),
    [(0.004, "no answer within 0.1 s"), (0.0, "no time to ask"), (-3.0, "no time to ask")],
)
def test_how_long_a_store_was_waited_for_is_told(timeout_s: float, told: str) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable, match=f"the store of x: .*{told}.*; it is tried again"):
        asyncio.run(within(timeout_s, "the store of x", wait()))


def test_snapshots_are_listed_of_the_stores_that_are_there(stopped: Driver) -> None:
    image = tagged(stopped.store, "models/one", stopped.store.add(NODES))
    main = {"url": str(stopped.store.root)}
    gone = {"url": str(stopped.root / "nothing")}
    stopped.settings = {"stores": {"a-gone": gone, "main": main}, "defaultStore": "main"}
    caller = Caller(stopped.start().socket)
    volume = caller.call("CreateVolume", create("v", image=image)).volume
    request = pb.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
    made = caller.call("CreateSnapshot", request).snapshot

    def listed(**given: Any) -> list[str]:
        found = caller.call("ListSnapshots", pb.ListSnapshotsRequest(**given))
        return [entry.snapshot.snapshot_id for entry in found.entries]

    assert listed() == [made.snapshot_id]
    assert "snapshots of store a-gone are not listed" in stopped.log()
    of_gone = {"source_volume_id": f"vol-a-gone-{'0' * 32}"}
    for one in (of_gone, {"snapshot_id": "a-gone/models/one:v1"}):
        with pytest.raises(grpc.RpcError) as caught:
            listed(**one)
        assert code_of(caught.value) == "UNAVAILABLE"
    stopped.store.root.rename(stopped.root / "away")
    with pytest.raises(grpc.RpcError) as caught:
        listed()
    assert code_of(caught.value) == "UNAVAILABLE"
    caller.close()
