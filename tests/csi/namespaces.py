"""A mount namespace of its own for a test: nothing that is mounted in it can be left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from tests.filesystems import run

_CLONE_NEWNS, _CLONE_FS = 0x20000, 0x200


def _libc(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


@contextlib.contextmanager
def private_mounts() -> Iterator[None]:
    """This thread, and what it starts, have a mount table of their own meanwhile. Needs root."""
    folder = os.getcwd()
    before = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _libc("unshare", _CLONE_NEWNS | _CLONE_FS)
        run("mount", "--make-rprivate", "/")
        yield
    finally:
        _libc("unshare", _CLONE_FS)  # threads that were started meanwhile share the folder
        _libc("setns", before, _CLONE_NEWNS)
        os.close(before)
        os.chdir(folder)


def make_shared(folder: Path) -> None:
    """Have mounts below `folder` reach other namespaces, as they do below kubelet's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    run("mount", "--bind", folder, folder)
    run("mount", "--make-shared", folder)
