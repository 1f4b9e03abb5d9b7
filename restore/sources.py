"""Where loads read from: a directory, checked against a tree or not, or an image in a store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from imgfmt.digest import Digest, raw_digest
from imgfmt.errors import CorruptData, InvalidInput
from imgfmt.tree import EntryType, Tree
from restore.direct_storage import DirectStorage
from restore.engine import Engine
from restore.files import Files
from restore.load_config import Verify
from restore.load_job import LoadJob
from restore.load_plan import FileChunks, LoadPlan, Want, plan_files
from transfer.oserrors import printable, translate
from transfer.threads import Threads


class Source(Protocol):
    """Files by path below a root, and a way to bring ranges of them to devices."""

    @property
    def files(self) -> Mapping[str, int]:
        """Sizes of all files."""

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """Bytes of a file, fewer only at its end."""

    async def load(self, job: LoadJob) -> None:
        """Bring all that the job wants. After an error nothing is being copied any more."""


class DamagedChunk(CorruptData):
    """A piece of a file is not as in its image: it is to have this `digest`."""

    def __init__(self, message: str, digest: Digest) -> None:
        super().__init__(message)
        self.digest = digest


@dataclass(frozen=True, slots=True)
class FileOfTree:
    """Chunks of one file of a tree; its first is number `first` of the tree."""

    first: int
    chunks: FileChunks


def tree_files(tree: Tree) -> dict[str, int]:
    """Regular files of a tree by path, with the index of their entry."""
    kinds = tree.columns["type"].tolist()
    return {
        os.fsdecode(path): index
        for index, path in enumerate(tree.paths())
        if kinds[index] == EntryType.FILE
    }


def tree_size(tree: Tree, index: int) -> int:
    """Size of a file, whichever of its names `index` is."""
    return int(tree.columns["size"][tree.columns["group"][index]])


def file_of_tree(tree: Tree, index: int) -> FileOfTree:
    first, end = tree.chunk_range(int(tree.columns["group"][index]))
    offset = tree.chunk_offset[first:end].astype(np.int64)
    lengths = tree.chunk_bytes[first:end].astype(np.int64)
    return FileOfTree(first, FileChunks(offset, lengths, tree.chunk_digest[first:end]))


async def run_engine(
    job: LoadJob,
    plan: LoadPlan,
    files: Files,
    damaged: Callable[[int], CorruptData],
    threads: Threads,
) -> None:
    """Run a plan on a thread; a cancelled call stops it and waits for it."""
    storage = DirectStorage(job.file_api) if job.file_api is not None else None
    engine = Engine(
        job.driver,
        job.targets,
        job.config,
        damaged=damaged,
        settled=lambda reads: job.settle(
            [read.tensors for read in reads], sum(read.copied_bytes for read in reads)
        ),
        eager=job.eager,
        storage=storage,
    )
    job.expect(read.tensors for read in plan.reads)
    with files, ExitStack() as stack:
        if storage is not None:
            stack.callback(storage.close)
        running = asyncio.ensure_future(threads.run(engine.run, plan, files, job.arena))
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            engine.stop()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise
        if storage is not None:
            job.gpudirect_bytes += storage.n_bytes
            job.warn_of_bounced(storage.reasons)
    job.read_bytes += plan.read_bytes
    job.direct_bytes += files.direct_bytes
    job.stages.add(engine.times)
    job.n_threads = engine.n_threads
    job.cpu_checked_bytes += engine.times.checked_bytes
    job.device_checked_bytes += engine.device_checked_bytes
    job.verified = plan.checked and job.config.verify is not Verify.OFF


class DirectorySource:
    """A directory. Links are followed: model caches are made of them.

    With a `tree`, the bytes of its files are checked against it; others are not there then.
    `places` says where files are that are not below `root`.
    """

    def __init__(
        self,
        root: str,
        threads: Threads,
        tree: Tree | None = None,
        places: Mapping[str, str] | None = None,
    ) -> None:
        self._root = root
        self._places = places or {}
        self._threads = threads
        self._tree = tree
        self._entries = tree_files(tree) if tree is not None else {}
        self.files: Mapping[str, int] = self._list()

    def _list(self) -> dict[str, int]:
        if self._tree is not None:
            tree = self._tree
            return {path: tree_size(tree, index) for path, index in self._entries.items()}
        found: dict[str, int] = {}
        try:
            os.stat(self._root)
            for folder, _, names in os.walk(self._root):
                for name in names:
                    full = os.path.join(folder, name)
                    if os.path.isfile(full):
                        found[os.path.relpath(full, self._root)] = os.stat(full).st_size
        except OSError as error:
            raise translate(error, printable(self._root)) from error
        return found

    def _path(self, path: str) -> str:
        return self._places.get(path) or os.path.join(self._root, path)

    async def read(self, path: str, offset: int, length: int) -> bytes:
        """See `Source.read`."""
        length = max(0, min(length, self.files[path] - offset))
        try:
            return await self._threads.run(self._read, path, offset, length)
        except OSError as error:
            raise translate(error, printable(self._path(path))) from error

    def _read(self, path: str, offset: int, length: int) -> bytes:
        with open(self._path(path), "rb") as file:
            if self._tree is None:
                return os.pread(file.fileno(), length, offset)
            found = bytearray(length)  # what no chunk covers is zero
            chunks = file_of_tree(self._tree, self._entries[path]).chunks
            ends = chunks.offset + chunks.n_bytes
            hit = np.flatnonzero((chunks.offset < offset + length) & (ends > offset))
            for index in hit.tolist():
                begin, n_bytes = int(chunks.offset[index]), int(chunks.n_bytes[index])
                piece = os.pread(file.fileno(), n_bytes, begin)
                digest = Digest(chunks.digest[index].tobytes())
                if raw_digest((piece,)) != digest.raw:
                    raise DamagedChunk(
                        f"{printable(self._path(path))} is not as in the image at bytes {begin} to"
                        f" {begin + n_bytes}",
                        digest,
                    )
                low, high = max(begin, offset), min(begin + n_bytes, offset + length)
                found[low - offset : high - offset] = piece[low - begin : high - begin]
            return bytes(found)

    async def load(self, job: LoadJob) -> None:
        """See `Source.load`. Raises InvalidInput where there is nothing to verify by."""
        if self._tree is None and job.config.verify in (Verify.CPU, Verify.DEVICE):
            raise InvalidInput(
                "a directory alone has nothing to verify its files by; name the image that it is"
                " to be like, or use auto"
            )
        paths = list(dict.fromkeys(spec.file for spec in job.specs))
        sizes = [self.files[path] for path in paths]
        wants = job.wants({path: number for number, path in enumerate(paths)})
        chunks = None
        if self._tree is not None:
            tree = self._tree
            chunks = {n: file_of_tree(tree, self._entries[p]).chunks for n, p in enumerate(paths)}
        plan = await self._threads.run(plan_files, wants, sizes, chunks, job.config.slot_bytes)
        files = Files(
            [self._path(path) for path in paths],
            [printable(self._path(path)) for path in paths],
            job.config.route,
        )

        def damaged(row: int) -> CorruptData:
            read = next(read for read in plan.reads if read.first <= row < read.end)
            begin = read.offset + int(plan.rows["offset"][row])
            end = begin + int(plan.rows["n_bytes"][row])
            hit = [w.tensor for w in wants if w.file == read.file and _meet(w, begin, end)]
            digest = Digest(plan.rows["digest"][row].tobytes())
            return DamagedChunk(
                f"{printable(self._path(paths[read.file]))} is not as in the image at bytes {begin}"
                f" to {end}, which are to be chunk {digest.short}; {job.naming(hit)} is lost",
                digest,
            )

        await run_engine(job, plan, files, damaged, self._threads)


def _meet(want: Want, begin: int, end: int) -> bool:
    return want.start < end and want.end > begin
