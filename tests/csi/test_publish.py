"""Publishing and unpublishing over the real socket with real mounts: what a Pod gets to see."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from imgfmt.image import Image, Member
from imgfmt.rules import Rule
from tests.csi.driver import Caller, Driver
from tests.csi.pods import MODES, PodVolume, code_of, leftovers, ours, tagged
from tests.transfer.cache.support import snapshot
from tests.transfer.fixture_store import Node, contents, expected
from transfer.cache.evict import evict_all
from transfer.cache.layout import CacheRoot

pytestmark = pytest.mark.root

NODES = snapshot(1, mib=2)


def volume(driver: Driver, pod: str = "p1", /, **attributes: str) -> PodVolume:
    """An inline volume of a Pod."""
    return PodVolume(driver.kubelet, pod, attributes)


def publish(caller: Caller, pod: PodVolume, **given: Any) -> None:
    """Publish as kubelet does."""
    caller.call("NodePublishVolume", pod.publish(**given))


def refused(caller: Caller, pod: PodVolume, **given: Any) -> tuple[str, str]:
    """Code and text with which a publication fails; nothing of it may be left."""
    with pytest.raises(grpc.RpcError) as caught:
        publish(caller, pod, **given)
    error: Any = caught.value
    assert not [e for e in ours(pod.kubelet) if "snapcask" in e.source]
    return code_of(error), error.details()


@pytest.fixture
def image(driver: Driver) -> str:
    """An image in the store."""
    return tagged(driver.store, "models/llama", driver.store.add(NODES))


def test_a_pod_sees_the_files_until_it_is_unpublished(
    driver: Driver, caller: Caller, image: str
) -> None:
    pod = volume(driver, image=image)
    publish(caller, pod)
    assert contents(pod.target) == expected(NODES)
    publish(caller, pod)  # again, as after a restart of kubelet
    assert len(ours(pod.folder)) == 1
    assert ours(pod.folder)[0].source.startswith(f"snapcask:1:{pod.volume_id}.")
    usage = {u.unit: u.total for u in caller.call("NodeGetVolumeStats", pod.stats()).usage}
    assert usage[1] == sum(len(node.content or b"") for node in NODES.values())
    assert usage[2] > len(NODES)
    for _ in range(2):
        caller.call("NodeUnpublishVolume", pod.unpublish())
        assert not pod.target.exists()
        assert not ours(pod.folder)
    assert leftovers(driver.cache) == []


def test_nobody_can_write_or_remount(driver: Driver, caller: Caller, image: str) -> None:
    pod = volume(driver, image=image)
    publish(caller, pod, readonly=False)
    with pytest.raises(OSError, match="Read-only") as caught:
        (pod.target / "new").touch()
    assert caught.value.errno == errno.EROFS
    for options in ("remount,rw", "remount,rw,bind"):
        subprocess.run(["mount", "-o", options, pod.target], capture_output=True, check=False)
        with pytest.raises(OSError, match="Read-only"):
            (pod.target / "new").touch()


def test_other_attributes_at_the_same_target_are_refused(
    driver: Driver, caller: Caller, image: str
) -> None:
    publish(caller, volume(driver, image=image))
    with pytest.raises(grpc.RpcError) as caught:
        publish(caller, volume(driver, image=image, onMismatch="mount"))
    assert code_of(caught.value) == "ALREADY_EXISTS"
    assert contents(volume(driver).target) == expected(NODES)


def test_members_are_folders_and_one_of_them_or_a_part_is_the_root(
    driver: Driver, caller: Caller
) -> None:
    store = driver.store
    trees = [store.add_tree({b"f": Node(b"%d" % i), b"sub/g": Node(b"x")}) for i in range(3)]
    names = ("rank-0", "rank-1", "a/cache")
    members = sorted((Member(n, t) for n, t in zip(names, trees, strict=True)),
                     key=lambda m: m.name)  # fmt: skip
    image = tagged(store, "many", store.add_record(Image(tuple(members))))
    whole = volume(driver, "whole", image=image)
    publish(caller, whole)
    assert sorted(os.listdir(whole.target)) == ["a+cache", "rank-0", "rank-1"]
    assert (whole.target / "rank-1" / "f").read_bytes() == b"1"
    for at in (whole.target, whole.target / "rank-0"):
        with pytest.raises(OSError, match="Read-only"):
            (at / "new").touch()
    one = volume(driver, "one", image=image, member="rank-0")
    publish(caller, one)
    assert (one.target / "f").read_bytes() == b"0"
    part = volume(driver, "part", image=image, member="a/cache", subPath="sub")
    publish(caller, part)
    assert os.listdir(part.target) == ["g"]
    code, text = refused_beside(caller, volume(driver, "bad", image=image, subPath="sub"))
    assert code == "INVALID_ARGUMENT"
    assert "rank-0" in text
    code, text = refused_beside(caller, volume(driver, "bad", image=image, member="rank-7"))
    assert code == "NOT_FOUND"
    assert "rank-0" in text
    for pod in (whole, one, part):
        caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(driver.cache) == []


def refused_beside(caller: Caller, pod: PodVolume) -> tuple[str, str]:
    """As `refused`, where other volumes are published."""
    with pytest.raises(grpc.RpcError) as caught:
        publish(caller, pod)
    error: Any = caught.value
    assert not ours(pod.folder)
    return code_of(error), error.details()


@pytest.mark.parametrize("path", ["bin/link", "bin/run", "nothing", "out/etc", "out"])
def test_a_sub_path_leads_nowhere_but_to_a_directory_of_the_image(
    driver: Driver, caller: Caller, path: str
) -> None:
    nodes = {**NODES, b"out": Node(mode=0o777, target=b"/")}
    image = tagged(driver.store, "links", driver.store.add(nodes))
    code, text = refused(caller, volume(driver, image=image, subPath=path))
    assert code == "NOT_FOUND"
    assert path in text


def test_owner_and_mode_can_be_replaced_without_copying(driver: Driver, caller: Caller) -> None:
    nodes = {**NODES, b"secret": Node(b"s" * 9000, mode=0o600, uid=0)}
    image = tagged(driver.store, "owned", driver.store.add(nodes))
    pod = volume(driver, image=image, uid="1234", gid="99", mode="0440")
    publish(caller, pod)
    assert contents(pod.target) == expected(nodes)
    for path in pod.target.rglob("*"):
        found = path.lstat()
        assert (found.st_uid, found.st_gid) == (1234, 99)
        if stat.S_ISREG(found.st_mode):
            assert stat.S_IMODE(found.st_mode) == 0o440
    assert stat.S_IMODE((pod.target / "sub").stat().st_mode) == 0o550
    assert pod.target.stat().st_uid == 1234
    done = subprocess.run(
        ["setpriv", "--reuid=1234", "--regid=1234", "--clear-groups", "cat",
         "secret"], cwd=pod.target, capture_output=True, check=False,
    )  # fmt: skip
    assert done.stdout == b"s" * 9000, done.stderr
    with pytest.raises(OSError, match="Read-only"):
        (pod.target / "secret").chmod(0o777)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(driver.cache) == []


def test_no_volume_waits_for_the_layer_of_another_one(
    driver: Driver, caller: Caller, image: str
) -> None:
    many = {b"%04d" % i: Node(b"") for i in range(5000)}
    large = tagged(driver.store, "many-files", driver.store.add(many))
    first = volume(driver, "warm", image=large)
    publish(caller, first)
    publish(caller, volume(driver, "quick-1", image=image))
    before = set((driver.cache / "csi" / "parts").iterdir())
    slow = volume(driver, "slow", image=large, uid="1234")
    call = caller.begin("NodePublishVolume", slow.publish())
    while set((driver.cache / "csi" / "parts").iterdir()) == before:
        assert not call.done()
    publish(caller, volume(driver, "quick-2", image=image))
    assert not call.done()
    call.result()
    assert (slow.target / "0000").stat().st_uid == 1234


def test_bind_mode_is_read_only_and_keeps_its_tree(
    stopped: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped.settings = {"mount": {"namespaces": {"team-a": "bind"}}}
    image = tagged(stopped.store, "models/llama", stopped.store.add(NODES))
    caller = Caller(stopped.start().socket)
    pod = volume(stopped, image=image)
    publish(caller, pod)
    assert contents(pod.target) == expected(NODES)
    assert ours(pod.folder)[0].filesystem == "xfs"
    with pytest.raises(OSError, match="Read-only"):
        (pod.target / "new").touch()
    publish(caller, pod)
    stopped.kill()
    caller.close()
    caller = Caller(stopped.start().socket)  # it knows its bind mounts again
    publish(caller, pod)
    assert contents(pod.target) == expected(NODES)
    assert [name for name in leftovers(stopped.cache) if "mount-csi" in name]
    monkeypatch.setattr("transfer.cache.usage._MOUNTING_NS", 0)
    evict_all(CacheRoot(str(stopped.cache)))  # though the mount table does not name it
    assert contents(pod.target) == expected(NODES)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(stopped.cache) == []
    code, text = refused(caller, volume(stopped, image=image, uid="5"))
    assert code == "INVALID_ARGUMENT"
    assert "bind" in text
    caller.close()


def test_an_inline_volume_may_not_choose_the_mount_mode(
    driver: Driver, caller: Caller, image: str
) -> None:
    code, text = refused(caller, volume(driver, image=image, mountMode="bind"))
    assert code == "INVALID_ARGUMENT"
    assert "mountMode" in text
    pod = PodVolume(driver.kubelet, "pv", {"image": image, "mountMode": "bind"}, persistent="pv-1")
    publish(caller, pod)
    assert ours(pod.folder)[0].filesystem == "xfs"
    caller.call("NodeUnpublishVolume", pod.unpublish())


def test_an_image_that_is_not_for_this_node(driver: Driver, caller: Caller) -> None:
    rules = (Rule.parse("cpu.arch=vax"), Rule.parse("gpu.model=unknown-here"))
    image = tagged(driver.store, "vax", driver.store.add_image(
        driver.store.add_tree(NODES), compat=rules))  # fmt: skip
    code, text = refused(caller, volume(driver, image=image))
    assert code == "FAILED_PRECONDITION"
    for word in ("cpu.arch", "'vax'", os.uname().machine, "onMismatch"):
        assert word in text
    assert "gpu.model" not in text  # what is not known never refuses
    empty = volume(driver, "e", image=image, onMismatch="empty")
    publish(caller, empty)
    assert os.listdir(empty.target) == ["snapcask-status.json"]
    status = json.loads((empty.target / "snapcask-status.json").read_text())
    assert status["state"] == "empty"
    assert status["mismatches"][0]["check"] == "cpu.arch"
    with pytest.raises(OSError, match="Read-only"):
        (empty.target / "new").touch()
    publish(caller, empty)
    mounted = volume(driver, "m", image=image, onMismatch="mount")
    publish(caller, mounted)
    assert contents(mounted.target) == expected(NODES)
    assert "mounted all the same" in driver.log()
    for pod in (empty, mounted):
        caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(driver.cache) == []


@pytest.mark.parametrize(
    ("mode", "readonly", "good"),
    [
        (MODES.SINGLE_NODE_WRITER, False, True),
        (MODES.SINGLE_NODE_READER_ONLY, False, True),
        (MODES.SINGLE_NODE_SINGLE_WRITER, False, True),
        (MODES.SINGLE_NODE_MULTI_WRITER, False, True),
        (MODES.MULTI_NODE_READER_ONLY, False, True),
        (MODES.MULTI_NODE_SINGLE_WRITER, True, True),
        (MODES.MULTI_NODE_MULTI_WRITER, True, True),
        (MODES.MULTI_NODE_SINGLE_WRITER, False, False),
        (MODES.MULTI_NODE_MULTI_WRITER, False, False),
        (MODES.UNKNOWN, True, False),
        (99, True, False),
    ],
)
def test_access_modes(
    driver: Driver, caller: Caller, image: str, mode: int, readonly: bool, good: bool
) -> None:
    pod = volume(driver, image=image)
    if good:
        publish(caller, pod, mode=mode, readonly=readonly)
        with pytest.raises(OSError, match="Read-only"):
            (pod.target / "new").touch()
    else:
        code, text = refused(caller, pod, mode=mode, readonly=readonly)
        assert code == "INVALID_ARGUMENT"
        assert "access mode" in text


def test_block_access_is_refused(driver: Driver, caller: Caller, image: str) -> None:
    message = volume(driver, image=image).publish()
    message.volume_capability.block.SetInParent()
    with pytest.raises(grpc.RpcError) as caught:
        caller.call("NodePublishVolume", message)
    error: Any = caught.value
    assert code_of(error) == "INVALID_ARGUMENT"
    assert "volumeMode: Filesystem" in error.details()


@pytest.mark.parametrize(
    ("attributes", "code", "word"),
    [
        ({}, "INVALID_ARGUMENT", "image"),
        ({"image": "models/llama:nope"}, "NOT_FOUND", "models/llama:nope"),
        ({"image": "unknown:v1"}, "NOT_FOUND", "unknown:v1"),
        ({"image": "../etc"}, "INVALID_ARGUMENT", "image"),
        ({"image": "_volumes/" + 32 * "0"}, "INVALID_ARGUMENT", "_"),
        ({"image": "blake3:" + 64 * "0"}, "NOT_FOUND", "blake3"),
        ({"image": "a:b\nc"}, "INVALID_ARGUMENT", "printed"),
        ({"image": "x" * 600}, "INVALID_ARGUMENT", "bytes"),
        ({"image": "models/llama:v1", "store": "other"}, "NOT_FOUND", "main"),
        ({"image": "models/llama:v1", "store": "file:///x"}, "PERMISSION_DENIED", "PodStores"),
        ({"image": "models/llama:v1", "store": "/etc"}, "PERMISSION_DENIED", "administrator"),
        ({"image": "models/llama:v1", "member": "../.."}, "INVALID_ARGUMENT", "member"),
        ({"image": "models/llama:v1", "subPath": "../x"}, "INVALID_ARGUMENT", "subPath"),
        ({"image": "models/llama:v1", "subPath": "/etc"}, "INVALID_ARGUMENT", "subPath"),
        ({"image": "models/llama:v1", "subPath": "a//b"}, "INVALID_ARGUMENT", "subPath"),
        ({"image": "models/llama:v1", "uid": "-1"}, "INVALID_ARGUMENT", "uid"),
        ({"image": "models/llama:v1", "gid": "4294967295"}, "INVALID_ARGUMENT", "gid"),
        ({"image": "models/llama:v1", "mode": "4755"}, "INVALID_ARGUMENT", "mode"),
        ({"image": "models/llama:v1", "mode": "99"}, "INVALID_ARGUMENT", "444 or 0444, in octal"),
        ({"image": "models/llama:v1", "pullPolicy": "Never"}, "INVALID_ARGUMENT", "pullPolicy"),
        ({"image": "models/llama:v1", "onMismatch": "x"}, "INVALID_ARGUMENT", "onMismatch"),
        ({"image": "models/llama:v1", "view": "catalog"}, "INVALID_ARGUMENT", "view"),
        ({"image": "models/llama:v1", "Image": "x"}, "INVALID_ARGUMENT", "'Image'"),
        ({"image": "models/llama:v1", "x": "y" * 5000}, "INVALID_ARGUMENT", "4096"),
    ],
)  # fmt: skip
def test_hostile_and_wrong_attributes(
    driver: Driver, caller: Caller, image: str, attributes: dict[str, str], code: str, word: str
) -> None:
    found, text = refused(caller, volume(driver, **attributes))
    assert (found, word in text) == (code, True), text
    assert "\n" not in text
    assert leftovers(driver.cache) == []


@pytest.mark.parametrize("volume_id", ["", "../x", "a/../../b", "/etc", "x" * 129, "a\nb", "a\0b"])
def test_hostile_volume_ids(driver: Driver, caller: Caller, image: str, volume_id: str) -> None:
    pod = volume(driver, image=image)
    for method, message in (
        ("NodePublishVolume", pod.publish()), ("NodeUnpublishVolume", pod.unpublish()),
    ):  # fmt: skip
        message.volume_id = volume_id
        with pytest.raises(grpc.RpcError) as caught:
            caller.call(method, message)
        assert code_of(caught.value) == "INVALID_ARGUMENT"
    assert not pod.target.exists()


@pytest.mark.parametrize("volume_id", ["has/slash", "a b", "ünï", "x-1", "a.b", "#!?*"])
def test_any_other_volume_id_will_do(
    driver: Driver, caller: Caller, image: str, volume_id: str
) -> None:
    pod = PodVolume(driver.kubelet, "p", {"image": image}, persistent=volume_id)
    publish(caller, pod)
    publish(caller, pod)
    assert contents(pod.target) == expected(NODES)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(driver.cache) == []


def test_one_volume_at_several_targets(driver: Driver, caller: Caller, image: str) -> None:
    pods = [PodVolume(driver.kubelet, f"p{i}", {"image": image}, persistent="pv") for i in range(3)]
    for pod in pods:
        publish(caller, pod, mode=MODES.MULTI_NODE_READER_ONLY)
    caller.call("NodeUnpublishVolume", pods[0].unpublish())
    for pod in pods[1:]:
        assert contents(pod.target) == expected(NODES)
    assert len([name for name in leftovers(driver.cache) if "mount-" in name]) == 2
    for pod in pods[1:]:
        caller.call("NodeUnpublishVolume", pod.unpublish())


def as_file(target: Path) -> None:
    """A file at the target."""
    target.write_text("mine")


def as_link(target: Path) -> None:
    """A symbolic link at the target, to a folder that is somebody's."""
    (target.parent / "elsewhere").mkdir()
    target.symlink_to(target.parent / "elsewhere")


