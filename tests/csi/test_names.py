"""Provisioned volumes and snapshots: names that pin images in the store."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from imgfmt import layout
from imgfmt.image import Image, Member, Variant, Variants
from tests.csi.driver import Caller, Driver
from tests.csi.pods import MODES, PodVolume, code_of, point, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import Node, contents, expected, run

pytestmark = pytest.mark.root

OLD, NEW = snapshot(1, mib=2), snapshot(2, mib=2)
READER = pb.VolumeCapability(
    mount=pb.VolumeCapability.MountVolume(),
    access_mode=MODES(mode=MODES.MULTI_NODE_READER_ONLY),
)


def create(
    name: str, snapshot_id: str = "", required: int = 0, limit: int = 0, **parameters: str
) -> pb.CreateVolumeRequest:
    """CreateVolume as the provisioner sends it."""
    message = pb.CreateVolumeRequest(
        name=name,
        volume_capabilities=[READER],
        parameters={**parameters, "csi.storage.k8s.io/pvc/name": "claim"},
        capacity_range=pb.CapacityRange(required_bytes=required, limit_bytes=limit),
    )
    if snapshot_id:
        message.volume_content_source.snapshot.snapshot_id = snapshot_id
    return message


def refused(caller: Caller, method: str, message: Any) -> tuple[str, str]:
    """Code and text of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        caller.call(method, message)
    error: Any = caught.value
    return code_of(error), error.details()


def of_volume(driver: Driver, uid: str, volume: Any) -> PodVolume:
    """A Pod that uses a provisioned volume."""
    return PodVolume(driver.kubelet, uid, dict(volume.volume_context), persistent=volume.volume_id)


def test_a_volume_pins_what_the_tag_meant_until_it_is_deleted(
    driver: Driver, caller: Caller
) -> None:
    old = driver.store.add(OLD)
    name = tagged(driver.store, "models/pin", old)
    volume = caller.call("CreateVolume", create("pvc-1", image=name, required=1 << 30)).volume
    assert volume.capacity_bytes == 1 << 30
    assert len(volume.volume_id) <= 64
    assert volume.volume_context["image"] == f"models/pin@{old}"
    point(driver.store.store, "models/pin", "v1", driver.store.add(NEW))
    again = caller.call("CreateVolume", create("pvc-1", image=name, required=1 << 30)).volume
    assert again == volume
    pod = of_volume(driver, "p", volume)
    caller.call("NodePublishVolume", pod.publish(mode=MODES.MULTI_NODE_READER_ONLY))
    assert contents(pod.target) == expected(OLD)
    references = run(driver.store.store.list_references())
    [held] = [r.record for r in references if r.record.name.startswith("_volumes/")]
    assert held.target == old
    assert held.who.startswith("csi.snapcask.dev ")
    for _ in range(2):
        caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))
    references = run(driver.store.store.list_references())
    assert next(r for r in references if r.record.name == held.name).record.target is None
    newer = caller.call("CreateVolume", create("pvc-1", image=name)).volume
    assert newer.volume_context["image"] != volume.volume_context["image"]
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=newer.volume_id))


def test_a_volume_whose_record_is_damaged_is_made_anew_or_deleted(
    driver: Driver, caller: Caller
) -> None:
    old = driver.store.add(OLD)
    name = tagged(driver.store, "models/rot", old)
    for again in (True, False):
        volume = caller.call("CreateVolume", create("pvc-rot", image=name)).volume
        for path in driver.store.root.glob("refs/_volumes+*/*/*"):
            path.write_bytes(b"rot" + path.read_bytes()[3:])
        made = pb.CreateSnapshotRequest(name="s", source_volume_id=volume.volume_id)
        code, text = refused(caller, "CreateSnapshot", made)
        assert code == "DATA_LOSS"
        assert volume.volume_id in text
        assert "make a new claim" in text
        if again:
            assert caller.call("CreateVolume", create("pvc-rot", image=name)).volume == volume
        caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))
        assert refused(caller, "CreateSnapshot", made)[0] == "NOT_FOUND"
        held = [r for r in run(driver.store.store.list_references()) if r.record.target]
        assert [r.record.name for r in held if r.record.name.startswith("_")] == []


