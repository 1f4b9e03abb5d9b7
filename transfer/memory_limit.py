"""Whether a limit to this process's memory makes page cache dear: it is charged to who writes."""

from __future__ import annotations

import os

_GROUPS = "/sys/fs/cgroup"
_OWN_GROUP = "/proc/self/cgroup"


def is_memory_limited(groups: str = _GROUPS, own_group: str = _OWN_GROUP) -> bool:
    """Whether a memory limit holds for the control group of this process, or one above it.

    False where that can't be told, as without control groups of version 2. Blocks shortly.
    """
    try:
        with open(own_group, encoding="utf-8", errors="surrogateescape") as file:
            own = next(line for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return False
    path = own.removeprefix("0::").strip()
    while True:
        try:
            with open(os.path.join(groups, path.lstrip("/"), "memory.max"), "rb") as file:
                if file.read().strip() != b"max":
                    return True
        except OSError:
            pass
        if path in ("", "/"):
            return False
        path = os.path.dirname(path)
