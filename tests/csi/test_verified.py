"""A mount is looked at before a call says OK; those of others are not looked through."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from csi import mounting
from csi.mounting import Mounter, Plan
from csi.records import Records
from csi.targets import KubeletFolder
from imgfmt.digest import Digest
from imgfmt.errors import Internal
from imgfmt.image import Member
from tests.csi.driver import Caller, Driver, unmount_all
from tests.csi.pods import PodVolume, code_of, leftovers, ours, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import contents, expected
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.mounts import mount_layers

pytestmark = pytest.mark.root

NODES = snapshot(1, mib=2)


def pod_of(driver: Driver) -> PodVolume:
    """A Pod with an image of the store."""
    image = tagged(driver.store, "models/llama", driver.store.add(NODES))
    return PodVolume(driver.kubelet, "p", {"image": image})


def mounted(source: str, directory: str, options: str) -> None:
    """Mount an overlay by the tool."""
    subprocess.run(["mount", "-t", "overlay", source, "-o", options, directory], check=True)


def nothing(layers: list[str], source: str, directory: str, options: object) -> None:
    """A kernel that says yes and mounts nothing."""


def writable(layers: list[str], source: str, directory: str, options: object) -> None:
    """One that lets files be written."""
    upper, work = (tempfile.mkdtemp(dir=os.path.dirname(layers[1])) for _ in range(2))
    mounted(source, directory, f"lowerdir={layers[0]},upperdir={upper},workdir={work}")


def without_files(layers: list[str], source: str, directory: str, options: object) -> None:
    """One that shows nothing of the tree."""
    other = tempfile.mkdtemp(dir=os.path.dirname(layers[1]))
    mounted(source, directory, f"ro,lowerdir={layers[1]}:{other}")


@pytest.fixture
def mounter(stopped: Driver) -> tuple[Mounter, Plan]:
    """What mounts in a driver, with an image in its cache, and a volume of that."""
    pod = pod_of(stopped)
    with closing(Caller(stopped.start().socket)) as caller:
        caller.call("NodePublishVolume", pod.publish())
        records = Records(str(stopped.cache / "csi"))
        (record,) = filter(None, map(records.read, records.names()))
        caller.call("NodeUnpublishVolume", pod.unpublish())
    stopped.stop()
    cache = CacheRoot(str(stopped.cache), allow_root_filesystem=True)
    (mount,) = record.mounts
    plan = Plan(
        volume_id=record.volume_id,
        target=record.target,
        fingerprint=record.fingerprint,
        mode=record.mode,
        image=Digest.parse(record.image),
        paths=DomainPaths(cache.path, record.domain, cache.disks),
        members=[Member("rank-0", Digest.parse(f"blake3:{mount.tree}"))],
    )
    return Mounter(cache, records, KubeletFolder.find(str(stopped.kubelet))), plan


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (nothing, "the kernel mounted nothing; it was undone"),
        (writable, "is not read-only; it was undone"),
        (without_files, "does not show"),
    ],
)
def test_a_mount_that_is_not_what_it_should_be_is_undone_and_told(
    stopped: Driver,
    mounter: tuple[Mounter, Plan],
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., None],
    told: str,
) -> None:
    mounts, plan = mounter
    with monkeypatch.context() as patched:
        patched.setattr(mounting, "mount_layers", broken)
        with pytest.raises(Internal, match=told):
            mounts.publish(plan)
    assert ours(stopped.kubelet) == []
    assert leftovers(stopped.cache) == []
    mounts.publish(plan)
    assert contents(Path(plan.target)) == expected(NODES)
    mounts.unpublish(plan.volume_id, plan.target)


def test_a_mount_that_hangs_stops_no_other_one(
    mounter: tuple[Mounter, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, plan = mounter
    hangs, ends = threading.Event(), threading.Event()
    mount = mount_layers

    def slow_first(*arguments: Any) -> None:
        if not hangs.is_set():
            hangs.set()
            assert ends.wait(60)
        mount(*arguments)

    monkeypatch.setattr(mounting, "mount_layers", slow_first)
    other = dataclasses.replace(plan, target=f"{plan.target}-2")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(mounts.publish, plan)
        assert hangs.wait(60)
        mounts.publish(other)
        assert not first.done()
        ends.set()
        first.result()
    for found in (plan, other):
        assert contents(Path(found.target)) == expected(NODES)
        mounts.unpublish(found.volume_id, found.target)


def test_after_a_restart_of_the_node_records_without_mounts_go_and_pods_get_their_volumes(
    stopped: Driver,
) -> None:
    pod = pod_of(stopped)
    with closing(Caller(stopped.start().socket)) as caller:
        caller.call("NodePublishVolume", pod.publish())
    stopped.kill()
    unmount_all(stopped.kubelet)  # as the kernel's end does; folders stay
    assert leftovers(stopped.cache) != []
    with closing(Caller(stopped.start().socket)) as caller:
        assert leftovers(stopped.cache) == []
        assert not pod.target.exists()
        caller.call("NodePublishVolume", pod.publish())
        assert contents(pod.target) == expected(NODES)
        caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(stopped.cache) == []


@contextmanager
def fuse_mount(target: Path, *, dead: bool) -> Iterator[None]:
    """A FUSE filesystem whose server has ended, or never answers."""
    device = os.open("/dev/fuse", os.O_RDWR)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
        command = ["mount", "-i", "-t", "fuse", "theirs", "-o", options, str(target)]
        subprocess.run(command, check=True, pass_fds=[device])
        if dead:
            os.close(device)
        yield
    finally:
        subprocess.run(["umount", "-l", target], check=True)
        if not dead:
            os.close(device)


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse")
@pytest.mark.parametrize("dead", [True, False], ids=["dead", "hanging"])
def test_a_target_with_a_filesystem_that_does_not_answer_holds_nobody_up(
    driver: Driver, caller: Caller, dead: bool
) -> None:
    pod = pod_of(driver)
    pod.target.mkdir(parents=True)
    with fuse_mount(pod.target, dead=dead):
        for method, message in (
            ("NodePublishVolume", pod.publish()), ("NodeUnpublishVolume", pod.unpublish()),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError, match="by someone else") as caught:
                caller.call(method, message)
            assert code_of(caught.value) == "FAILED_PRECONDITION"
        with pytest.raises(grpc.RpcError) as caught:
            caller.call("NodeGetVolumeStats", pod.stats())
        assert code_of(caught.value) == "NOT_FOUND"
    caller.call("NodePublishVolume", pod.publish())
    assert contents(pod.target) == expected(NODES)