def test_a_volume_that_exists_keeps_its_reference_whatever_becomes_of_its_image(
    driver: Driver, caller: Caller
) -> None:
    old = driver.store.add(OLD)
    name = tagged(driver.store, "models/lost", old)
    volume = caller.call("CreateVolume", create("pvc-lost", image=name, limit=1 << 30)).volume
    path = driver.store.root / layout.image_key(old)
    path.rename(path.with_suffix(".away"))
    assert refused(caller, "CreateVolume", create("pvc-lost", image=name, limit=1 << 30))[0] == (
        "NOT_FOUND"
    )
    held = [r.record for r in run(driver.store.store.list_references()) if r.record.target]
    assert [r.target for r in held if r.name.startswith("_volumes/")] == [old]
    path.with_suffix(".away").rename(path)
    again = caller.call("CreateVolume", create("pvc-lost", image=name, limit=1 << 30)).volume
    assert again == volume
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"image": "models/other:v1"}, "ALREADY_EXISTS"),
        ({"member": "main"}, "ALREADY_EXISTS"),
        ({"required": 5}, "ALREADY_EXISTS"),
    ],
)
def test_the_same_name_with_another_request_is_refused(
    driver: Driver, caller: Caller, change: dict[str, Any], code: str
) -> None:
    image = driver.store.add(OLD)
    first = {"image": tagged(driver.store, "models/x", image)}
    tagged(driver.store, "models/other", image)
    volume = caller.call("CreateVolume", create("pvc-2", **first)).volume  # type: ignore[arg-type]
    assert refused(caller, "CreateVolume", create("pvc-2", **{**first, **change}))[0] == code
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))


def test_what_can_t_be_created(driver: Driver, caller: Caller) -> None:
    name = tagged(driver.store, "models/x", driver.store.add(OLD))
    for message, code in (
        (create("", image=name), "INVALID_ARGUMENT"),
        (create("x" * 129, image=name), "INVALID_ARGUMENT"),
        (create("a"), "INVALID_ARGUMENT"),
        (create("a", image="models/nope:v1"), "NOT_FOUND"),
        (create("a", image=name, typo="x"), "INVALID_ARGUMENT"),
        (create("a", image=name, store="nope"), "NOT_FOUND"),
        (create("a", image=name, store="/etc"), "PERMISSION_DENIED"),
        (create("a", snapshot_id="nope"), "NOT_FOUND"),
        (create("a", snapshot_id="main/../x"), "NOT_FOUND"),
        (create("a", snapshot_id="main/models/nope:v1"), "NOT_FOUND"),
        (create("a", image=name, limit=1000), "OUT_OF_RANGE"),
    ):
        assert refused(caller, "CreateVolume", message)[0] == code
    writer = create("a", image=name)
    writer.volume_capabilities[0].access_mode.mode = MODES.MULTI_NODE_MULTI_WRITER
    assert refused(caller, "CreateVolume", writer)[0] == "INVALID_ARGUMENT"
    clone = create("a", image=name)
    clone.volume_content_source.volume.volume_id = "x"
    assert refused(caller, "CreateVolume", clone)[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("parameters", "flags", "code", "word"),
    [
        ({"member": "zz"}, (), "NOT_FOUND", "has no member 'zz'; it has a, b"),
        ({"member": "a", "subPath": "zz"}, (), "NOT_FOUND", "subPath zz"),
        ({"member": "a", "subPath": "f"}, (), "NOT_FOUND", "subPath f"),
        ({"member": "a", "subPath": "s/g"}, (), "NOT_FOUND", "subPath s/g"),
        ({"member": "a", "subPath": "l"}, (), "NOT_FOUND", "subPath l"),
        ({"subPath": "s"}, (), "INVALID_ARGUMENT", "add member, one of a, b"),
        ({"mountMode": "bind", "uid": "3"}, (), "INVALID_ARGUMENT", "mount mode overlay"),
        ({"mountMode": "bind"}, ('context="u:r:t"',), "INVALID_ARGUMENT", "mount mode overlay"),
        ({}, ("rw",), "INVALID_ARGUMENT", "mount option 'rw'"),
    ],
)
def test_a_volume_that_no_node_could_mount_is_not_made(
    driver: Driver,
    caller: Caller,
    parameters: dict[str, Any],
    flags: tuple[str, ...],
    code: str,
    word: str,
) -> None:
    tree = driver.store.add_tree({b"f": Node(b"1"), b"s/g": Node(b"2"), b"l": Node(target=b"s")})
    members = (Member("a", tree), Member("b", tree))
    image = tagged(driver.store, "models/two", driver.store.add_record(Image(members)))
    message = create("pvc-x", image=image, **parameters)
    message.volume_capabilities[0].mount.mount_flags.extend(flags)
    for _ in range(2):
        found, text = refused(caller, "CreateVolume", message)
        assert (found, word in text) == (code, True), text
    held = [r for r in run(driver.store.store.list_references()) if r.record.target]
    assert [r.record.name for r in held if r.record.name.startswith("_")] == []
    parameters = {"member": "b", "subPath": "s", "uid": "3"}
    volume = caller.call("CreateVolume", create("pvc-x", image=image, **parameters)).volume
    caller.call("NodePublishVolume", of_volume(driver, "p", volume).publish())
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))