def as_mount(target: Path) -> None:
    """Someone else's mount at the target."""
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "theirs", target], check=True)


def as_full_folder(target: Path) -> None:
    """Someone's files at the target."""
    target.mkdir()
    (target / "mine").write_text("mine")


@pytest.mark.parametrize("make", [as_file, as_link, as_mount, as_full_folder])
def test_a_target_that_is_someone_else_s_is_left_alone(
    driver: Driver, caller: Caller, image: str, make: Callable[[Path], None]
) -> None:
    pod = volume(driver, image=image)
    pod.folder.mkdir(parents=True)
    make(pod.target)
    before = pod.target.lstat()
    code, text = refused(caller, pod)
    assert code == "FAILED_PRECONDITION"
    assert str(pod.target) in text
    if make in (as_mount, as_full_folder):
        with pytest.raises(grpc.RpcError) as caught:
            caller.call("NodeUnpublishVolume", pod.unpublish())
        assert code_of(caught.value) == "FAILED_PRECONDITION"
    else:
        caller.call("NodeUnpublishVolume", pod.unpublish())
    assert pod.target.lstat().st_ino == before.st_ino
    assert leftovers(driver.cache) == []


def test_blanks_in_a_target_are_fine(driver: Driver, caller: Caller, image: str) -> None:
    pod = PodVolume(driver.kubelet, "a b\\ c\u00e4", {"image": image})
    publish(caller, pod)
    publish(caller, pod)
    assert contents(pod.target) == expected(NODES)
    caller.call("NodeUnpublishVolume", pod.unpublish())
    assert leftovers(driver.cache) == []


