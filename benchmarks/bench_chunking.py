"""What cutting costs, and what it finds.

Speed: page fingerprints, zero pages and cuts of data in memory on one core, beside BLAKE3 and a
memory copy of the same data. Dedup: the new bytes that each of several directories adds, cut by
page-CDC, at fixed offsets, and as single pages, which no cut at page boundaries can beat.
Run: `make bench BENCH=chunking`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.frame import options_of, reporting
from benchmarks.report import Cost, Report, Samples, Work, repeat
from benchmarks.snapshots import PAGE, REPLICAS, cuts, unpack_replicas
from imgfmt.chunking import Profile
from transfer.dedup import PAGE_CDC, Study

MIB = 1024 * 1024
HASH_BYTES = 256 * 1024
TARGET_GB_S = 5.0
TARGETS_MB = dict(zip(REPLICAS, (36.5, 25.0, 25.0), strict=True))


def inputs(size_bytes: int) -> dict[str, memoryview]:
    """Data to cut, by what it is."""
    n_pages = size_bytes // PAGE
    rng = np.random.default_rng(1)
    random = np.frombuffer(rng.bytes(n_pages * PAGE), np.uint8).reshape(n_pages, PAGE)
    scattered = random * (rng.random(n_pages) >= 0.3).astype(np.uint8)[:, None]
    in_runs = random * np.repeat(rng.random(-(-n_pages // 64)) >= 0.3, 64)[:n_pages, None]
    cases = {
        "random": random,
        "30 % zero pages, scattered": scattered,
        "30 % zero pages, in runs of 64": in_runs,
        "all zero": np.zeros_like(random),
    }
    return {name: array.reshape(-1).data for name, array in cases.items()}


def hash_pieces(data: memoryview) -> None:
    """BLAKE3 of pieces that are as long as a chunk is on average."""
    for start in range(0, len(data), HASH_BYTES):
        blake3(data[start : start + HASH_BYTES]).digest()


def measure_speed(size_bytes: int, rounds: int, report: Report) -> None:
    """Add GB per second of CPU of all cases, which take turns so that all see the same noise."""
    data = inputs(size_bytes)
    source = np.frombuffer(data["random"], np.uint8)
    target = np.ones_like(source)
    cases: dict[str, Work] = {
        f"cut, {name}": partial(cuts, view, Profile()) for name, view in data.items()
    }
    cases["limit: BLAKE3"] = partial(hash_pieces, data["random"])
    cases["limit: memory copy"] = partial(np.copyto, target, source)
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, work in cases.items():
            costs[name].append(repeat(work, 1))
    for name, found in costs.items():
        rate = Samples(tuple(cost.cpu_s.median for cost in found)).gb_s(len(source))
        goal = {"target_gb_s": TARGET_GB_S} if name.startswith("cut") else {}
        report.add(name, gb_per_cpu_s=rate, **goal)


def measure_dedup(
    folders: Sequence[Path], targets_mb: dict[str, float], report: Report
) -> dict[str, list[int]]:
    """Add what each of `folders`, in this order, adds; returns new bytes by way of cutting."""
    study = Study()
    added = [study.add(folder) for folder in folders]
    for way in study.ways:
        for folder, directory in zip(folders, added, strict=True):
            found = directory.by_way[way.name]
            has_goal = way == PAGE_CDC and folder.name in targets_mb
            goal = {"target_mb": targets_mb[folder.name]} if has_goal else {}
            new_mb = found.new_bytes / 1e6
            report.add(f"{way.name}: {folder.name}", new_mb=new_mb, n_new=found.n_new, **goal)
    return {way.name: [each.by_way[way.name].new_bytes for each in added] for way in study.ways}


def main() -> None:
    """Measure and report."""
    parser = options_of(__doc__, rounds=7)
    parser.add_argument(
        "folders", type=Path, nargs="*", help="snapshots in the order of pushing (default: ours)"
    )
    parser.add_argument("--mib", type=int, default=256, help="data to cut, beyond any cache")
    options = parser.parse_args()
    with reporting("bench_chunking", options.folder) as (folder, report):
        measure_speed(options.mib * MIB, options.rounds, report)
        folders = options.folders or unpack_replicas(folder)
        measure_dedup(folders, {} if options.folders else TARGETS_MB, report)


if __name__ == "__main__":
    main()
