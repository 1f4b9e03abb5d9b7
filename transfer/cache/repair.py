"""Trees that are complete but not to be trusted: read again, mended in place, or built anew.

A tree that is mounted or pinned keeps its files; only bytes in them are mended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError
from transfer.cache.damage import add_damage, clear_damage, mark_damage, read_damage
from transfer.cache.demote import build_again, demote, rebuild_if_wrong
from transfer.cache.durable import replace_file
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark, read_object
from transfer.cache.places import TreeFiles, files_of, missing_part
from transfer.cache.records import MAX_DAMAGED
from transfer.cache.share import Sharer, join_runs
from transfer.catalog import Catalog
from transfer.checking import bad_chunks, filled_holes, wrong_entries
from transfer.config import TransferConfig
from transfer.execute import Executor, Strict
from transfer.filesystems import sync_filesystem
from transfer.oserrors import printable, translate
from transfer.plan import Numbers
from transfer.pulling.writing import write_all
from transfer.threads import Threads

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


async def settle_doubtful(
    cache: CacheRoot,
    paths: DomainPaths,
    catalog: Catalog,
    trees: Sequence[Digest],
    threads: Threads,
    config: TransferConfig,
) -> bool:
    """Make trees that have a mark sound, or take their marks away; says whether one changed."""
    changed = False
    for tree in trees:
        mark = await threads.run(read_mark, paths, tree)
        if mark is None:
            continue
        if await threads.run(missing_part, paths, mark):
            changed |= await threads.run(build_again, cache, paths, tree)
        elif not mark.synced and mark.session != paths.disks.session(cache.session, mark.disks):
            changed |= await read_again(cache, paths, tree, threads)
        elif await threads.run(read_damage, paths, tree) is not None:
            if await threads.run(rebuild_if_wrong, cache, paths, tree):
                changed = True
            else:
                found = await mend(paths, [tree], catalog, threads, config)
                for error in found.failed.values():
                    raise error
                changed |= tree in found.sound
    return changed


async def read_again(cache: CacheRoot, paths: DomainPaths, tree: Digest, threads: Threads) -> bool:
    """Trust an unsynced tree of an earlier session if it is right; else have it built again.

    False if somebody holds its lock.
    """
    run = threads.run
    held = await run(lock, paths.lock(tree), wait=False)
    if held is None:
        return False
    with held:
        mark = await run(read_mark, paths, tree)
        if mark is None or mark.synced:
            return True
        try:
            found = await run(read_object, paths, tree)
            files = await run(files_of, paths, tree, found)
        except ImageError:
            await run(demote, cache, paths, tree, None, None)
            return True
        await run(_zero_holes, files)
        wrong = await run(wrong_entries, found, files.folders, files.names)
        every = np.arange(found.n_chunks, dtype=np.int64)
        bad = await bad_chunks(found, files.names, every, threads)
        if len(wrong) or len(bad):
            await run(demote, cache, paths, tree, files, bad)
            return True
        for folder in files.folders:
            await run(sync_filesystem, folder)
        session = paths.disks.session(cache.session, mark.disks)
        raw = replace(mark, synced=True, session=session).encode()
        await run(replace_file, paths.mark(tree), [raw], fsync=True)
    return True


_Good = dict[bytes, tuple[TreeFiles, int]]
"""For digests of chunks: the files of a sound tree, and the number of the chunk in it."""


@dataclass(frozen=True, slots=True)
class Mended:
    """Trees that are sound again, and why others could not be mended."""

    sound: list[Digest]
    failed: dict[Digest, ImageError]


async def mend(
    paths: DomainPaths,
    trees: Sequence[Digest],
    catalog: Catalog | None,
    threads: Threads,
    config: TransferConfig,
) -> Mended:
    """Mend marked trees of a domain, each as far as it can be, whatever becomes of the others.

    What another of them has right is taken from there, the rest fetched for the first tree that
    lacks it and shared with the others; without a `catalog` nothing is fetched.
    """
    found, good = Mended([], {}), _Good()
    for source in (None, catalog) if len(trees) > 1 else (catalog,):
        for digest in [tree for tree in trees if tree not in found.sound]:
            try:
                if await _mend_tree(paths, digest, source, good, threads, config):
                    found.sound.append(digest)
                    found.failed.pop(digest, None)
            except ImageError as error:
                found.failed[digest] = error
    return found


async def _mend_tree(
    paths: DomainPaths,
    digest: Digest,
    catalog: Catalog | None,
    good: _Good,
    threads: Threads,
    config: TransferConfig,
) -> bool:
    """Says whether the tree is sound again; what it has is `good` for others then."""
    run = threads.run
    held = await run(lock, paths.lock(digest), shared=True, wait=False)
    if held is None:
        return False
    with held:
        if not await run(_has_all_parts, paths, digest):
            return False  # the next `warm` builds it again
        numbers = await run(_doubted, paths, digest)
        tree = await run(read_object, paths, digest)
        files = await run(files_of, paths, digest, tree)
        await run(_zero_holes, files)
        bad = await bad_chunks(tree, files.names, numbers, threads)
        await run(_share_good, files, bad, good)
        left = await bad_chunks(tree, files.names, bad, threads)
        if len(left) and catalog is not None:
            content = await catalog.content(digest)
            executor = await run(Executor, catalog, [content], threads, config)
            await executor.read(InPlace(files), left)
        for folder in files.folders:
            await run(sync_filesystem, folder)
        if await run(wrong_entries, tree, files.folders, files.names):
            return False
        if len(await bad_chunks(tree, files.names, bad, threads)):
            return False
        good |= {tree.chunk_digest[n].tobytes(): (files, n) for n in numbers.tolist()}
        await run(clear_damage, paths, digest)
    return True


def _has_all_parts(paths: DomainPaths, digest: Digest) -> bool:
    mark = read_mark(paths, digest)
    return mark is not None and not missing_part(paths, mark)


def _doubted(paths: DomainPaths, digest: Digest) -> Numbers:
    """Chunks of a marked tree to look at: those of the mark, or all where it could not hold all."""
    damage, tree = read_damage(paths, digest), read_object(paths, digest)
    if damage is not None and len(damage.chunks) < MAX_DAMAGED:
        return np.array([n for n in damage.chunks if n < tree.n_chunks], np.int64)
    return np.arange(tree.n_chunks, dtype=np.int64)


class InPlace(Strict):
    """A sink that writes chunks into the files of a complete tree, whose attributes stay."""

    def __init__(self, files: TreeFiles) -> None:
        self._tree = files.tree
        self._names = files.names

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        for number, view in zip(numbers.tolist(), views, strict=True):
            with self.opened(number) as descriptor:
                write_all(descriptor, [view], int(self._tree.chunk_offset[number]))

    def opened(self, number: int) -> contextlib.AbstractContextManager[int]:
        """The file that has a chunk, to be written to; its times stay as they are."""
        return self.opened_entry(int(self._tree.chunk_entry[number]))

    @contextlib.contextmanager
    def opened_entry(self, entry: int) -> Iterator[int]:
        """The file of an entry, likewise."""
        name = self._names[entry]
        try:
            before = os.stat(name, follow_symlinks=False)
            descriptor = os.open(name, _WRITE)
            try:
                yield descriptor
                size = int(self._tree.columns["size"][entry])
                if os.fstat(descriptor).st_size != size:
                    os.ftruncate(descriptor, size)
                os.utime(descriptor, ns=(before.st_atime_ns, before.st_mtime_ns))
            finally:
                os.close(descriptor)
        except OSError as error:
            raise translate(error, printable(name)) from error


def _zero_holes(files: TreeFiles) -> None:
    """Make zero what has to be."""
    sink = InPlace(files)
    for entry, start, stop in filled_holes(files.tree, files.names):
        with sink.opened_entry(entry) as descriptor:
            write_all(descriptor, [memoryview(bytes(stop - start))], start)


def _share_good(files: TreeFiles, bad: Numbers, good: _Good) -> None:
    """Take bad chunks from trees that were mended before, by reflink within one disk."""
    tree, sink, sharer = files.tree, InPlace(files), Sharer()
    for number in bad.tolist():
        found = good.get(tree.chunk_digest[number].tobytes())
        if found is None:
            continue
        others, chunk = found
        other = others.tree
        one, from_one = np.array([number], np.int64), np.array([chunk], np.int64)
        runs = join_runs(tree, one, other, from_one)
        from_entry, to_entry = int(runs.source_entry[0]), int(runs.entry[0])
        disks = _disk_of(others, from_entry), _disk_of(files, to_entry)
        source = os.open(others.names[from_entry], _READ)
        try:
            with sink.opened(number) as to:
                place = int(runs.source_offset[0]), to, int(runs.offset[0]), int(runs.length[0])
                sharer.take(source, *place, disks=disks)
        finally:
            os.close(source)


def _disk_of(files: TreeFiles, entry: int) -> bytes:
    return files.places.ids[int(files.places.of[entry])]


async def find_damage(
    paths: DomainPaths, digest: Digest, threads: Threads
) -> tuple[list[bytes], list[Digest]]:
    """Read a complete tree back. Returns paths that are wrong, and the trees that were marked.

    What holds the tree's lock is the caller's affair: a tree that is read must not go away.
    """
    run = threads.run
    tree = await run(read_object, paths, digest)
    files = await run(files_of, paths, digest, tree)
    wrong = await run(wrong_entries, tree, files.folders, files.names)
    filled = await run(filled_holes, tree, files.names)
    wrong += dict.fromkeys(tree.path(entry) for entry, _, _ in filled)
    bad = await bad_chunks(tree, files.names, np.arange(tree.n_chunks, dtype=np.int64), threads)
    if not len(bad):
        if wrong:
            await run(add_damage, paths, digest, bad)
        return wrong, [digest] if wrong else []
    spoilt = {tree.path(int(tree.chunk_entry[number])) for number in bad.tolist()}
    marked = await run(mark_damage, paths, tree.chunk_digest[bad])
    return sorted({*wrong, *spoilt}), marked
