"""One plan: missing trees filled from local trees, from others' flights and from the store at once.

It holds the locks of its trees, and shared ones of its donors. What it has written stays when it
fails, for the next who builds these trees.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt.errors import NotFound, OutOfResources
from transfer.cache.await_others import follow
from transfer.cache.build import Build, commit
from transfer.cache.claims import Awaited, Claimant, Claims, Twins, find_twins
from transfer.cache.disks import ByDisk
from transfer.cache.flights import OwnFlight
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.needs import Needs
from transfer.cache.owners import Donor, find_donors
from transfer.cache.places import Source, part_folders
from transfer.cache.share import Sharer, join_runs
from transfer.cache.spread import Spread
from transfer.execute import Executor, Strict, each
from transfer.plan import Numbers
from transfer.progress import Progress
from transfer.pulling.attributes import Warnings
from transfer.tasks import first_cause

SLICE_CHUNKS = 2048
"""Chunks that are shared by one thread before they are noted."""

MakeRoom = Callable[[ByDisk], Awaitable[int]]
"""Is told how many bytes are needed where, removes trees, and returns the bytes that this freed."""


@dataclass(slots=True)
class FillStats:
    """Bytes read from packs, shared by reflink and copied from local files."""

    fetched_bytes: int = 0
    shared_bytes: int = 0
    copied_bytes: int = 0


class Fill(Strict):
    """Fills `builds`, whose chunks `executor` numbers through. Close it in the end."""

    def __init__(
        self,
        cache: CacheRoot,
        paths: DomainPaths,
        executor: Executor,
        builds: Sequence[Build],
        flight: OwnFlight,
        progress: Progress,
        make_room: MakeRoom,
    ) -> None:
        self.stats = FillStats()
        self._cache = cache
        self._paths = paths
        self._executor = executor
        self._builds = builds
        self._flight = flight
        self._progress = progress
        self._make_room = make_room
        self._roots = cache.roots()
        self._needs = Needs(executor.table, builds, self._roots)
        self._claimant = Claimant(
            paths,
            executor.table,
            [build.digest for build in builds],
            flight,
            self._needs.on_disks,
            self._roots,
        )
        self._claimed: Numbers = np.zeros(0, np.int64)
        self._ignored: frozenset[str] = frozenset()  # flights that are not waited for
        self._sharer = Sharer()
        self._total_bytes = 0
        self._to_close = contextlib.ExitStack()

    async def run(self, warnings: Warnings, *, direct: bool, fsync: bool) -> FillStats:
        """Build and commit the trees. Evicts once where the disk is full."""
        run = self._executor.threads.run
        own = frozenset(build.digest for build in self._builds)
        await run(self._paths.make_on_disks)
        spread = await run(Spread, self._roots, self._paths, self._cache.session, self._flight, own)
        for build in self._builds:
            await build.open(spread, self._executor.threads, warnings, direct=direct)
        missing = np.flatnonzero(~self._done())
        self._total_bytes = self._needs.total(missing)
        self._progress.phase("fetch", self._total_bytes)
        try:
            await self._fill()
        except OutOfResources as error:
            if not (
                _is_full(error) and await self._make_room(self._needs.on_disks(self._missing()))
            ):
                raise
            await self._fill()
        self._progress.phase("commit", 0)
        for build in self._builds:
            await build.writer.finish(self._executor.threads)
            await run(build.writer.finish_root, build.root)
        await run(commit, self._cache, self._paths, self._builds, fsync=fsync)
        self.stats.shared_bytes = self._sharer.shared_bytes
        self.stats.copied_bytes = self._sharer.copied_bytes
        return self.stats

    def close(self) -> None:
        """Let go of the donors and of other builds."""
        self._to_close.close()

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        for index, where, of_tree in self._needs.by_tree(numbers):
            self._builds[index].accept(of_tree, [views[i] for i in where.tolist()])
        self._flight.advance(sum(map(len, views)), self._total_bytes)

    async def _fill(self) -> None:
        run = self._executor.threads.run
        done = self._done()
        donors, leaders, twins = await run(self._sort, done)
        copied = await run(self._needs.copied, donors, twins)
        claims = await self._claim(leaders, self._needs.on_disks(copied))
        await self._at_once(
            self._share_all(donors), self._fetch(claims.own), self._await_all(claims.awaited)
        )
        await self._take_twins(twins)
        left = self._missing()
        if len(left):  # a donor was damaged, or a twin of what came from it
            self._claimed = np.union1d(self._claimed, left)
            await self._fetch(left)
        assert not len(self._missing())

    async def _at_once(self, *works: Any) -> None:
        cause: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for work in works:
                    group.create_task(work)
        except BaseExceptionGroup as failed:
            cause = first_cause(failed)
        if cause is not None:
            raise cause

    def _sort(self, done: npt.NDArray[np.bool_]) -> tuple[list[Donor], Numbers, Twins]:
        """Donors of missing chunks; of the rest those to be had elsewhere, and their twins."""
        missing = np.flatnonzero(~done)
        digests = self._executor.table.digest
        own = frozenset(build.digest for build in self._builds)
        donors = find_donors(self._paths, self._cache.session, digests[missing], but=own)
        left = np.ones(len(missing), np.bool_)
        renumbered = []
        for donor in donors:
            self._to_close.callback(donor.lock.close)
            left[donor.wanted] = False
            numbers = missing[donor.wanted]
            renumbered.append(replace(donor, wanted=numbers))
        return renumbered, *find_twins(digests, np.flatnonzero(done), missing[left])

    async def _claim(self, wanted: Numbers, extra: ByDisk) -> Claims:
        """Claim chunks; where there is no space for them, make some once."""

        def claim() -> Claims:
            claims = self._claimant.claim(wanted, self._claimed, extra=extra, ignored=self._ignored)
            self._claimed = np.concatenate([self._claimed, claims.own])
            return claims

        run = self._executor.threads.run
        try:
            return await run(claim)
        except OutOfResources:
            needed = Counter(await run(self._needs.on_disks, wanted)) + Counter(extra)
            if not await self._make_room(needed):
                raise
        return await run(claim)

    async def _fetch(self, numbers: Numbers) -> None:
        if not len(numbers):
            return
        run = self._executor.threads.run
        for index, _, of_tree in self._needs.by_tree(np.sort(numbers)):
            await run(self._builds[index].writer.preallocate, of_tree)
        stats = await self._executor.read(self, numbers, progress=_Advancing(self._progress))
        self.stats.fetched_bytes += stats.fetched_bytes

    async def _share_all(self, donors: Sequence[Donor]) -> None:
        for donor in donors:
            with contextlib.suppress(OSError, NotFound):  # its disk is gone: it is fetched then
                source = await self._executor.threads.run(self._opened, donor)
                await self._share(source, donor.wanted, donor.chunk)

    def _opened(self, donor: Donor) -> Source:
        folders = part_folders(self._paths, donor.digest, donor.places.disks)
        return self._keep(Source.at(donor.tree, folders, donor.places))

    def _keep(self, source: Source) -> Source:
        self._to_close.callback(source.close)
        return source

    async def _share(self, source: Source, numbers: Numbers, chunks: Numbers) -> None:
        """Take chunks of the plan from the files of `source`; what can't be taken stays missing."""
        order = np.argsort(numbers, kind="stable")
        numbers, chunks = numbers[order], chunks[order]
        await self._executor.threads.run(lambda: source.names)  # once, and not by many

        async def take(job: tuple[int, Numbers, Numbers]) -> None:
            build, of_tree, chunk = self._builds[job[0]], job[1], job[2]
            runs = join_runs(build.tree, of_tree, source.tree, chunk)
            await self._executor.threads.run(build.take, of_tree, runs, source, self._sharer)
            n_bytes = int(build.tree.chunk_bytes[of_tree].sum(dtype=np.uint64))
            self._flight.advance(n_bytes, self._total_bytes)
            self._progress.advance(n_bytes)

        jobs = [
            (index, of_tree[i : i + SLICE_CHUNKS], chunks[where][i : i + SLICE_CHUNKS])
            for index, where, of_tree in self._needs.by_tree(numbers)
            for i in range(0, len(of_tree), SLICE_CHUNKS)
        ]
        await each(iter(jobs), take, self._executor.threads.n_threads)

    async def _await_all(self, awaited: list[Awaited]) -> None:
        """Take what others fetch as they go; what they leave is claimed anew."""
        while awaited:
            threads = self._executor.threads
            left, stalled = await follow(
                self._paths, awaited, self._share, self._keep, self._is_done, threads
            )
            if not len(left):
                break
            self._ignored |= stalled
            claims = await self._claim(left, {})
            await self._fetch(claims.own)
            awaited = claims.awaited

    async def _take_twins(self, twins: Twins) -> None:
        """Take chunks from where the same chunk lies in the trees that are built."""
        ready = self._done()[twins.source]
        for index, where, chunk in self._needs.by_tree(twins.source[ready]):
            await self._share(self._builds[index].source, twins.numbers[ready][where], chunk)

    def _done(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([build.done for build in self._builds])

    def _missing(self) -> Numbers:
        return np.flatnonzero(~self._done())

    def _is_done(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        return self._done()[numbers]


class _Advancing:
    """Hands on bytes, but no phases: the plan has its own."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def phase(self, name: str, total_bytes: int) -> None:
        """Ignore."""

    def advance(self, n_bytes: int) -> None:
        """Hand on."""
        self._progress.advance(n_bytes)


def _is_full(error: OutOfResources) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
