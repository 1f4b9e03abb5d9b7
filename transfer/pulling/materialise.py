"""The one writer of trees: checked trees and their verified chunks become files in a directory.

A writer is told to `prepare`, to `accept` every chunk, and to `finish`. Nothing is followed: every
path is taken from the root's descriptor, every file is created exclusively, and nothing in a tree
lies beneath a link. Until `finish` directories are for their owner alone. The root is the caller's,
who makes it and removes it where writing fails, or hands it to a writer that is to `resume`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from imgfmt.tree import ROOT, EntryType, Tree
from transfer.execute import Strict, each
from transfer.oserrors import printable, translate
from transfer.parts import Parts
from transfer.plan import Numbers
from transfer.pulling.attributes import Attributes, Warnings, WriterProfile
from transfer.pulling.writing import preallocate, write_all
from transfer.threads import Threads

Entries = npt.NDArray[np.intp]
"""Indices of entries."""

_SLICE = 1024
_PREALLOCATED_BYTES = 4 * 1024 * 1024
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeWriter(Strict):
    """Writes one tree into the empty directory `root`, an open descriptor that stays the caller's.

    `where` is what messages call the root. A sink for the chunks of this tree alone. With `resume`
    the root may hold what another writer of the same tree left; chunks that it wrote stay. With
    `direct` long runs of page-aligned bytes go past the page cache. `parts`, the first of which is
    `root`, say where files go.
    """

    def __init__(
        self,
        tree: Tree,
        root: int,
        where: str,
        *,
        profile: WriterProfile,
        warnings: Warnings,
        resume: bool = False,
        direct: bool = False,
        parts: Parts | None = None,
    ) -> None:
        self._resume = resume
        self._direct = direct
        self._tree = tree
        self._root = root
        self._parts = parts or Parts.alone(root, tree)
        self._where = os.fsencode(where)
        self._paths = tree.paths()
        self._attributes = Attributes(tree, self._paths, profile, warnings)
        self._n_chunks = np.bincount(tree.chunk_entry, minlength=tree.n_entries)
        kind = tree.columns["type"]
        first_name = tree.columns["group"] == np.arange(tree.n_entries)
        self._directories = np.flatnonzero(kind == EntryType.DIRECTORY)[1:]
        self._symlinks = np.flatnonzero((kind == EntryType.SYMLINK) & first_name)
        self._files = np.flatnonzero((kind == EntryType.FILE) & first_name)
        self._hard_links = np.flatnonzero(~first_name)

    async def prepare(self, threads: Threads) -> None:
        """Make directories, symbolic links, and files that have no chunk or several."""
        for part in _slices(self._directories):  # parents first
            await threads.run(self._for_all, self._make_directory, part)
        for number, part in self._parts.folders(self._tree):
            await threads.run(self._for_all, partial(self._make_directory, part=number), part)
        await self._in_slices(threads, self._make_symlink, self._symlinks)
        await self._in_slices(threads, self._make_file, self._files_by_chunks(0))
        await self._in_slices(threads, self._make_file, self._files_by_chunks(2))

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`. Adjacent chunks of a file are written together."""
        if (numbers[1:] < numbers[:-1]).any():
            order = np.argsort(numbers, kind="stable")
            numbers, views = numbers[order], [views[i] for i in order.tolist()]
        for index, of_file in groupby(self._runs(numbers), key=itemgetter(0)):
            with self.opened(index) as descriptor:
                for _, start, (low, high) in of_file:
                    write_all(descriptor, views[low:high], start, direct=self._direct)

    def preallocate(self, numbers: Numbers) -> None:
        """Have the filesystem set aside the place of long runs of these chunks, ascending."""
        end = self._tree.chunk_offset + self._tree.chunk_bytes
        for index, of_file in groupby(self._runs(numbers), key=itemgetter(0)):
            spans = [(start, int(end[numbers[high - 1]])) for _, start, (_, high) in of_file]
            long = [(low, high) for low, high in spans if high - low >= _PREALLOCATED_BYTES]
            if long:
                with self._told(index), self._descriptor(index, _OPEN) as descriptor:
                    for low, high in long:
                        preallocate(descriptor, low, high - low)

    def _runs(self, numbers: Numbers) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Runs of adjacent chunks: entry, offset, and which of the ascending `numbers`."""
        entry, offset = self._tree.chunk_entry[numbers], self._tree.chunk_offset[numbers]
        end = offset + self._tree.chunk_bytes[numbers]
        follows = (entry[1:] == entry[:-1]) & (offset[1:] == end[:-1])
        edges = np.concatenate([[0], np.flatnonzero(~follows) + 1, [len(numbers)]])
        heads, spans = edges[:-1], pairwise(edges.tolist())
        return zip(entry[heads].tolist(), offset[heads].tolist(), spans, strict=True)

    async def finish(self, threads: Threads) -> None:
        """Make hard links, and set the attributes of all but the root."""
        unsettled = 1 if self._resume else 2  # chunks of files that `accept` has not finished
        await self._in_slices(threads, self._settle_file, self._files_by_chunks(unsettled))
        await self._in_slices(threads, self._make_hard_link, self._hard_links)
        for part in _slices(self._directories[::-1]):  # children first
            await threads.run(self._for_all, self._settle_directory, part)

    def finish_root(self, descriptor: int) -> None:
        """Set the root's attributes on a directory, as far as that is the caller's. Blocks."""
        with self._told(ROOT):
            try:
                self._attributes.settle(ROOT, descriptor)
            except PermissionError:
                self._attributes.warn(ROOT, "a directory of somebody else keeps its attributes")

    def _files_by_chunks(self, n_chunks: int) -> Entries:
        """Files with 0 chunks, or with `n_chunks` or more."""
        found = self._n_chunks[self._files]
        return self._files[found >= n_chunks if n_chunks else found == 0]

    async def _in_slices(
        self, threads: Threads, work: Callable[[int], None], entries: Entries
    ) -> None:
        async def run(part: Entries) -> None:
            await threads.run(self._for_all, work, part)

        await each(_slices(entries), run, threads.n_threads)

    def _for_all(self, work: Callable[[int], None], entries: Entries) -> None:
        for index in entries.tolist():
            with self._told(index):
                work(index)

    @contextmanager
    def _told(self, index: int) -> Iterator[None]:
        """Errors of the system become ours, about this entry."""
        try:
            yield
        except OSError as error:
            path = os.path.join(self._where, self._paths[index]) if index else self._where
            raise translate(error, printable(path)) from error

    def _make_directory(self, index: int, part: int = 0) -> None:
        root = self._parts.roots[part]
        try:
            os.mkdir(self._paths[index], 0o700, dir_fd=root)
        except FileExistsError:
            if not self._resume:
                raise
            os.chmod(self._paths[index], 0o700, dir_fd=root)

    def _make_symlink(self, index: int) -> None:
        self._clear(index)
        os.symlink(self._tree.entry(index).target, self._paths[index], dir_fd=self._root)
        self._attributes.settle_symlink(index, self._root)

    def _make_hard_link(self, index: int) -> None:
        first = self._paths[int(self._tree.columns["group"][index])]
        root = self._parts.root(index)
        self._clear(index)
        os.link(first, self._paths[index], src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)

    def _clear(self, index: int) -> None:
        """Make way for a link, which another writer may have made already."""
        if self._resume:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._paths[index], dir_fd=self._parts.root(index))

    def _make_file(self, index: int) -> None:
        with self._descriptor(index, _CREATE) as descriptor:
            os.ftruncate(descriptor, int(self._tree.columns["size"][index]))
            if not self._n_chunks[index]:
                self._attributes.settle(index, descriptor)

    @contextmanager
    def opened(self, index: int) -> Iterator[int]:
        """A file to write chunks to. One that has a single chunk is made here, and finished."""
        single = self._n_chunks[index] == 1
        with (
            self._told(index),
            self._descriptor(index, _CREATE if single else _OPEN) as descriptor,
        ):
            yield descriptor
            if single:
                os.ftruncate(descriptor, int(self._tree.columns["size"][index]))
                self._attributes.settle(index, descriptor)

    def _settle_file(self, index: int) -> None:
        with self._descriptor(index, _OPEN) as descriptor:
            self._attributes.settle(index, descriptor)

    def _settle_directory(self, index: int) -> None:
        with self._descriptor(index, _OPEN_DIRECTORY) as descriptor:
            self._attributes.settle(index, descriptor)

    @contextmanager
    def _descriptor(self, index: int, flags: int) -> Iterator[int]:
        path, root = self._paths[index], self._parts.root(index)
        if self._resume:
            flags &= ~os.O_EXCL
        try:
            descriptor = os.open(path, flags, 0o600, dir_fd=root)
        except PermissionError:
            if not self._resume:
                raise
            os.chmod(path, 0o700, dir_fd=root)  # it was settled already
            descriptor = os.open(path, flags, 0o600, dir_fd=root)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class MembersWriter(Strict):
    """Writes several trees, each into a directory of its own that it makes in `root`.

    A sink for their chunks, which are numbered through in the order of `trees`. With `resume` the
    directories may be there already; see `TreeWriter`.
    """

    def __init__(
        self,
        trees: Sequence[tuple[str, Tree]],
        root: int,
        where: str,
        *,
        profile: WriterProfile,
        warnings: Warnings,
        resume: bool = False,
        direct: bool = False,
    ) -> None:
        self._first = np.cumsum([0] + [tree.n_chunks for _, tree in trees])
        self._roots: list[int] = []
        self._writers: list[TreeWriter] = []
        for name, tree in trees:
            folder = os.path.join(where, name)
            try:
                with contextlib.suppress(*[FileExistsError] * resume):
                    os.mkdir(name, 0o700, dir_fd=root)
                self._roots.append(os.open(name, _OPEN_DIRECTORY, dir_fd=root))
            except OSError as error:
                self.close()
                raise translate(error, printable(folder)) from error
            writer = TreeWriter(
                tree,
                self._roots[-1],
                folder,
                profile=profile,
                warnings=warnings,
                resume=resume,
                direct=direct,
            )
            self._writers.append(writer)

    async def prepare(self, threads: Threads) -> None:
        """See `TreeWriter.prepare`."""
        for writer in self._writers:
            await writer.prepare(threads)

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        trees = np.searchsorted(self._first, numbers, side="right") - 1
        for tree in np.unique(trees).tolist():
            where = np.flatnonzero(trees == tree)
            of_tree = numbers[where] - self._first[tree]
            self._writers[tree].accept(of_tree, [views[i] for i in where.tolist()])

    async def finish(self, threads: Threads) -> None:
        """See `TreeWriter.finish`; here the roots of the trees are among what is finished."""
        for writer, root in zip(self._writers, self._roots, strict=True):
            await writer.finish(threads)
            await threads.run(writer.finish_root, root)

    def close(self) -> None:
        """Close the trees' directories."""
        while self._roots:
            os.close(self._roots.pop())


def _slices(entries: Entries) -> Iterator[Entries]:
    return (entries[i : i + _SLICE] for i in range(0, len(entries), _SLICE))
