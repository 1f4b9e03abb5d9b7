"""What a store of a given size costs: requests, index, memory, time to ready, dollars of S3.

The format's own numbers come from the code that writes it, through the formulas of SPEC.md section
14; rates and prices are assumptions, named and dated in `Rates` and `Prices` below, and every one
can be given on the command line. A simulation checks two parts that are not arithmetic: how
requests spread over the 256 folders of packs, and how much a replica's private pages make new.
Run: `python benchmarks/cost_model.py`; docs/scale.md explains the table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

MIB = 1 << 20
MEAN_CHUNK_BYTES = 260 * 1024
"""As measured: minimum 64 KiB, a cut with odds of 1 in 64 pages, maximum 1 MiB (SPEC.md 14)."""

PACK_BYTES = 128 * MIB
RANGE_BYTES = 8 * MIB
PUSH_REQUESTS_PER_BYTE = 8386 / 1e12
"""Of new data, in parts of 128 MiB packs, with all metadata (SPEC.md section 14)."""

TREE_BYTES_PER_CHUNK = 33.0
TABLE_BYTES_PER_CHUNK = 46.2
INDEX_BYTES_PER_CHUNK = 14.03
"""Bytes in trees, in pack tables and in the index (SPEC.md section 14, rows of 1 TB and 1 PB)."""

PUSH_MEMORY_BYTES_PER_CHUNK = 142
OPEN_MEMORY_BYTES_PER_CHUNK = 133
"""Peak memory of a push, and of opening a tree with what is mapped of it: the slope between the
suite's cases scale-hundredth and scale-tenth, so without what does not grow."""