@pytest.mark.parametrize(
    "target",
    ["", "relative", "/etc/x", "{}/pods/../../x", "{}/a\nb/mount", "{}//x", "{}/./x", "{}",
     "{}-other/mount", "{}/" + "x/" * 2100 + "y"],
)  # fmt: skip
def test_hostile_targets(driver: Driver, caller: Caller, image: str, target: str) -> None:
    pod = volume(driver, image=image)
    for method, message in (
        ("NodePublishVolume", pod.publish()), ("NodeUnpublishVolume", pod.unpublish()),
    ):  # fmt: skip
        message.target_path = target.format(driver.kubelet)
        with pytest.raises(grpc.RpcError) as caught:
            caller.call(method, message)
        assert code_of(caught.value) == "INVALID_ARGUMENT"


def test_a_target_behind_a_link_is_refused(driver: Driver, caller: Caller, image: str) -> None:
    elsewhere = driver.root / "elsewhere"
    elsewhere.mkdir()
    (driver.kubelet / "pods").symlink_to(elsewhere)
    code, text = refused(caller, volume(driver, image=image), make_folder=False)
    assert code == "INVALID_ARGUMENT"
    assert "symbolic link" in text
    assert os.listdir(elsewhere) == []


def test_a_missing_parent_is_told(driver: Driver, caller: Caller, image: str) -> None:
    code, _ = refused(caller, volume(driver, image=image), make_folder=False)
    assert code == "FAILED_PRECONDITION"


