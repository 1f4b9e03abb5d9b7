"""What containers see of a volume: an ordinary, a privileged and a user-namespaced one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.csi.driver import Caller, Driver
from tests.csi.pods import PodVolume, tagged
from tests.transfer.fixture_store import Node, contents, expected

pytestmark = pytest.mark.root

NODES = {
    b"pages-1.img": Node(bytes(range(256)) * 64),
    b"sub/file": Node(b"hello", mode=0o444),
}
_HOST = ("/bin", "/sbin", "/lib", "/lib64", "/usr")
_SCRIPT = """
sha256sum /snap/pages-1.img; cat /snap/sub/file; echo
try() { if "$@" 2>/dev/null; then echo "did: $*"; else echo "refused: $*"; fi; }
try touch /snap/new
try rm /snap/sub/file
try chmod 777 /snap/sub
try sh -c 'echo x > /snap/sub/file'
try mount -o remount,rw /snap
try mount -o remount,rw,bind /snap
try touch /snap/new
try mkdir /snap/d
"""
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
    "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW",
    "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT",
    "SYS_ADMIN",
)  # fmt: skip
"""By their numbers, as far as they matter here."""


def all_capabilities() -> list[str]:
    """What root has on this machine."""
    status = Path("/proc/self/status").read_text()
    mask = int(status.partition("CapBnd:")[2].split()[0], 16)
    return [f"CAP_{name}" for i, name in enumerate(_CAPABILITIES) if mask >> i & 1]


def run_container(
    folder: Path, volume: Path, *, privileged: bool, user_namespace: bool, read_only: bool
) -> str:
    """What the script prints in a container that has the volume at /snap."""
    (folder / "rootfs").mkdir(parents=True)
    subprocess.run(["runc", "spec"], cwd=folder, check=True)
    spec: dict[str, Any] = json.loads((folder / "config.json").read_text())
    spec["process"] |= {"terminal": False, "args": ["/bin/sh", "-c", _SCRIPT]}
    spec["root"]["readonly"] = False
    options = ["rbind", "rprivate", *(["ro"] if read_only else ["rw"])]
    if user_namespace:  # flags of the mount that are locked there; runc keeps them from 1.2 on
        options += ["nosuid", "nodev"]
    spec["mounts"] += [
        {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro"]}
        for path in _HOST
        if os.path.exists(path)
    ]
    spec["mounts"].append(
        {"destination": "/snap", "type": "bind", "source": str(volume), "options": options}
    )
    spec["mounts"] = [m for m in spec["mounts"] if m["type"] not in ("cgroup", "sysfs", "mqueue")]
    spec["linux"].pop("resources", None)
    if privileged:
        caps = spec["process"]["capabilities"]
        spec["process"]["capabilities"] = dict.fromkeys(caps, all_capabilities())
        spec["process"]["noNewPrivileges"] = False
        for key in ("maskedPaths", "readonlyPaths", "seccomp"):
            spec["linux"].pop(key, None)
    if user_namespace:
        spec["linux"]["namespaces"].append({"type": "user"})
        mapping = [{"containerID": 0, "hostID": 100_000, "size": 65_536}]
        spec["linux"] |= {"uidMappings": mapping, "gidMappings": mapping}
        shutil.chown(folder / "rootfs", 100_000, 100_000)
    (folder / "config.json").write_text(json.dumps(spec))
    done = subprocess.run(
        ["runc", "--root", folder / "state", "run", "--no-pivot", f"snap-{folder.name}"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def runc() -> None:
    """runc, and a folder that other users may search."""
    if shutil.which("runc") is None:
        pytest.skip("needs runc (make system installs it)")


@pytest.mark.parametrize("kind", ["ordinary", "privileged", "user-namespaced"])
@pytest.mark.parametrize("read_only", [True, False])
def test_a_container_sees_the_files_and_can_change_nothing(
    driver: Driver, caller: Caller, runc: None, kind: str, read_only: bool, tmp_path: Path
) -> None:
    image = tagged(driver.store, "models/llama", driver.store.add(NODES))
    pod = PodVolume(driver.kubelet, "p", {"image": image, "mountMode": mode_of(kind)},
                    persistent="pv")  # fmt: skip
    caller.call("NodePublishVolume", pod.publish())
    for above in (tmp_path, *tmp_path.parents[:3], pod.target, *pod.target.parents):
        if str(above).startswith("/tmp/"):
            os.chmod(above, 0o755) if above != pod.target else None
    out = run_container(
        tmp_path / kind,
        pod.target,
        privileged=kind == "privileged",
        user_namespace=kind == "user-namespaced",
        read_only=read_only,
    )
    assert "hello" in out
    assert out.startswith(sha256(NODES[b"pages-1.img"].content or b""))
    for line in out.splitlines():
        assert not line.startswith("did: ") or "remount" in line, out
    assert out.count("refused: touch /snap/new") == 2
    assert contents(pod.target) == expected(NODES)


def mode_of(kind: str) -> str:
    """Overlay for all that share the host's users; bind for the others."""
    return "bind" if kind == "user-namespaced" else "overlay"


def sha256(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