N_FOLDERS = 256
MONTH_S = 30 * 86400


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars. Assumption: list prices of S3 Standard, us-east-1, first tier, December 2026."""

    gb_month: float = 0.023
    per_1000_put: float = 0.005
    per_1000_get: float = 0.0004


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machines can do. Assumptions, but for the hash rate, which is measured."""

    node_gb_s: float = 3.0  # network of a node, 25 Gbit/s
    disk_gb_s: float = 3.0  # NVMe of a node, written with O_DIRECT
    hash_gb_s: float = 3.4  # BLAKE3 on one core: `make bench BENCH=push`
    n_cores: int = 16  # of a node, for hashing
    prefix_get_s: float = 5500.0  # requests a second of one S3 prefix before it splits
    bucket_gb_s: float = 100.0  # what all nodes together get from the bucket


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is stored, and who reads it. Of its unique data each replica brought an equal part."""

    snapshot_tb: float = 1.0
    unique_tb: float = 1000.0
    n_replicas: int = 10_000
    private_gb: float = 0.5  # pages of each replica that no other has; for the simulation
    n_nodes: int = 1000
    restores_per_node_month: float = 30.0
    cached_share: float = 0.9  # of a snapshot's bytes, that a node has when it is asked


@dataclass(frozen=True, slots=True)
class Costs:
    """What it comes to. Bytes, seconds, dollars a month where the name says nothing else."""

    chunks: float
    packs: float
    tree_bytes: float
    table_bytes: float
    index_bytes: float
    tree_bytes_each: float  # of one replica
    new_bytes_each: float  # what one replica added, on average
    push_requests: float  # of one snapshot that is new
    pull_requests: float  # of one snapshot, nothing cached
    push_memory_bytes: float
    open_memory_bytes: float
    ready_alone_s: float
    ready_alone_cached_s: float
    ready_all_at_once_s: float  # all nodes, nothing cached
    ready_all_cached_s: float
    all_at_once_get_s: float  # requests a second that they then make
    storage_dollars: float
    get_dollars: float
    put_dollars_once: float


def model(fleet: Fleet, rates: Rates, prices: Prices) -> Costs:
    """The costs of a fleet."""
    snapshot_bytes, unique_bytes = fleet.snapshot_tb * 1e12, fleet.unique_tb * 1e12
    per_snapshot = snapshot_bytes / MEAN_CHUNK_BYTES
    chunks = unique_bytes / MEAN_CHUNK_BYTES
    packs = unique_bytes / PACK_BYTES
    index_bytes = chunks * INDEX_BYTES_PER_CHUNK
    tree_bytes = per_snapshot * TREE_BYTES_PER_CHUNK * fleet.n_replicas
    metadata_bytes = tree_bytes + chunks * TABLE_BYTES_PER_CHUNK + index_bytes
    pull_requests = math.ceil(snapshot_bytes / RANGE_BYTES)
    missing = 1 - fleet.cached_share
    alone_gb_s = min(rates.node_gb_s, rates.disk_gb_s, rates.hash_gb_s * rates.n_cores)
    shared_gb_s = min(alone_gb_s, rates.bucket_gb_s / fleet.n_nodes)
    ready_s = snapshot_bytes / 1e9 / alone_gb_s
    at_once_s = snapshot_bytes / 1e9 / shared_gb_s
    restores = fleet.n_nodes * fleet.restores_per_node_month
    push_requests = snapshot_bytes * PUSH_REQUESTS_PER_BYTE
    return Costs(
        chunks=chunks,
        packs=packs,
        tree_bytes=tree_bytes,
        table_bytes=chunks * TABLE_BYTES_PER_CHUNK,
        index_bytes=index_bytes,
        tree_bytes_each=per_snapshot * TREE_BYTES_PER_CHUNK,
        new_bytes_each=unique_bytes / fleet.n_replicas,
        push_requests=push_requests,
        pull_requests=pull_requests,
        push_memory_bytes=per_snapshot * PUSH_MEMORY_BYTES_PER_CHUNK,
        open_memory_bytes=per_snapshot * OPEN_MEMORY_BYTES_PER_CHUNK,
        ready_alone_s=ready_s,
        ready_alone_cached_s=ready_s * missing,
        ready_all_at_once_s=at_once_s,
        ready_all_cached_s=at_once_s * missing,
        all_at_once_get_s=fleet.n_nodes * shared_gb_s * 1e9 / RANGE_BYTES,
        storage_dollars=(unique_bytes + metadata_bytes) / 1e9 * prices.gb_month,
        get_dollars=restores * missing * pull_requests / 1000 * prices.per_1000_get,
        put_dollars_once=push_requests * fleet.unique_tb / fleet.snapshot_tb / 1000
        * prices.per_1000_put,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spread:
    """Requests to the busiest folder of packs, over the mean of all folders."""

    one_image: float
    many_images: float


def simulate_folders(n_packs: int, n_nodes: int, n_images: int, seed: int = 1) -> Spread:
    """Nodes read at once, each at a random place of its image: all the same one, or one of many.

    Packs are named by their digest, so a folder is drawn evenly for each. Counted is one request of
    each node at one moment, the worst of 200 moments.
    """
    rng = np.random.default_rng(seed)
    folder_of = rng.integers(0, N_FOLDERS, (n_images, n_packs))
    worst = {}
    for n_chosen in (1, n_images):
        peaks = []
        for _ in range(200):
            image = rng.integers(0, n_chosen, n_nodes)
            busy = folder_of[image, rng.integers(0, n_packs, n_nodes)]
            peaks.append(np.bincount(busy, minlength=N_FOLDERS).max() / (n_nodes / N_FOLDERS))
        worst[n_chosen] = float(max(peaks))
    return Spread(worst[1], worst[n_images])


def simulate_private_pages(private_share: float, run_pages: int, seed: int = 2) -> float:
    """Bytes of chunks that become new over the bytes of private pages, which lie in such runs.

    A chunk is new when one page of it is. Lengths are those of page-CDC on random data; places of
    runs are even. The store grows, and the index with it, by this factor of what really differs.
    """
    rng = np.random.default_rng(seed)
    n_pages = 1 << 23
    lengths = np.minimum(15 + rng.geometric(1 / 64, n_pages // 64), 256)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    starts = starts[starts < n_pages]
    n_runs = max(1, round(n_pages * private_share / run_pages))
    private = np.zeros(n_pages, np.bool_)
    for begin in rng.integers(0, n_pages - run_pages, n_runs).tolist():
        private[begin : begin + run_pages] = True
    is_new = np.logical_or.reduceat(private, starts)
    sizes = np.diff(starts, append=n_pages)
    return float(sizes[is_new].sum() / private.sum())


def lines(costs: Costs, fleet: Fleet, rates: Rates) -> list[str]:
    """The table for people."""
    gb = 1e9
    rows = [
        ("chunks", f"{costs.chunks / 1e6:,.0f} million"),
        ("packs", f"{costs.packs:,.0f}"),
        ("trees of all replicas", f"{costs.tree_bytes / gb:,.1f} GB"),
        ("pack tables", f"{costs.table_bytes / gb:,.1f} GB"),
        ("index", f"{costs.index_bytes / gb:,.1f} GB"),
        ("tree of one replica", f"{costs.tree_bytes_each / 1e6:,.0f} MB"),
        ("new data of one replica, mean", f"{costs.new_bytes_each / gb:,.0f} GB"),
        ("requests to push one snapshot that is all new", f"{costs.push_requests:,.0f}"),
        ("requests to pull one snapshot", f"{costs.pull_requests:,.0f}"),
        ("memory of a push, beside buffers", f"{costs.push_memory_bytes / 1e6:,.0f} MB"),
        ("memory to open a snapshot", f"{costs.open_memory_bytes / 1e6:,.0f} MB"),
        ("ready, one node, nothing cached", f"{costs.ready_alone_s:,.0f} s"),
        (
            f"ready, one node, {fleet.cached_share:.0%} cached",
            f"{costs.ready_alone_cached_s:,.0f} s",
        ),
        ("ready, all nodes at once, nothing cached", f"{costs.ready_all_at_once_s:,.0f} s"),
        (
            f"ready, all nodes at once, {fleet.cached_share:.0%} cached",
            f"{costs.ready_all_cached_s:,.0f} s",
        ),
        ("their requests a second", f"{costs.all_at_once_get_s:,.0f}"),
        (
            "of those to one of 256 folders, mean",
            f"{costs.all_at_once_get_s / N_FOLDERS:,.0f} (limit {rates.prefix_get_s:,.0f})",
        ),
        ("S3 storage a month", f"${costs.storage_dollars:,.0f}"),
        ("S3 reads a month", f"${costs.get_dollars:,.0f}"),
        ("S3 writes, once", f"${costs.put_dollars_once:,.0f}"),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = asdict(Fleet()) | asdict(Rates()) | asdict(Prices())
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default)
    options = vars(parser.parse_args(arguments))
    fleet = replace(Fleet(), **{name: options[name] for name in asdict(Fleet())})
    rates = replace(Rates(), **{name: options[name] for name in asdict(Rates())})
    prices = replace(Prices(), **{name: options[name] for name in asdict(Prices())})
    print(*lines(model(fleet, rates, prices), fleet, rates), sep="\n")
    packs_per_snapshot = max(1, int(fleet.snapshot_tb * 1e12 / PACK_BYTES))
    spread = simulate_folders(packs_per_snapshot, fleet.n_nodes, 10)
    private_share = fleet.private_gb / 1000 / fleet.snapshot_tb
    print("\nsimulated:")
    print(f"busiest folder over the mean, all read one image:  {spread.one_image:.1f}")
    print(f"busiest folder over the mean, ten images:          {spread.many_images:.1f}")
    for run_pages in (1, 16, 256):
        factor = simulate_private_pages(private_share, run_pages)
        print(f"new data over private pages, in runs of {run_pages:<10} {factor:.1f}")


if __name__ == "__main__":
    main()