def test_variants_are_a_volume_if_one_of_them_can_be_mounted(
    driver: Driver, caller: Caller
) -> None:
    tree = driver.store.add_tree({b"f": Node(b"1")})
    found = [driver.store.add_record(Image((Member(name, tree),))) for name in ("a", "b")]
    both = driver.store.add_record(Variants(tuple(Variant(image) for image in found)))
    image = tagged(driver.store, "models/either", both)
    assert refused(caller, "CreateVolume", create("v", image=image, member="zz"))[0] == "NOT_FOUND"
    volume = caller.call("CreateVolume", create("v", image=image, member="b")).volume
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))


def test_a_claim_from_a_snapshot(driver: Driver, caller: Caller) -> None:
    old = driver.store.add(OLD)
    name = tagged(driver.store, "models/snap", old)
    volume = caller.call("CreateVolume", create("pvc-3", image=name)).volume
    made = caller.call(
        "CreateSnapshot", pb.CreateSnapshotRequest(name="s-1", source_volume_id=volume.volume_id)
    ).snapshot
    assert made.ready_to_use
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))
    restored = caller.call("CreateVolume", create("pvc-4", snapshot_id=made.snapshot_id)).volume
    assert restored.content_source.snapshot.snapshot_id == made.snapshot_id
    assert restored.volume_context["image"] == f"models/snap@{old}"  # the policy knows the name
    pod = of_volume(driver, "p", restored)
    caller.call("NodePublishVolume", pod.publish())
    assert contents(pod.target) == expected(OLD)
    found = caller.call("ListSnapshots", pb.ListSnapshotsRequest(snapshot_id=made.snapshot_id))
    assert [e.snapshot.source_volume_id for e in found.entries] == [volume.volume_id]
    for _ in range(2):
        caller.call("DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=made.snapshot_id))
    assert not caller.call(
        "ListSnapshots", pb.ListSnapshotsRequest(snapshot_id=made.snapshot_id)
    ).entries
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=restored.volume_id))


def test_a_snapshot_that_an_administrator_names(driver: Driver, caller: Caller) -> None:
    old = driver.store.add(OLD)
    tagged(driver.store, "models/pre", old)
    handle = "main/models/pre:v1"
    found = caller.call("ListSnapshots", pb.ListSnapshotsRequest(snapshot_id=handle))
    assert [e.snapshot.ready_to_use for e in found.entries] == [True]
    volume = caller.call("CreateVolume", create("pvc-5", snapshot_id=handle)).volume
    assert volume.volume_context["image"] == f"models/pre@{old}"
    code, text = refused(caller, "DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=handle))
    assert code == "FAILED_PRECONDITION"
    assert "Retain" in text
    caller.call("DeleteVolume", pb.DeleteVolumeRequest(volume_id=volume.volume_id))


def test_the_controller_alone_needs_no_node(stopped: Driver) -> None:
    stopped.settings = {"kubeletDir": "/nonexistent", "cache": {"path": "/nonexistent/cache"}}
    caller = Caller(stopped.start("--service", "controller").socket)
    found = caller.call("GetPluginCapabilities", pb.GetPluginCapabilitiesRequest())
    assert len(found.capabilities) == 1
    assert refused(caller, "NodeGetInfo", pb.NodeGetInfoRequest())[0] == "UNIMPLEMENTED"
    caller.close()
    assert stopped.stop() == 0
