"""Warm: an image is in the cache afterwards, whoever fetched it. One download a machine.

What is there costs nothing; what another process is building is waited for, and taken over if that
process dies.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from imgfmt import image as images
from imgfmt import layout
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import Conflict, CorruptData, ImageError, NotFound, StoreUnavailable
from imgfmt.image import Image, Member
from imgfmt.tree import Tree
from transfer.cache.build import Build
from transfer.cache.disks import ByDisk
from transfer.cache.durable import read_file, replace_file
from transfer.cache.evict import Watermarks, apply_watermarks, make_room
from transfer.cache.fill import Fill, FillStats
from transfer.cache.flights import Builder, OwnFlight, read_builder, read_progress
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import Lock, lock
from transfer.cache.owners import is_sound, read_mark, read_object, write_object
from transfer.cache.places import missing_part
from transfer.cache.repair import settle_doubtful
from transfer.cache.usage import touch
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.execute import Executor
from transfer.filesystems import sync_filesystem
from transfer.memory_limit import is_memory_limited
from transfer.progress import Clock, PhaseClock, Progress, Silent
from transfer.pull import choose_image, choose_members
from transfer.pulling.attributes import Warnings
from transfer.threads import Threads

_POLL_S = 0.02
_MAX_POLL_S = 0.2
_STALLED_S = 600.0
_TRIES = 100
_MAX_STEPS = 6
"""How often one call builds or mends a tree before it gives up: it does not stay then."""


@dataclass(frozen=True, slots=True)
class WarmConfig:
    """`direct` goes past the page cache: for what is not read at once.

    So does everything where this process may not use all memory: page cache is charged to it then.
    `n_threads` do hashing, writing and sharing; they wait for the disk more than they compute.
    """

    transfer: TransferConfig = field(default_factory=TransferConfig)
    n_threads: int = max(4, min(16, os.cpu_count() or 1))
    direct: bool = True
    watermarks: Watermarks = field(default_factory=Watermarks)


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What it took to have an image. `built` are trees that this call completed.

    `evicted_bytes` are those of other trees that were removed for it.
    """

    digest: Digest
    members: tuple[Member, ...]
    built: int
    waited: int
    fetched_bytes: int
    shared_bytes: int
    copied_bytes: int
    logical_bytes: int
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    evicted_bytes: int = 0


async def warm(
    cache: CacheRoot,
    paths: DomainPaths,
    catalog: Catalog,
    digest: Digest,
    *,
    member: str | None = None,
    config: WarmConfig,
    facts: Mapping[str, str],
    progress: Progress | None = None,
    now_s: Clock = time.monotonic,
) -> WarmReport:
    """Have an image, or one member of it, in the domain `paths`, which must be that of `catalog`.

    Where this fails or is cancelled, what was fetched stays for the next.
    """
    clock = PhaseClock(now_s)
    progress = progress or Silent()
    progress.phase("resolve", 0)
    digest, image = await choose_image(catalog, digest, facts)
    members = choose_members(image, digest, member)
    with Threads("cache", config.n_threads) as threads, cache.told():
        is_new = await threads.run(_keep_image, paths, digest, image)
        clock.end("resolve")
        job = _Warming(cache, paths, catalog, threads, config, progress)
        trees = sorted({m.tree for m in members})
        await job.run(trees)
        if is_new and not job.built:  # else it was synced with the trees
            await threads.run(sync_filesystem, cache.path)
        clock.end("fill")
        for tree in trees:
            await threads.run(touch, paths, tree)
        if job.built:
            keep = frozenset(trees)
            marks = config.watermarks
            evicted = await threads.run(apply_watermarks, cache, marks, keep=keep)
            job.evicted_bytes += sum(item.freed_bytes for item in evicted)
        clock.end("settle")
    return WarmReport(
        digest=digest,
        members=members,
        built=job.built,
        waited=len(job.waited),
        fetched_bytes=job.stats.fetched_bytes,
        shared_bytes=job.stats.shared_bytes,
        copied_bytes=job.stats.copied_bytes,
        logical_bytes=job.logical_bytes,
        warnings=job.warnings.lines(),
        seconds=clock.total(),
        evicted_bytes=job.evicted_bytes,
    )


