"""Pull: an image from a store becomes a directory, whole or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from imgfmt.compat import choose
from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput, NotFound, StoreUnavailable
from imgfmt.image import Image, Member, Variants
from imgfmt.tree import ROOT, EntryType, Tree
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.execute import Executor, ReadStats, Sink
from transfer.oserrors import printable
from transfer.plan import Numbers
from transfer.progress import Clock, PhaseClock, Progress, Silent
from transfer.pulling.attributes import Warnings, WriterProfile
from transfer.pulling.materialise import MembersWriter, TreeWriter
from transfer.pulling.names import IN_PLACE, MARKER
from transfer.pulling.resume import Resumption
from transfer.pulling.staging import Staging
from transfer.separation import check_target
from transfer.threads import Threads


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull did. `digest` is the image's own, where variants were asked for.

    `logical_bytes` counts holes, `fetched_bytes` is what was read from packs, `files` counts every
    name of a file. `warnings` say what is not as in the image; `seconds` are by phase and "total".
    """

    digest: Digest
    logical_bytes: int
    fetched_bytes: int
    chunks: int
    files: int
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]


async def choose_image(
    catalog: Catalog, digest: Digest, facts: Mapping[str, str], *, override: Collection[str] = ()
) -> tuple[Digest, Image]:
    """The image of this digest, or where that is variants, the one that fits `facts`.

    `facts` may take their time: they are asked on a thread. Rules named in `override` refuse
    nothing. Raises NotFound, or DoesNotFit if no variant fits.
    """
    found = await catalog.image(digest)
    if isinstance(found, Image):
        return digest, found
    images = await images_of(catalog, found)
    with Threads("facts", 1) as threads:
        chosen = await threads.run(choose, found, images, facts, override=override)
    return chosen, images[chosen]


async def images_of(catalog: Catalog, variants: Variants) -> dict[Digest, Image]:
    """Those of the images of variants that are there."""
    images: dict[Digest, Image] = {}
    for variant in variants.images:
        try:
            image = await catalog.image(variant.digest)
        except NotFound:
            continue
        if isinstance(image, Image):
            images[variant.digest] = image
    return images


def choose_members(image: Image, digest: Digest, member: str | None) -> tuple[Member, ...]:
    """The member of this name, or all. Raises NotFound listing the names that there are."""
    if member is None:
        return image.members
    chosen = tuple(m for m in image.members if m.name == member)
    if not chosen:
        names = ", ".join(m.name for m in image.members)
        raise NotFound(f"image {digest.short} has no member {member!r}; it has {names}")
    return chosen


async def pull(
    catalog: Catalog,
    digest: Digest,
    target: str,
    *,
    member: str | None = None,
    config: TransferConfig,
    facts: Mapping[str, str],
    progress: Progress | None = None,
    profile: WriterProfile = WriterProfile.FAITHFUL,
    resume: bool = False,
    now_s: Clock = time.monotonic,
) -> PullReport:
    """Write an image to the directory `target`, which is absent or empty.

    A single member is the directory itself, several are its subdirectories, `/` in their names
    written `+`. Where this fails or is cancelled, the target is as before; but with `resume` what
    was verified stays hidden beside or in it where the pull was killed, cancelled or cut off from
    the store, and the next one to the same target goes on with it. `facts` are of the machine that
    the image is for, and choose among variants.
    """
    clock, progress = PhaseClock(now_s), progress or Silent()
    progress.phase("resolve", 0)
    digest, image = await choose_image(catalog, digest, facts)
    members = choose_members(image, digest, member)
    contents = [await catalog.content(m.tree) for m in members]
    clock.end("resolve")
    with Threads("pull", config.n_threads) as threads:
        await threads.run(check_target, catalog.store, target)
        executor = await threads.run(Executor, catalog, contents, threads, config)
        clock.end("plan")
        trees = [content.tree for content in contents]
        staging = Staging(target, digest)
        job = _Job(executor, staging, members, trees, profile, config, resume=resume)
        with job.opened:
            stats = await job.run(progress, clock)
    return PullReport(
        digest=digest,
        logical_bytes=sum(tree.logical_bytes for tree in trees),
        fetched_bytes=stats.fetched_bytes,
        chunks=sum(tree.n_chunks for tree in trees),
        files=n_files(trees),
        warnings=job.warnings.lines(),
        seconds=clock.total(),
    )


class _How(TypedDict):
    """What all writers of a pull are told."""

    profile: WriterProfile
    warnings: Warnings
    resume: bool
    direct: bool


