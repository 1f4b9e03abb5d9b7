"""What a runtime does for a Pod with `hostUsers: false`: an idmapped mount of the volume."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, tagged
from tests.filesystems import run
from tests.transfer.fixture_store import Node, contents

pytestmark = pytest.mark.root

NODES = {b"file": Node(b"hello", mode=0o644, uid=7), b"sub/b": Node(b"x" * 5000, uid=0)}
SHIFT = 100_000

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_CLONE, _RECURSIVE, _EMPTY_PATH, _FROM_EMPTY = 1, 0x8000, 0x1000, 0x4
_IDMAP = 0x100000
_CHILD = """
import ctypes, sys
assert ctypes.CDLL(None).unshare(0x10000000) == 0
print(flush=True)
sys.stdin.read()
"""


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@contextlib.contextmanager
def user_namespace() -> Iterator[int]:
    """A descriptor of one whose users begin at SHIFT on the host."""
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        for kind in ("uid", "gid"):
            Path(f"/proc/{child.pid}/{kind}_map").write_text(f"0 {SHIFT} 65536\n")
        descriptor = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY)
        yield descriptor
        os.close(descriptor)
        child.stdin.close()


def idmapped(source: Path, target: Path) -> None:
    """Mount at `target` what `source` is, with owners shifted. Raises OSError."""
    tree = _call(_OPEN_TREE, -100, str(source).encode(), _CLONE | _RECURSIVE | os.O_CLOEXEC)
    try:
        with user_namespace() as descriptor:
            wanted = _MountAttr(set=_IDMAP, userns=descriptor)
            size = ctypes.sizeof(wanted)
            _call(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, ctypes.byref(wanted), size)
        _call(_MOVE_MOUNT, tree, b"", -100, str(target).encode(), _FROM_EMPTY)
    finally:
        os.close(tree)


def published(driver: Driver, caller: Caller, mode: str) -> PodVolume:
    """A volume of a mount mode."""
    image = tagged(driver.store, "models/llama", driver.store.add(NODES))
    pod = PodVolume(driver.kubelet, "p", {"image": image, "mountMode": mode}, persistent="pv")
    caller.call("NodePublishVolume", pod.publish())
    return pod


def test_a_bind_volume_can_be_idmapped_and_stays_read_only(
    driver: Driver, caller: Caller, tmp_path: Path
) -> None:
    pod = published(driver, caller, "bind")
    at = tmp_path / "container"
    at.mkdir()
    idmapped(pod.target, at)
    try:
        assert (at / "file").stat().st_uid == SHIFT + 7
        assert (at / "sub/b").stat().st_uid == SHIFT
        assert contents(at).keys() == contents(pod.target).keys()
        with pytest.raises(OSError, match="Read-only"):
            (at / "file").open("r+b")
    finally:
        run("umount", at)
    assert (pod.target / "file").stat().st_uid == 7


def test_the_kernel_refuses_to_idmap_an_overlay(
    driver: Driver, caller: Caller, tmp_path: Path
) -> None:
    """If this fails, a kernel can: then `overlay` works for `hostUsers: false` too."""
    pod = published(driver, caller, "overlay")
    (tmp_path / "container").mkdir()
    with pytest.raises(OSError, match="Invalid argument") as caught:
        idmapped(pod.target, tmp_path / "container")
    assert caught.value.errno == errno.EINVAL
