"""One tree being built in `partial/`, and its commit. The caller holds the tree's lock."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Sequence

import numpy as np

from imgfmt.digest import Digest
from transfer.attributes import Warnings, WriterProfile
from transfer.cache.durable import TEMPORARY, remove_file, replace_file, sync_folder
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.records import Mark
from transfer.cache.share import Runs, Sharer
from transfer.catalog import MemberContent
from transfer.checking import bad_chunks
from transfer.filesystems import sync_filesystem
from transfer.journal import Flags, Journal, begin_journal, read_journal
from transfer.materialise import TreeWriter
from transfer.plan import Numbers
from transfer.staging import remove_tree
from transfer.threads import Threads

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


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
        self.root = -1
        self._cache = cache
        self._paths = paths
        self._guard = threading.Lock()
        self._journal: Journal | None = None
        self._writer: TreeWriter | None = None

    @property
    def writer(self) -> TreeWriter:
        """What writes the files, once the build is open."""
        assert self._writer is not None
        return self._writer

    async def open(self, threads: Threads, warnings: Warnings, *, direct: bool) -> None:
        """Go on with what is there, or begin."""
        resumed = await threads.run(self._find)
        if resumed:
            self.done = await self._trusted(threads)
        await threads.run(self._begin, resumed, warnings, direct=direct)
        await self.writer.prepare(threads)

    def _find(self) -> bool:
        """Whether there is something to go on with; if not, the place is free then."""
        final, partial = self._paths.tree(self.digest), self.folder
        if os.path.isdir(final):  # a commit that was cut off, or a removal
            if os.path.isdir(partial):
                discard(self._cache, final)
            else:
                os.rename(final, partial)
        journal = self._paths.journal(self.digest)
        if os.path.isdir(partial):
            if read_journal(journal, self.digest, self.tree.n_chunks) is not None:
                return True
            discard(self._cache, partial)
        remove_file(journal)
        return False

    async def _trusted(self, threads: Threads) -> Flags:
        """The chunks of the journal; those of another session only if they are right."""
        path = self._paths.journal(self.digest)
        found = await threads.run(read_journal, path, self.digest, self.tree.n_chunks)
        if found is None:
            return self.done
        if found.session != self._cache.session:
            numbers = np.flatnonzero(found.done)
            found.done[await bad_chunks(self.tree, self.folder, numbers, threads)] = False
        return found.done

    def _begin(self, resumed: bool, warnings: Warnings, *, direct: bool) -> None:
        if not resumed:
            os.mkdir(self.folder, 0o700)
        self.root = os.open(self.folder, _DIRECTORY)
        os.fchmod(self.root, 0o700)
        journal = self._paths.journal(self.digest)
        self._journal = begin_journal(journal, self.digest, self.done, self._cache.session)
        self._writer = TreeWriter(
            self.tree,
            self.root,
            self.folder,
            profile=WriterProfile.SANITISED,
            warnings=warnings,
            resume=True,
            direct=direct,
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

    def take(
        self, numbers: Numbers, runs: Runs, source_root: int, names: Sequence[bytes], by: Sharer
    ) -> None:
        """Take `numbers` from the files of another tree, which are at `names` below `source_root`.

        `runs` were made of them. What can't be taken is left undone. Blocks.
        """
        for entry, low, high in runs.by_entry():
            with self.writer.opened(entry) as to:
                taken = self._take_file(to, runs, low, high, source_root, names, by)
            of_file = numbers[runs.first[low] : runs.first[taken]]
            if len(of_file):
                self.note(of_file)

    def _take_file(
        self,
        to: int,
        runs: Runs,
        low: int,
        high: int,
        root: int,
        names: Sequence[bytes],
        by: Sharer,
    ) -> int:
        """Take runs [low, high) of one file; returns the first that could not be taken."""
        opened = source = -1
        k = low
        try:
            for k in range(low, high):
                wanted = int(runs.source_entry[k])
                if wanted != opened:
                    if source >= 0:
                        os.close(source)
                        source = -1
                    source, opened = os.open(names[wanted], _READ, dir_fd=root), wanted
                place = int(runs.source_offset[k]), to, int(runs.offset[k]), int(runs.length[k])
                by.take(source, *place)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return k
        finally:
            if source >= 0:
                os.close(source)
        return high

    def close(self) -> None:
        """Give up descriptors."""
        if self._journal is not None:
            self._journal.close()
        if self.root >= 0:
            os.close(self.root)
            self.root = -1


def commit(cache: CacheRoot, paths: DomainPaths, builds: Sequence[Build], *, fsync: bool) -> None:
    """Make finished trees complete: synced together, renamed, marked last. Blocks."""
    cache.check_there()
    marks = [_prepared_mark(cache, paths, build, fsync=fsync) for build in builds]
    if fsync:
        sync_filesystem(cache.path)
    for build in builds:
        os.rename(build.folder, paths.tree(build.digest))
    if fsync:
        sync_folder(os.path.join(paths.folder, "trees"))
    for build, mark in zip(builds, marks, strict=True):
        os.rename(mark, paths.mark(build.digest))
    if fsync:
        sync_folder(os.path.join(paths.folder, "marks"))
    for build in builds:
        remove_file(paths.damage(build.digest))
        remove_file(paths.journal(build.digest))


def _prepared_mark(cache: CacheRoot, paths: DomainPaths, build: Build, *, fsync: bool) -> str:
    """Write the mark of a tree under another name, so that it is synced with the tree."""
    tree = build.tree
    mark = Mark(
        build.digest,
        synced=fsync,
        session=cache.session,
        logical_bytes=tree.logical_bytes,
        data_bytes=tree.logical_bytes - tree.zero_bytes,
        time_ns=max(0, time.time_ns()),
    )
    path = os.path.join(paths.folder, "marks", f"{TEMPORARY}{build.digest.hex}")
    replace_file(path, [mark.encode()], fsync=False)
    return path


def discard(cache: CacheRoot, path: str) -> None:
    """Remove a directory: moved to `trash/` first, so that it is never half there. Blocks."""
    name = f"{os.path.basename(path)[:80]}-{secrets.token_hex(8)}"
    os.rename(path, os.path.join(cache.trash, name))
    empty_trash(cache, name)


def empty_trash(cache: CacheRoot, *names: str) -> None:
    """Remove what lies in `trash/`, or these names of it, as far as that is possible."""
    descriptor = os.open(cache.trash, _DIRECTORY)
    try:
        for name in names or os.listdir(descriptor):
            with contextlib.suppress(OSError):
                remove_tree(os.fsencode(name), descriptor)
    finally:
        os.close(descriptor)
