"""An image in a store as the source of a load. Every chunk is checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt import layout
from imgfmt.codec import RAW
from imgfmt.errors import CorruptData, InvalidInput, NotFound
from restore.device_sink import DeviceSink
from restore.files import Files
from restore.load_config import Verify
from restore.load_job import LoadJob
from restore.load_plan import Copy, Want, plan_files, plan_packs
from restore.sources import FileOfTree, file_of_tree, run_engine, tree_files, tree_size
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.execute import Executor
from transfer.plan import ReadPlan, plan_reads
from transfer.reader import ImageReader
from transfer.store.posix import PosixStore
from transfer.threads import Threads


@dataclass(frozen=True, slots=True)
class _Wanted:
    """For each chunk that is needed, what wants it and where it begins in its file; and zeros."""

    chunks: dict[int, list[tuple[Want, int]]]
    fills: list[Copy]


class ImageSource:
    """One member of an image in a store. Every chunk is checked."""

    def __init__(
        self, catalog: Catalog, content: MemberContent, threads: Threads, config: TransferConfig
    ) -> None:
        self._catalog = catalog
        self._content = content
        self._threads = threads
        self._config = config
        self._entries = tree_files(content.tree)
        tree = content.tree
        self.files: Mapping[str, int] = {
            path: tree_size(tree, index) for path, index in self._entries.items()
        }
        self._reader = ImageReader(Executor(catalog, [content], threads, config), tree)

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """See `Source.read`."""
        return await self._reader.read(path, offset, length)

    async def load(self, job: LoadJob) -> None:
        """See `Source.load`. Packs in a directory are read as files, unless some chunk is encoded.

        Where a pack is gone meanwhile, the executor looks where its chunks are now.
        """
        check_verified(job)
        wanted = await self._threads.run(self._wanted, job)
        store = self._catalog.store
        executor = Executor(
            self._catalog, [self._content], self._threads, self._wire_config(job),
            allocate=job.arena.allocate,
        )  # fmt: skip
        numbers = np.array(sorted(wanted.chunks), np.int64)
        raw = not (executor.table.codec[numbers] != RAW).any()
        if isinstance(store, PosixStore) and raw:
            reads = plan_reads(executor.table, numbers, span_bytes=job.config.slot_bytes)
            try:
                await self._load_packs(job, store, executor, reads, wanted)
            except NotFound:
                job.arena.reset()
            else:
                return
        await self._load_wire(job, executor, wanted)

    def _wire_config(self, job: LoadJob) -> TransferConfig:
        config = job.config
        return TransferConfig(
            block_bytes=config.slot_bytes,
            max_memory_bytes=job.arena.size_bytes,
            n_threads=config.n_threads,
        )

    def _wanted(self, job: LoadJob) -> _Wanted:
        paths = list(dict.fromkeys(spec.file for spec in job.specs))
        known = [file_of_tree(self._content.tree, self._entries[path]) for path in paths]
        found: dict[int, list[tuple[Want, int]]] = {}
        wants = job.wants({path: number for number, path in enumerate(paths)})
        for want in wants:
            first, chunks = known[want.file].first, known[want.file].chunks
            ends = chunks.offset + chunks.n_bytes
            low = int(np.searchsorted(ends, want.start, side="right"))
            high = int(np.searchsorted(chunks.offset, want.end, side="left"))
            for index in range(low, high) if want.end > want.start else ():
                found.setdefault(first + index, []).append((want, int(chunks.offset[index])))
        sizes = [self.files[path] for path in paths]
        return _Wanted(found, _zeros(wants, sizes, known, job.config.slot_bytes))

    async def _load_packs(
        self,
        job: LoadJob,
        store: PosixStore,
        executor: Executor,
        reads: ReadPlan,
        wanted: _Wanted,
    ) -> None:
        names = [name.tobytes() for name in reads.table.packs]
        numbers = {name: index for index, name in enumerate(names)}
        plan = await self._threads.run(plan_packs, reads, wanted.chunks, numbers)
        plan.fills = wanted.fills
        keys = [layout.pack_key(name) for name in names]
        files = Files(
            [os.path.join(store.root, key) for key in keys],
            [self._catalog.named(key) for key in keys],
            job.config.route,
        )

        def damaged(row: int) -> CorruptData:
            chunks = reads.wanted_as(row).tolist()
            hit = [want.tensor for number in chunks for want, _ in wanted.chunks[number]]
            return CorruptData(
                f"{executor.described(chunks[0])} is damaged; {job.naming(hit)} is lost"
            )

        await run_engine(job, plan, files, damaged, self._threads)

    async def _load_wire(self, job: LoadJob, executor: Executor, wanted: _Wanted) -> None:
        numbers = np.array(sorted(wanted.chunks), np.int64)
        job.expect(tuple({want.tensor for want, _ in wants}) for wants in wanted.chunks.values())
        sink = DeviceSink(job, wanted.chunks)
        with sink:
            await self._threads.run(sink.clear, wanted.fills)
            stats = await executor.read(sink, numbers)
        job.read_bytes += stats.fetched_bytes
        job.cpu_checked_bytes += stats.plain_bytes
        job.n_threads = job.config.n_threads
        job.stages.add(sink.times)
        job.verified = True
        if job.file_api is not None:
            job.warn_of_bounced({})


def check_verified(job: LoadJob) -> None:
    """Raise InvalidInput if an image is to be loaded unverified."""
    if job.config.verify is Verify.OFF:
        raise InvalidInput("what an image holds is always verified; use auto, cpu or device")


def _zeros(
    wants: Sequence[Want], sizes: Sequence[int], known: Sequence[FileOfTree], slot_bytes: int
) -> list[Copy]:
    """The holes within what is wanted."""
    chunks = {number: of_tree.chunks for number, of_tree in enumerate(known)}
    return plan_files(wants, sizes, chunks, slot_bytes).fills
