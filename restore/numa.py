"""Which NUMA node a PCI device is on, and running a thread there. Nothing where sysfs is silent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SYSFS = Path("/sys")


def cpus_near(pci_address: str, sysfs: Path = SYSFS) -> frozenset[int]:
    """CPUs on the node of a PCI device that this process may use; empty if that is not known."""
    if not pci_address:
        return frozenset()
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        return parse_cpu_list(text) & frozenset(os.sched_getaffinity(0))
    except (OSError, ValueError):
        return frozenset()


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as a set. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


@contextlib.contextmanager
def on_cpus(cpus: frozenset[int]) -> Iterator[None]:
    """Run this thread on some CPUs, so that memory it touches first is near them; none: as it is.

    A CPU set that changed meanwhile is no error: memory is then where the kernel puts it.
    """
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError, ValueError):
        if cpus:
            os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)
