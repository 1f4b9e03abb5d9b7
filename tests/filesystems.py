"""Filesystems in files, for tests that need a real one: made, mounted, always taken down again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1024 * 1024

_MAKE = {
    "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"),
    "ext4": ("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "btrfs": ("mkfs.btrfs", "-q"),
}
_LEAST_MIB = {"xfs": 320, "ext4": 64, "btrfs": 256}


def why_not(*kinds: str) -> str:
    """Why filesystems of these kinds can't be made here, or nothing."""
    if os.geteuid() != 0:
        return "needs root to mount"
    for kind in kinds:
        if shutil.which(_MAKE[kind][0]) is None:
            return f"needs {_MAKE[kind][0]}"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices"
    return ""


def skip_unless(*kinds: str) -> None:
    """Skip the test where filesystems of these kinds can't be made."""
    if reason := why_not(*kinds):
        pytest.skip(reason)


def run(*command: str | Path) -> str:
    """Run a tool; its output if it succeeds, else AssertionError with what it said."""
    done = subprocess.run(
        [os.fspath(word) for word in command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Disk:
    """A filesystem in the file `image`, attached as `device` and mounted at `root`."""

    kind: str
    image: Path
    device: str
    root: Path

    def used_bytes(self) -> int:
        """Bytes that are taken, once everything is written back."""
        run("sync", "-f", self.root)
        found = os.statvfs(self.root)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def unmount(self) -> None:
        """Take it down if it is there."""
        if os.path.ismount(self.root):
            run("umount", self.root)

    def mount(self) -> None:
        """Put it up again."""
        options = ("-o", "nouuid") if self.kind == "xfs" else ()
        run("mount", *options, self.device, self.root)

    def cut_power(self) -> None:
        """Lose all that was not synced, and come up again (XFS)."""
        run("xfs_io", "-x", "-c", "shutdown", self.root)
        run("umount", self.root)
        self.mount()
        try:
            os.listdir(self.root)
        except OSError:  # a mount namespace of somebody else keeps the dead filesystem
            run("umount", self.root)
            run("cp", "--sparse=always", self.image, self.after)
            device = run("losetup", "--find", "--show", self.after).strip()
            run("losetup", "--detach", self.device)
            object.__setattr__(self, "device", device)
            self.mount()

    @property
    def after(self) -> Path:
        """Where a copy of the image goes, if one is needed after a power cut."""
        return self.image.with_name(f"{self.image.name}-after")


@contextmanager
def disk(folder: Path, kind: str, size_mib: int = 0, name: str = "disk") -> Iterator[Disk]:
    """A new filesystem of this kind. Skips the test where that can't be."""
    skip_unless(kind)
    image, root = folder / f"{name}.{kind}", folder / f"{name}-{kind}"
    with image.open("wb") as file:
        file.truncate(max(size_mib, _LEAST_MIB[kind]) * MIB)
    run(*_MAKE[kind], image)
    root.mkdir()
    device = run("losetup", "--find", "--show", image).strip()
    made = Disk(kind, image, device, root)
    try:
        made.mount()
        yield made
    finally:
        _unmount_below(root)
        run("losetup", "--detach", made.device)
        image.unlink()
        made.after.unlink(missing_ok=True)


def _unmount_below(root: Path) -> None:
    """Take down everything that is mounted at or below a directory, the last mounted first."""
    for _ in range(3):
        at = []
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            where = line.split(" ")[4].replace("\\040", " ")
            if where == str(root) or where.startswith(f"{root}/"):
                at.append(where)
        for where in reversed(at):
            subprocess.run(["umount", where], capture_output=True, timeout=60, check=False)
    if os.path.ismount(root):
        subprocess.run(["umount", "-l", root], capture_output=True, timeout=60, check=False)
