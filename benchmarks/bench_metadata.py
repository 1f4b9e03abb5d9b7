"""Bytes that a push writes beside the payload of chunks, for each chunk of the snapshot.

A synthetic snapshot and then a replica of which every fourth chunk or so is new, here and there,
as of GPU processes; and the real CRIU snapshots, which are so small that what every push writes
once weighs on them. Run: `make bench BENCH=metadata`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import options_of, reporting
from benchmarks.report import Report
from benchmarks.snapshots import make_process_like, make_replica, total_bytes, unpack_replicas
from benchmarks.synthetic import MeteredStore
from imgfmt.store_record import NewChunks, StoreRecord
from transfer.catalog import init_store, open_catalog
from transfer.config import TransferConfig
from transfer.push import DirectorySource, PushRequest, push

NEW_SHARE = 0.26
TARGET_BYTES = 60
PARTS = ("trees", "placements", "index", "packs")
LEAST_BYTES = 32 + 1
"""A digest and a length: what no list of chunks does without."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """What one push wrote that is no payload. `kept_bytes` are left of it in the store."""

    n_chunks: int
    n_new: int
    part_bytes: dict[str, int]
    kept_bytes: int

    @property
    def written_bytes(self) -> int:
        """All that was written."""
        return sum(self.part_bytes.values())

    @property
    def per_chunk(self) -> float:
        """Bytes written for each chunk of the snapshot, known ones counted too."""
        return self.written_bytes / self.n_chunks


def measure_push(store_folder: Path, snapshot: Path, pack_bytes: int) -> Metadata:
    """Push into the store, which is made if it is not there."""
    record = StoreRecord(
        os.urandom(16), concurrent_writers=True, codec=NewChunks.RAW, pack_bytes=pack_bytes
    )
    store, is_new = MeteredStore(str(store_folder)), not store_folder.exists()

    async def run() -> Metadata:
        if is_new:
            await init_store(store, record)
        catalog = await open_catalog(store, write=True)
        store.written_bytes.clear()
        before_bytes = total_bytes(store_folder)
        request = PushRequest([DirectorySource("main", str(snapshot))], reference=("bench", "x"))
        counts = (await push(catalog, request, config=TransferConfig())).counts
        written = dict(store.written_bytes)
        written["packs"] = written.get("packs", 0) - counts.stored_bytes
        kept_bytes = total_bytes(store_folder) - before_bytes - counts.stored_bytes
        return Metadata(counts.chunks, counts.new_chunks, written, kept_bytes)

    try:
        return asyncio.run(run())
    finally:
        store.close()


def measure(
    folder: Path, snapshots: Sequence[tuple[str, Path]], pack_bytes: int, report: Report
) -> list[Metadata]:
    """Push `snapshots` in order into one store and add a row for each."""
    found = []
    for name, snapshot in snapshots:
        result = measure_push(folder / "store", snapshot, pack_bytes)
        n = result.n_chunks
        parts = {f"{part}_b": result.part_bytes.get(part, 0) / n for part in PARTS}
        others = sum(size for part, size in result.part_bytes.items() if part not in PARTS)
        report.add(
            name,
            n_chunks=n,
            n_new=result.n_new,
            written_b_per_chunk=result.per_chunk,
            kept_b_per_chunk=result.kept_bytes / n,
            **({"target_b": TARGET_BYTES} if "replica of" in name else {}),
            **parts,
            other_b=others / n,
        )
        found.append(result)
    return found


def measure_synthetic(
    folder: Path, size_bytes: int, pack_bytes: int, report: Report
) -> list[Metadata]:
    """A snapshot of random bytes, and a replica of it."""
    first = make_process_like(folder / "first", size_bytes)
    replica = make_replica(folder / "replica", first, NEW_SHARE)
    pushed = [("process-like", first), ("replica of it", replica)]
    return measure(folder, pushed, pack_bytes, report)


def measure_real(folder: Path, pack_bytes: int, report: Report) -> list[Metadata]:
    """The shared CRIU snapshots; nothing where they are not there."""
    pushed = [(path.name, path) for path in unpack_replicas(folder)]
    return measure(folder, pushed, pack_bytes, report)


def main() -> None:
    """Measure and report."""
    parser = options_of(__doc__)
    parser.add_argument("--mb", type=float, default=3450.0, help="10^6 bytes of a snapshot")
    parser.add_argument("--pack-mib", type=int, default=128, help="where packs are closed")
    options = parser.parse_args()
    with reporting("bench_metadata", options.folder) as (folder, report):
        pack_bytes = options.pack_mib << 20
        for part in ("synthetic", "real"):
            (folder / part).mkdir()
        measure_synthetic(folder / "synthetic", int(options.mb * 1e6), pack_bytes, report)
        measure_real(folder / "real", pack_bytes, report)
        report.add("limit: digest and length", written_b_per_chunk=LEAST_BYTES)


if __name__ == "__main__":
    main()
