"""Pull: an image from a store becomes a directory, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput, NotFound
from imgfmt.image import Image, Member, choose
from imgfmt.tree import ROOT, EntryType, Tree
from transfer.attributes import Warnings, WriterProfile
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.execute import Executor, ReadStats
from transfer.materialise import MembersWriter, TreeWriter
from transfer.oserrors import printable
from transfer.progress import Clock, PhaseClock, Progress, Silent
from transfer.staging import MARKER, PARTIAL, Staging
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
    catalog: Catalog, digest: Digest, facts: Mapping[str, str]
) -> tuple[Digest, Image]:
    """The image of this digest, or where that is variants, the one that fits `facts`.

    Raises NotFound, or InvalidInput if no variant fits.
    """
    found = await catalog.image(digest)
    if isinstance(found, Image):
        return digest, found
    images: dict[Digest, Image] = {}
    for variant in found.images:
        try:
            image = await catalog.image(variant.digest)
        except NotFound:
            continue
        if isinstance(image, Image):
            images[variant.digest] = image
    chosen = choose(found, images, facts)
    return chosen, images[chosen]


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
    now_s: Clock = time.monotonic,
) -> PullReport:
    """Write an image to the directory `target`, which is absent or empty.

    A single member is the directory itself, several are its subdirectories, `/` in their names
    written `+`. Where this fails or is cancelled, the target is as before. `facts` are of the
    machine that the image is for, and choose among variants.
    """
    clock, progress = PhaseClock(now_s), progress or Silent()
    progress.phase("resolve", 0)
    digest, image = await choose_image(catalog, digest, facts)
    members = choose_members(image, digest, member)
    contents = [await catalog.content(m.tree) for m in members]
    clock.end("resolve")
    with Threads("pull", config.n_threads) as threads:
        executor = await threads.run(Executor, catalog, contents, threads, config)
        clock.end("plan")
        trees = [content.tree for content in contents]
        job = _Job(executor, Staging(target, digest), members, trees, profile)
        with job.opened:
            stats = await job.run(progress, clock, fsync=config.fsync)
    return PullReport(
        digest=digest,
        logical_bytes=sum(tree.logical_bytes for tree in trees),
        fetched_bytes=stats.fetched_bytes,
        chunks=sum(tree.n_chunks for tree in trees),
        files=sum(int((tree.columns["type"] == EntryType.FILE).sum()) for tree in trees),
        warnings=job.warnings.lines(),
        seconds=clock.total(),
    )


class _Job:
    """The part of a pull that changes the target. `opened` is to be closed after it."""

    def __init__(
        self,
        executor: Executor,
        staging: Staging,
        members: Sequence[Member],
        trees: Sequence[Tree],
        profile: WriterProfile,
    ) -> None:
        self._executor = executor
        self._staging = staging
        self._members = members
        self._trees = trees
        self._profile = profile
        self.warnings = Warnings()
        self.opened = ExitStack()
        self.opened.callback(staging.close)

    async def run(self, progress: Progress, clock: PhaseClock, *, fsync: bool) -> ReadStats:
        """Build the target and make it appear; after an error or a cancellation it is as before."""
        run, staging = self._executor.threads.run, self._staging
        try:
            writer = await run(self._open)
            stats = await self._write(writer, progress, clock)
            progress.phase("publish", 0)
            finish_root = writer.finish_root if isinstance(writer, TreeWriter) else None
            await run(staging.publish, finish_root, fsync=fsync)
        except BaseException:
            await run(staging.abandon)
            raise
        clock.end("publish")
        return stats

    def _open(self) -> TreeWriter | MembersWriter:
        """Make what is to be filled."""
        staging, trees = self._staging, self._trees
        if staging.in_place and len(trees) == 1:
            _check_names(trees[0], staging.target)
        staging.open(sum(tree.logical_bytes - tree.zero_bytes for tree in trees))
        root, where = staging.root, staging.target
        if len(trees) == 1:
            return TreeWriter(trees[0], root, where, profile=self._profile, warnings=self.warnings)
        names = [member.name.replace("/", "+") for member in self._members]
        named = list(zip(names, trees, strict=True))
        writer = MembersWriter(named, root, where, profile=self._profile, warnings=self.warnings)
        self.opened.callback(writer.close)
        return writer

    async def _write(
        self, writer: TreeWriter | MembersWriter, progress: Progress, clock: PhaseClock
    ) -> ReadStats:
        """Write everything but the root's attributes."""
        executor = self._executor
        await writer.prepare(executor.threads)
        clock.end("prepare")
        progress.phase("fetch", int(executor.table.plain_bytes.sum(dtype=np.uint64)))
        stats = await executor.read(writer, progress=progress)
        clock.end("fetch")
        progress.phase("attributes", 0)
        await writer.finish(executor.threads)
        clock.end("attributes")
        return stats


def _check_names(tree: Tree, target: str) -> None:
    """Raise InvalidInput for names that mean something at the top of what is built in place."""
    end = int(np.searchsorted(tree.columns["parent"], ROOT, side="right"))
    if taken := {PARTIAL, MARKER} & {tree.name(index) for index in range(1, end)}:
        raise InvalidInput(
            f"the image holds {printable(min(taken))}, which the existing {printable(target)}"
            " can't take; name a directory that does not exist yet"
        )
