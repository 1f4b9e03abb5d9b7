"""What publishing a warm image costs, beside bare overlay mounts on the same node.

Many Pods publish one image that the cache has, each authorised, while the node has many other
mounts; beside it as many bare overlay mounts, by mount(8) as drivers usually make them, and by
system calls alone. Also the memory of the idle driver. Needs root, xfsprogs and loop devices.
Run: `make bench BENCH=csi`.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame import options_of, reporting
from benchmarks.report import Report, Samples
from tests.csi.driver import Caller, Driver, a_driver
from tests.csi.pods import PodVolume, tagged
from tests.transfer.cache.support import snapshot
from transfer.mounts import mount_layers, mount_table, unmount

IDLE_LIMIT_BYTES = 120_000_000
"""What the idle driver may take, anonymous memory."""

RATIO_LIMIT = 3.0
"""Publishing may take so many times what bare overlay mounts take."""


def add_mounts(folder: Path, count: int) -> None:
    """Other mounts of the node: bind mounts, as most of those of containers are."""
    places = [folder / f"{i:04d}" for i in range(count)]
    for place in places:
        place.mkdir(parents=True)
    source = folder / "source"
    source.mkdir()
    script = "\n".join(f"mount --bind {source} {place}" for place in places)
    subprocess.run(["sh", "-e"], input=script, text=True, check=True)


def publish_all(caller: Caller, pods: Sequence[PodVolume]) -> float:
    """Seconds until all of these Pods have their volume; all ask at once."""
    messages = [pod.publish() for pod in pods]
    begun = time.perf_counter()
    for call in [caller.begin("NodePublishVolume", message) for message in messages]:
        call.result()
    return time.perf_counter() - begun


def unpublish_all(caller: Caller, pods: Sequence[PodVolume]) -> float:
    """Seconds until none of them has it any more."""
    begun = time.perf_counter()
    for call in [caller.begin("NodeUnpublishVolume", pod.unpublish()) for pod in pods]:
        call.result()
    return time.perf_counter() - begun


def bare_mounts(tree: Path, empty: Path, places: Sequence[Path], *, tool: bool) -> float:
    """Seconds for as many overlays of the same tree, made here and taken down again after."""
    for place in places:
        place.mkdir(parents=True)
    options = f"ro,lowerdir={tree}:{empty}"
    begun = time.perf_counter()
    for place in places:
        if tool:
            command = ["mount", "-t", "overlay", "bare", "-o", options, str(place)]
            subprocess.run(command, check=True)
        else:
            mount_layers((str(tree), str(empty)), "bare", str(place))
    took = time.perf_counter() - begun
    for place in places:
        unmount(str(place))
        place.rmdir()
    return took


def memory_of(pid: int) -> dict[str, int]:
    """Resident and anonymous bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"(VmRSS|RssAnon):\s+(\d+) kB", status))
    return {name: int(value) * 1024 for name, value in found.items()}


def measure(driver: Driver, n_pods: int, n_mounts: int, rounds: int, report: Report) -> float:
    """Add all cases to a report; returns how many times mount(8) publishing took, the median."""
    image = tagged(driver.store, "models/llama", driver.store.add(snapshot(1, mib=4)))
    driver.settings = {
        "policy": {"namespaces": {"team-a": ["models"]}},
        "logLevel": "info",
    }
    driver.start()
    assert driver.process is not None
    idle = memory_of(driver.process.pid)
    caller = Caller(driver.socket)
    add_mounts(driver.root / "others", n_mounts)
    pods = [PodVolume(driver.kubelet, f"p{i}", {"image": image}) for i in range(n_pods)]
    places = [driver.kubelet / "bare" / str(i) for i in range(n_pods)]
    caller.call("NodePublishVolume", pods[0].publish())  # now it is warm
    [tree] = driver.cache.glob("domains/*/trees/*")
    caller.call("NodeUnpublishVolume", pods[0].unpublish())
    took: dict[str, list[float]] = {"publish": [], "unpublish": [], "mount8": [], "syscalls": []}
    for _ in range(rounds):
        took["publish"].append(publish_all(caller, pods))
        took["unpublish"].append(unpublish_all(caller, pods))
        took["mount8"].append(bare_mounts(tree, driver.cache / "empty", places, tool=True))
        took["syscalls"].append(bare_mounts(tree, driver.cache / "empty", places, tool=False))
    used = memory_of(driver.process.pid)
    caller.close()
    assert not [e for e in mount_table() if e.source.startswith("snapcask:")]
    ratio = add_times(took, f"{n_pods} Pods, {n_mounts} other mounts", report)
    add_memory(idle, used, report)
    return ratio


def add_times(took: dict[str, list[float]], where: str, report: Report) -> float:
    """Rows of all that was timed; returns the median of publishing over mount(8)."""
    ratios = [p / m for p, m in zip(took["publish"], took["mount8"], strict=True)]
    bare = [p / m for p, m in zip(took["publish"], took["syscalls"], strict=True)]
    report.add(
        f"publish, {where}",
        wall_s=Samples(tuple(took["publish"])),
        of_mount8=Samples(tuple(ratios)),
        of_syscalls=Samples(tuple(bare)),
        limit_of_bare=RATIO_LIMIT,
    )
    report.add(f"unpublish, {where}", wall_s=Samples(tuple(took["unpublish"])))
    report.add(f"bare mount(8), {where}", wall_s=Samples(tuple(took["mount8"])))
    report.add(f"bare system calls, {where}", wall_s=Samples(tuple(took["syscalls"])))
    return Samples(tuple(ratios)).median


def add_memory(idle: dict[str, int], used: dict[str, int], report: Report) -> None:
    """What the driver takes before it has done anything, and after all of it."""
    report.add(
        "memory",
        idle_rss_mb=idle["VmRSS"] / 1e6,
        idle_anonymous_mb=idle["RssAnon"] / 1e6,
        used_rss_mb=used["VmRSS"] / 1e6,
        used_anonymous_mb=used["RssAnon"] / 1e6,
        limit_mb=IDLE_LIMIT_BYTES / 1e6,
    )


def main() -> None:
    """Measure and report."""
    parser = options_of(__doc__, rounds=5)
    parser.add_argument("--pods", type=int, default=100)
    parser.add_argument("--mounts", type=int, default=2000, help="others, on the same node")
    options = parser.parse_args()
    with reporting("bench_csi", options.folder) as (folder, report), a_driver(folder) as driver:
        os.chdir("/")
        measure(driver, options.pods, options.mounts, options.rounds, report)


if __name__ == "__main__":
    main()