def test_a_corrupt_image_is_told_and_not_mounted(driver: Driver, caller: Caller) -> None:
    nodes = snapshot(7, mib=2)
    image = tagged(driver.store, "bad", driver.store.add(nodes))
    for pack in driver.store.pack_paths():
        raw = bytearray(pack.read_bytes())
        raw[5000] ^= 1
        pack.write_bytes(raw)
    code, text = refused(caller, volume(driver, image=image))
    assert code == "DATA_LOSS"
    assert "chunk" in text


def test_mount_flags_that_are_not_known_are_refused(
    driver: Driver, caller: Caller, image: str
) -> None:
    code, text = refused(caller, volume(driver, image=image), flags=["ro", "dax"])
    assert code == "INVALID_ARGUMENT"
    assert "dax" in text
    publish(caller, volume(driver, image=image), flags=["ro,noatime", "nodev"])


def test_nothing_is_ready_while_mounts_stay_in_the_container(stopped: Driver) -> None:
    subprocess.run(["mount", "--make-private", stopped.kubelet], check=True)
    image = tagged(stopped.store, "models/llama", stopped.store.add(NODES))
    caller = Caller(stopped.start().socket)
    code, text = refused(caller, volume(stopped, image=image))
    assert code == "UNAVAILABLE"
    assert "Bidirectional" in text
    subprocess.run(["mount", "--make-shared", stopped.kubelet], check=True)
    publish(caller, volume(stopped, image=image))
    caller.close()