class _Job:
    """The part of a pull that changes the target. `opened` is to be closed after it."""

    def __init__(
        self,
        executor: Executor,
        staging: Staging,
        members: Sequence[Member],
        trees: Sequence[Tree],
        profile: WriterProfile,
        config: TransferConfig,
        *,
        resume: bool,
    ) -> None:
        self._config = config
        self._resumption = Resumption(staging, executor, trees) if resume else None
        self._executor = executor
        self._staging = staging
        self._members = members
        self._trees = trees
        self._profile = profile
        self.warnings = Warnings()
        self.opened = ExitStack()
        self.opened.callback(staging.close)

    async def run(self, progress: Progress, clock: PhaseClock) -> ReadStats:
        """Build the target and make it appear; after an error or a cancellation it is as before."""
        keep = (asyncio.CancelledError, StoreUnavailable) if self._resumption else ()
        run, staging = self._executor.threads.run, self._staging
        try:
            writer = await run(self._open)
            stats = await self._write(writer, progress, clock)
            progress.phase("publish", 0)
            finish_root = writer.finish_root if isinstance(writer, TreeWriter) else None
            await run(staging.publish, finish_root, fsync=self._config.fsync)
        except keep:
            await run(staging.leave)
            raise
        except BaseException:
            await run(staging.abandon)
            raise
        clock.end("publish")
        return stats

    def _open(self) -> TreeWriter | MembersWriter:
        """Make what is to be filled."""
        staging, trees = self._staging, self._trees
        check_names(staging, trees)
        needed_bytes = unpacked_bytes(trees)
        resume = self._resumption is not None
        if self._resumption is not None:
            needed_bytes -= self._resumption.look()
        staging.open(max(0, needed_bytes), keep=resume)
        if self._resumption is not None:
            self._resumption.begin(self._names())
            self.opened.callback(self._resumption.close)
        return self._writer(resume=resume)

    def _names(self) -> list[str]:
        """The directory of each member, relative to what is filled."""
        if len(self._trees) == 1:
            return [""]
        return [member.name.replace("/", "+") for member in self._members]

    def _writer(self, *, resume: bool) -> TreeWriter | MembersWriter:
        trees, root, where = self._trees, self._staging.root, self._staging.target
        how: _How = {
            "profile": self._profile,
            "warnings": self.warnings,
            "resume": resume,
            "direct": self._config.direct,
        }
        if len(trees) == 1:
            return TreeWriter(trees[0], root, where, **how)
        writer = MembersWriter(list(zip(self._names(), trees, strict=True)), root, where, **how)
        self.opened.callback(writer.close)
        return writer

    async def _write(
        self, writer: TreeWriter | MembersWriter, progress: Progress, clock: PhaseClock
    ) -> ReadStats:
        """Write everything but the root's attributes."""
        executor = self._executor
        await writer.prepare(executor.threads)
        clock.end("prepare")
        wanted: Numbers | None = None
        sink: Sink = writer
        sizes = executor.table.plain_bytes
        if self._resumption is not None:
            wanted, sink = self._resumption.missing, self._resumption.noting(writer)
            sizes = sizes[wanted]
        progress.phase("fetch", int(sizes.sum(dtype=np.uint64)))
        stats = await executor.read(sink, wanted, progress=progress)
        clock.end("fetch")
        progress.phase("attributes", 0)
        await writer.finish(executor.threads)
        clock.end("attributes")
        return stats


def n_files(trees: Sequence[Tree]) -> int:
    """Every name of a file counts."""
    return sum(int((tree.columns["type"] == EntryType.FILE).sum()) for tree in trees)


def unpacked_bytes(trees: Sequence[Tree]) -> int:
    """What the files of these trees take on disk; holes take nothing."""
    return sum(tree.logical_bytes - tree.zero_bytes for tree in trees)


def check_names(staging: Staging, trees: Sequence[Tree]) -> None:
    """Raise InvalidInput for names that mean something at the top of what is built in place."""
    if not staging.in_place or len(trees) != 1:
        return
    tree, target = trees[0], staging.target
    end = int(np.searchsorted(tree.columns["parent"], ROOT, side="right"))
    if taken := {*IN_PLACE, MARKER} & {tree.name(index) for index in range(1, end)}:
        raise InvalidInput(
            f"the image holds {printable(min(taken))}, which the existing {printable(target)}"
            " can't take; name a directory that does not exist yet"
        )
