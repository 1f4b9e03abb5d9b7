"""Whether this process may mount at all: tried out at the start, before the first Pod needs it.

A mount of each mode is made in a folder of the driver's own and taken down again. All of it blocks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable

from csi.config import MountMode
from imgfmt.errors import AccessDenied, ImageError, NotFound
from transfer.mounts import bind_tree, mount_layers, unmount
from transfer.oserrors import printable, translate

_SOURCE = "snapcask-trial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def why_no_mounts(folder: str, modes: Iterable[MountMode]) -> str:
    """Why mounts of these modes can't be made here, or nothing. `folder` is removed in the end."""
    at, lower = os.path.join(folder, "at"), [os.path.join(folder, name) for name in ("a", "b")]
    try:
        _clear(folder, at)  # a process that was killed may have left it
        try:
            for path in (at, *lower):
                os.makedirs(path, mode=0o700)
            for mode in modes:
                match mode:
                    case MountMode.OVERLAY:
                        mount_layers(lower, _SOURCE, at)
                    case MountMode.BIND:
                        bind_tree(lower[0], at)
                unmount(at, detach=True)
        finally:
            _clear(folder, at)
    except AccessDenied:
        return (
            "the kernel lets this process mount nothing; run it as root with CAP_SYS_ADMIN, in a"
            " Pod with securityContext.privileged: true"
        )
    except ImageError as error:
        return str(error)
    except OSError as error:
        if error.errno in _FULL:
            return ""  # eviction makes room, and whoever mounts is told
        return str(translate(error, printable(error.filename or folder)))
    return ""


def _clear(folder: str, at: str) -> None:
    with contextlib.suppress(NotFound):
        unmount(at, detach=True)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
