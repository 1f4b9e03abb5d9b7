"""One tree being built in `partial/`, and its commit. The caller holds the tree's lock.

What is said of folders holds for the part of the tree on each disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Sequence

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError
from transfer.cache.disks import MAIN
from transfer.cache.durable import TEMPORARY, remove_file, replace_file, sync_folder
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.places import (
    Places,
    Source,
    TreeFiles,
    part_folders,
    read_places,
    write_places,
)
from transfer.cache.records import Mark
from transfer.cache.share import Runs, Sharer
from transfer.cache.spread import Spread
from transfer.cache.trash import discard, discard_at, take_back
from transfer.catalog import MemberContent
from transfer.checking import bad_chunks
from transfer.filesystems import sync_filesystem
from transfer.parts import Parts
from transfer.plan import Numbers
from transfer.pulling.attributes import Warnings, WriterProfile
from transfer.pulling.journal import Flags, Journal, begin_journal, read_journal
from transfer.pulling.materialise import TreeWriter
from transfer.threads import Threads

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Build:
    """Fills one tree. `done` has the chunks that are in their files; close it in the end.

    What was built stays for the next who builds the tree, whatever happens.
    """

    def __init__(
        self, cache: CacheRoot, paths: DomainPaths, digest: Digest, content: MemberContent
    ) -> None:
        self.digest = digest
        self.content = content
        self.tree = content.tree
        self.folder = paths.partial(digest)
        self.done: Flags = np.zeros(self.tree.n_chunks, np.bool_)
        self.places = Places.all_on_main(self.tree)
        self.roots: list[int] = []
        self._cache = cache
        self._paths = paths
        self._guard = threading.Lock()
        self._journal: Journal | None = None
        self._writer: TreeWriter | None = None
        self._source: Source | None = None

    @property
    def writer(self) -> TreeWriter:
        """What writes the files, once the build is open."""
        assert self._writer is not None
        return self._writer

    @property
    def source(self) -> Source:
        """Its own files, once the build is open, to take chunks from."""
        assert self._source is not None
        return self._source

    @property
    def session(self) -> bytes:
        """That of all disks that it is written to."""
        return self._paths.disks.session(self._cache.session, self.places.disks)

    @property
    def root(self) -> int:
        """The directory of the main part, once the build is open."""
        return self.roots[0]

    async def open(
        self, spread: Spread, threads: Threads, warnings: Warnings, *, direct: bool
    ) -> None:
        """Go on with what is there, or begin where `spread` says."""
        kept = await threads.run(self._find)
        if kept is not None:
            self.done = await self._trusted(kept, spread.ids, threads)
        self.places = await threads.run(spread.place, self.tree, kept)
        await threads.run(self._begin, kept is not None, warnings, direct=direct)
        await self.writer.prepare(threads)

    def _find(self) -> Places | None:
        """Where the files are that there is to go on with; if there are none, the place is free."""
        take_back(self._cache, self._paths, self.digest)
        journal = self._paths.journal(self.digest)
        if os.path.isdir(self.folder):
            if read_journal(journal, self.digest, self.tree.n_chunks) is not None:
                with contextlib.suppress(ImageError):
                    return read_places(self._paths, self.digest, self.tree)
            discard(self._cache, self.folder)
        remove_file(journal)
        return None

    async def _trusted(self, kept: Places, ids: Sequence[bytes], threads: Threads) -> Flags:
        """The chunks of the journal; those of another session only if they are right.

        None of those on a disk that is not among `ids`.
        """
        path, disks = self._paths.journal(self.digest), self._paths.disks
        found = await threads.run(read_journal, path, self.digest, self.tree.n_chunks)
        if found is None:
            return self.done
        there = [disk for disk in kept.disks if disk in ids]
        is_there = np.array([disk in ids for disk in kept.ids])
        found.done[~is_there[kept.of[self.tree.chunk_entry]]] = False
        if found.session != disks.session(self._cache.session, there):
            folders = [self._on(disk).partial(self.digest) for disk in kept.ids]
            names = TreeFiles(self.tree, folders, kept).names
            numbers = np.flatnonzero(found.done)
            found.done[await bad_chunks(self.tree, names, numbers, threads)] = False
        return found.done

    def _on(self, disk_id: bytes) -> DomainPaths:
        """The domain on a disk; on the main one, if that disk is not there."""
        disk = self._paths.disks.find(disk_id)
        return self._paths if disk is None else self._paths.on(disk)

    def _begin(self, resumed: bool, warnings: Warnings, *, direct: bool) -> None:
        for disk in self._paths.disks.there():
            if not resumed or disk.id not in self.places.disks:
                with contextlib.suppress(FileNotFoundError):
                    discard_at(disk.path, self._paths.on(disk).partial(self.digest))
        journal = self._paths.journal(self.digest)
        self._journal = begin_journal(journal, self.digest, self.done, self.session)
        write_places(self._paths, self.digest, self.places)  # after what is not there any more
        folders = part_folders(self._paths, self.digest, self.places.disks, partial=True)
        for folder in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            os.chmod(folder, 0o700)
        self.roots = [os.open(folder, _DIRECTORY) for folder in folders]
        self._source = Source(self.tree, self.roots, self.places)
        self._writer = TreeWriter(
            self.tree,
            self.root,
            self.folder,
            profile=WriterProfile.SANITISED,
            warnings=warnings,
            resume=True,
            direct=direct,
            parts=Parts(self.roots, self.places.of),
        )

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """Write verified chunks and note them. From any thread."""
        self.writer.accept(numbers, views)
        self.note(numbers)

    def note(self, numbers: Numbers) -> None:
        """These chunks are in their files now."""
        assert self._journal is not None
        with self._guard:
            self._journal.append(numbers)
            self.done[numbers] = True

    def take(self, numbers: Numbers, runs: Runs, source: Source, by: Sharer) -> None:
        """Take `numbers` from the files of another tree.

        `runs` were made of them. What can't be taken is left undone. Blocks.
        """
        for entry, low, high in runs.by_entry():
            with self.writer.opened(entry) as to:
                taken = self._take_file(to, runs, low, high, source, by)
            of_file = numbers[runs.first[low] : runs.first[taken]]
            if len(of_file):
                self.note(of_file)

    def _take_file(
        self, to: int, runs: Runs, low: int, high: int, source: Source, by: Sharer
    ) -> int:
        """Take runs [low, high) of one file; returns the first that could not be taken."""
        opened = descriptor = -1
        own_disk, disk = self.source.disk(int(runs.entry[low])), MAIN
        k = low
        try:
            for k in range(low, high):
                wanted = int(runs.source_entry[k])
                if wanted != opened:
                    if descriptor >= 0:
                        os.close(descriptor)
                        descriptor = -1
                    descriptor, opened = source.open(wanted), wanted
                    disk = source.disk(wanted)
                place = int(runs.source_offset[k]), to, int(runs.offset[k]), int(runs.length[k])
                by.take(descriptor, *place, disks=(disk, own_disk))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return k
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return high

    def close(self) -> None:
        """Give up descriptors."""
        if self._journal is not None:
            self._journal.close()
        while self.roots:
            os.close(self.roots.pop())


def commit(cache: CacheRoot, paths: DomainPaths, builds: Sequence[Build], *, fsync: bool) -> None:
    """Make finished trees complete: synced together, renamed, marked last. Blocks."""
    cache.check_there()
    touched = {disk for build in builds for disk in build.places.disks}
    cache.check_disks(touched)
    marks = [_prepared_mark(paths, build, fsync=fsync) for build in builds]
    disks = [disk for disk in cache.disks if disk.id in touched]
    if fsync:
        for root in (*(disk.path for disk in disks), cache.path):
            sync_filesystem(root)
    for disk in disks:
        own = [build for build in builds if disk.id in build.places.disks]
        _name(paths.on(disk), own, fsync=fsync)
    _name(paths, builds, fsync=fsync)
    for build, mark in zip(builds, marks, strict=True):
        os.rename(mark, paths.mark(build.digest))
    if fsync:
        sync_folder(os.path.join(paths.folder, "marks"))
    for build in builds:
        remove_file(paths.damage(build.digest))
        remove_file(paths.journal(build.digest))


def _name(paths: DomainPaths, builds: Sequence[Build], *, fsync: bool) -> None:
    """Give the parts on one disk their final names."""
    for build in builds:
        os.rename(paths.partial(build.digest), paths.tree(build.digest))
    if fsync:
        sync_folder(os.path.join(paths.folder, "trees"))


def _prepared_mark(paths: DomainPaths, build: Build, *, fsync: bool) -> str:
    """Write the mark of a tree under another name, so that it is synced with the tree."""
    tree = build.tree
    mark = Mark(
        build.digest,
        synced=fsync,
        session=build.session,
        logical_bytes=tree.logical_bytes,
        data_bytes=tree.logical_bytes - tree.zero_bytes,
        time_ns=max(0, time.time_ns()),
        disks=build.places.disks,
    )
    path = os.path.join(paths.folder, "marks", f"{TEMPORARY}{build.digest.hex}")
    replace_file(path, [mark.encode()], fsync=False)
    return path