class _Warming:
    """One call of `warm`, once it knows its trees."""

    def __init__(
        self,
        cache: CacheRoot,
        paths: DomainPaths,
        catalog: Catalog,
        threads: Threads,
        config: WarmConfig,
        progress: Progress,
    ) -> None:
        self._cache = cache
        self._paths = paths
        self._catalog = catalog
        self._threads = threads
        self._config = config
        self._progress = progress
        self.warnings = Warnings()
        self.stats = FillStats()
        self.built = 0
        self.logical_bytes = 0
        self.evicted_bytes = 0
        self.waited: set[Digest] = set()
        self._steps: Counter[Digest] = Counter()
        self._lost: dict[Digest, str] = {}

    async def run(self, trees: Sequence[Digest]) -> None:
        """Return when all of these trees are complete and sound.

        Raises Conflict if one of them does not stay so.
        """
        run, fruitless = self._threads.run, 0
        while True:
            await run(self._cache.check_there)
            missing = [tree for tree in trees if not await run(self._is_sound, tree)]
            if not missing:
                return
            held = await run(self._try_locks, missing)
            try:
                if held:
                    self._count(held)
                    await self._build(held)
                    continue
            finally:
                for taken in held.values():
                    taken.close()
            marked = await run(self._marked, missing)
            if await settle_doubtful(
                self._cache,
                self._paths,
                self._catalog,
                missing,
                self._threads,
                self._config.transfer,
            ):
                self._count(marked)
            else:
                await self._wait(missing[0])
                fruitless += 1
                if fruitless > _TRIES and await run(os.path.exists, self._paths.mark(missing[0])):
                    raise CorruptData(
                        f"tree {missing[0].short} stays damaged; `snapcask cache verify` tells more"
                    )
                await asyncio.sleep(_POLL_S)

    def _is_sound(self, tree: Digest) -> bool:
        if is_sound(self._paths, tree, self._cache.session):
            return True
        mark = read_mark(self._paths, tree) if self._steps[tree] else None
        if mark is not None:
            self._lost[tree] = missing_part(self._paths, mark)
        return False

    def _marked(self, trees: Iterable[Digest]) -> list[Digest]:
        return [tree for tree in trees if os.path.exists(self._paths.mark(tree))]

    def _count(self, trees: Iterable[Digest]) -> None:
        """Note that these are built or mended. Raises Conflict after too many times."""
        for tree in trees:
            if self._steps[tree] >= _MAX_STEPS:
                lost = self._lost.get(tree) or "is gone from the cache"
                raise Conflict(
                    f"tree {tree.short} does not stay: whenever it is complete it {lost}; find out"
                    " what removes files there, and try again"
                )
            self._steps[tree] += 1

    def _try_locks(self, trees: Sequence[Digest]) -> dict[Digest, Lock]:
        """Locks of those trees that have no mark and nobody builds."""
        held = {}
        for tree in trees:
            if os.path.exists(self._paths.mark(tree)):
                continue
            taken = lock(self._paths.lock(tree), wait=False)
            if taken is not None and os.path.exists(self._paths.mark(tree)):
                taken.close()  # it was completed just now
            elif taken is not None:
                held[tree] = taken
        return held

    async def _build(self, held: Mapping[Digest, Lock]) -> None:
        """Build the trees whose locks are held, as one plan."""
        config, run = self._config, self._threads.run
        flight = OwnFlight(self._paths)
        for taken in held.values():
            taken.write(Builder.of_this(flight).encode())
        contents = [await self._content(tree) for tree in held]
        executor = await run(Executor, self._catalog, contents, self._threads, config.transfer)
        builds = [
            Build(self._cache, self._paths, tree, content)
            for tree, content in zip(held, contents, strict=True)
        ]
        keep = frozenset(held)

        async def room(needed: ByDisk) -> int:
            evicted = await run(make_room, self._cache, needed, keep=keep, own=flight)
            freed = sum(item.freed_bytes for item in evicted)
            self.evicted_bytes += freed
            return freed

        fill = Fill(self._cache, self._paths, executor, builds, flight, self._progress, room)
        try:
            direct = config.direct or await run(is_memory_limited)
            stats = await fill.run(self.warnings, direct=direct, fsync=config.transfer.fsync)
        finally:
            fill.close()
            for build in builds:
                build.close()
            flight.close()
        self.built += len(builds)
        self.logical_bytes += sum(build.tree.logical_bytes for build in builds)
        self.stats.fetched_bytes += stats.fetched_bytes
        self.stats.shared_bytes += stats.shared_bytes
        self.stats.copied_bytes += stats.copied_bytes

    async def _content(self, digest: Digest) -> MemberContent:
        """A tree, kept or from the store, and its placement; the tree object is kept."""
        try:
            tree = await self._threads.run(read_object, self._paths, digest)
        except ImageError:
            raw = await self._catalog.read(layout.tree_key(digest))
            what = self._catalog.named(f"tree {digest.short}")
            if digest_of(raw) != digest:
                raise CorruptData(f"{what} does not have its digest; restore it") from None
            tree = Tree(raw, what)
            await self._threads.run(write_object, self._paths, digest, raw)
        return MemberContent(tree, await self._catalog.placement(digest, tree.n_chunks))

    async def _wait(self, tree: Digest) -> None:
        """Wait until a tree that another process builds is complete, or that process is gone."""
        self.waited.add(tree)
        shown = -1
        poll_s, changed_s = _POLL_S, time.monotonic()
        while not await self._threads.run(os.path.exists, self._paths.mark(tree)):
            taken = await self._threads.run(lock, self._paths.lock(tree), wait=False)
            if taken is not None:
                taken.close()
                return
            builder = await self._threads.run(read_builder, self._paths.lock(tree))
            path = os.path.join(self._paths.flights, builder.flight) if builder else ""
            done, total = read_progress(path) if path else (0, 0)
            if done != shown:
                self._show(shown, done, total)
                shown, changed_s = done, time.monotonic()
            elif time.monotonic() - changed_s > _STALLED_S:
                who = f"process {builder.pid}" if builder else "another process"
                raise StoreUnavailable(
                    f"{who} is fetching tree {tree.short} and brought nothing for"
                    f" {_STALLED_S:.0f} s; end it and try again"
                )
            await asyncio.sleep(poll_s * random.uniform(0.5, 1.0))
            poll_s = min(_MAX_POLL_S, poll_s * 1.5)

    def _show(self, before: int, done: int, total: int) -> None:
        if before <= 0:
            self._progress.phase("wait", total)
        self._progress.advance(max(0, done - max(0, before)))


def _keep_image(paths: DomainPaths, digest: Digest, image: Image) -> bool:
    """Keep the image record, not synced; says whether it is new."""
    raw = image.encode()
    if read_file(paths.image(digest)) == raw:
        return False
    replace_file(paths.image(digest), [raw], fsync=False)
    return True


def local_image(paths: DomainPaths, digest: Digest) -> Image:
    """An image that the cache knows; no store is asked. Raises NotFound, CorruptData. Blocks."""
    raw = read_file(paths.image(digest))
    if raw is None:
        raise NotFound(f"image {digest.short} is not in the cache; `snapcask prefetch` fetches it")
    what = f"image {digest.short} of the cache"
    if digest_of(raw) != digest:
        raise CorruptData(f"{what} does not have its digest; warm it again")
    found = images.decode_image_or_variants(raw, what)
    if not isinstance(found, Image):
        raise CorruptData(f"{what} is a list of variants")
    return found
