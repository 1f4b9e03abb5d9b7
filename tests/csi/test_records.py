"""The driver's small state: losing it loses no mount."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi.proto import csi_pb2 as pb
from csi.records import mount_name
from csi.requests import mount_options
from imgfmt.errors import InvalidInput
from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, code_of, leftovers, ours, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected
from transfer.mounts import source_of

NODES = snapshot(1, mib=2)


@pytest.mark.root
@pytest.mark.parametrize("damage", ["lost", "garbage", "another version"])
@pytest.mark.parametrize("mode", ["overlay", "bind", "bind of members"])
def test_a_lost_record_loses_no_mount(stopped: Driver, damage: str, mode: str) -> None:
    tree, other = (stopped.store.add_tree(nodes) for nodes in (NODES, snapshot(2, mib=2)))
    trees = (tree, other) if mode == "bind of members" else (tree,)
    image = tagged(stopped.store, "models/llama", stopped.store.add_image(*trees))
    stopped.settings = {"mount": {"mode": mode.partition(" ")[0]}}
    caller = Caller(stopped.start().socket)
    pod = PodVolume(stopped.kubelet, "p", {"image": image})
    root = pod.target / "rank-0" if len(trees) > 1 else pod.target
    caller.call("NodePublishVolume", pod.publish())
    stopped.kill()
    caller.close()
    for record in (stopped.cache / "csi" / "volumes").iterdir():
        if damage == "lost":
            record.unlink()
        elif damage == "garbage":
            record.write_bytes(os.urandom(100))
        else:
            record.write_text(record.read_text().replace('"version": 1', '"version": 9'))
    caller = Caller(stopped.start().socket)
    assert contents(root) == expected(NODES)
    caller.call("NodePublishVolume", pod.publish())  # kubelet restarts too
    assert len(ours(pod.folder)) == (1 if len(trees) == 1 else 3)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert not pod.target.exists()
    assert leftovers(stopped.cache) == []
    caller.close()


@pytest.mark.root
def test_names_and_pods_of_images_can_be_read_as_the_runbook_says(driver: Driver) -> None:
    digest = driver.store.add(NODES)
    image = tagged(driver.store, "models/llama", digest)
    with closing(Caller(driver.socket)) as caller:
        pod = PodVolume(driver.kubelet, "p", {"image": image})
        caller.call("NodePublishVolume", pod.publish())
    page = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text()
    told = []
    for path, words in re.findall(r"'cat /var/lib/snapcask/(\S+)' \| jq -r '\"(.*)\"'", page):
        (file,) = driver.cache.glob(path)
        for key, value in json.loads(file.read_text()).items():
            words = words.replace(rf"\(.{key})", str(value))
        told.append(words)
    assert told == [f"{digest} {image}", f"{digest} team-a/pod-p"]


@pytest.mark.root
@pytest.mark.parametrize("how", ["removed", "moved", "emptied"])
def test_a_cache_that_goes_away_is_noticed_and_pods_still_end(stopped: Driver, how: str) -> None:
    image = tagged(stopped.store, "models/llama", stopped.store.add(NODES))
    caller = Caller(stopped.start().socket)
    pod, later = (PodVolume(stopped.kubelet, name, {"image": image}) for name in ("p", "q"))
    caller.call("NodePublishVolume", pod.publish())
    match how:
        case "removed":
            shutil.rmtree(stopped.cache)
        case "moved":
            stopped.cache.rename(stopped.cache.parent / "moved")
        case _:
            shutil.rmtree(stopped.cache / "domains")
    assert not caller.call("Probe", pb.ProbeRequest()).ready.value
    with pytest.raises(grpc.RpcError, match="was removed meanwhile; start again") as caught:
        caller.call("NodePublishVolume", later.publish())
    assert code_of(caught.value) == "UNAVAILABLE"
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert not pod.target.exists()
    assert not ours(pod.folder)
    caller.close()


@pytest.mark.root
def test_one_driver_uses_a_cache_at_a_time(stopped: Driver) -> None:
    stopped.start()
    other = Driver(stopped.root / "other", stopped.cache, stopped.store)
    other.root.mkdir()
    other.kubelet.mkdir()
    with pytest.raises(AssertionError, match="another driver uses"):
        other.start()


def test_names_of_publications_are_sources_and_no_two_are_alike() -> None:
    ids = ["pv-1", "pv.1", "x-1", "a/b", "a b", "ü", "v" * 128, "csi-" + "0" * 64, "pv-1.0"]
    targets = ["/k/a", "/k/b"]
    names = {mount_name(volume_id, target) for volume_id in ids for target in targets}
    assert len(names) == len(ids) * len(targets)
    for name in names:
        assert source_of(f"{name}.m1023", "0" * 64)
        assert len(name) < 110
    assert mount_name("pv-1", "/k/a").startswith("pv-1.")


LABEL = "system_u:object_r:container_file_t:s0:c1,c2"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["ro"], []),
        ([f'context="{LABEL}"'], [("context", LABEL)]),
        (["ro,noatime", f'nodev,context="{LABEL}",nosuid'], [("context", LABEL)]),
        (["context=system_u:object_r:x_t:s0"], [("context", "system_u:object_r:x_t:s0")]),
        (['fscontext="a",rootcontext="b"'], [("fscontext", "a"), ("rootcontext", "b")]),
    ],
)
def test_selinux_labels_in_mount_flags(flags: list[str], options: list[tuple[str, str]]) -> None:
    assert list(mount_options(flags)) == options


@pytest.mark.parametrize(
    "flag",
    ["dev", "rw", "suid", 'context="x', "context=", 'context=""', 'context="a"b', "lowerdir=/etc",
     "upperdir=/x", "context=a,lowerdir=/etc", 'context="a\\"b"', "ro;dev", "metacopy=on"],
)  # fmt: skip
def test_other_mount_flags_are_refused(flag: str) -> None:
    with pytest.raises(InvalidInput, match="mount option"):
        list(mount_options([flag]))


@pytest.mark.root
@pytest.mark.skipif(os.path.exists("/sys/fs/selinux/enforce"), reason="has SELinux")
def test_a_label_goes_to_the_kernel_which_knows_none_here(driver: Driver, caller: Caller) -> None:
    image = tagged(driver.store, "models/llama", driver.store.add(NODES))
    pod = PodVolume(driver.kubelet, "p", {"image": image})
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", pod.publish(flags=[f'context="{LABEL}"']))
    error: Any = caught.value
    assert code_of(error) == "INVALID_ARGUMENT"
    assert "option context" in error.details()
    assert leftovers(driver.cache) == []
    assert not pod.target.exists()
    found = caller.call("NodeGetInfo", pb.NodeGetInfoRequest())
    assert found.node_id == "node-1"
