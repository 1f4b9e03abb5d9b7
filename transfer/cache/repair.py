"""Trees that are complete but not to be trusted: read again, mended in place, or built anew.

A tree that is mounted or pinned keeps its files; only bytes in them are mended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, ImageError
from imgfmt.tree import Tree
from transfer.cache.build import discard
from transfer.cache.damage import add_damage, clear_damage, damaged_trees, mark_damage, read_damage
from transfer.cache.durable import remove_file, replace_file, sync_folder
from transfer.cache.evict import is_mounted
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark, read_object
from transfer.cache.records import MAX_DAMAGED, Damage
from transfer.cache.share import Sharer, join_runs
from transfer.catalog import Catalog
from transfer.checking import bad_among, bad_chunks, wrong_entries
from transfer.config import TransferConfig
from transfer.execute import Executor, Strict
from transfer.filesystems import sync_filesystem
from transfer.journal import begin_journal
from transfer.oserrors import printable, translate
from transfer.plan import Numbers
from transfer.threads import Threads
from transfer.writing import write_all

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
        if not mark.synced and mark.session != cache.session:
            changed |= await read_again(cache, paths, tree, threads)
        elif await threads.run(read_damage, paths, tree) is not None:
            if await threads.run(_rebuild_if_wrong, cache, paths, tree):
                changed = True
            else:
                changed |= tree in await mend(cache, paths, catalog, threads, config)
    return changed


def _rebuild_if_wrong(cache: CacheRoot, paths: DomainPaths, digest: Digest) -> bool:
    """Make a tree an unfinished one if it has not the files that it must have. Blocks."""
    held = lock(paths.lock(digest), wait=False)
    if held is None:
        return False
    with held:
        try:
            tree = read_object(paths, digest)
        except ImageError:
            demote(cache, paths, digest, None, None)
            return True
        if not wrong_entries(tree, paths.tree(digest)):
            return False
        known = _all_bad(tree, paths.tree(digest), read_damage(paths, digest))
        demote(cache, paths, digest, tree, known)
        remove_file(paths.damage(digest))
    return True


def _all_bad(tree: Tree, root: str, damage: Damage | None) -> Numbers:
    """Chunks of a tree that are known to be bad, or are not in their files. Blocks."""
    names = [os.path.join(os.fsencode(root), path) for path in tree.paths()]
    bad = bad_among(tree, names, np.arange(tree.n_chunks, dtype=np.int64))
    known = np.array(damage.chunks if damage else (), np.int64)
    return np.union1d(bad, known[known < tree.n_chunks])


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
        except ImageError:
            await run(demote, cache, paths, tree, None, None)
            return True
        wrong = await run(wrong_entries, found, paths.tree(tree))
        every = np.arange(found.n_chunks, dtype=np.int64)
        bad = await bad_chunks(found, paths.tree(tree), every, threads)
        if len(wrong) or len(bad):
            await run(demote, cache, paths, tree, found, bad)
            return True
        await run(sync_filesystem, cache.path)
        raw = replace(mark, synced=True, session=cache.session).encode()
        await run(replace_file, paths.mark(tree), [raw], fsync=True)
    return True


def demote(
    cache: CacheRoot, paths: DomainPaths, digest: Digest, tree: Tree | None, bad: Numbers | None
) -> None:
    """Make a complete tree an unfinished one that has all but its `bad` chunks. Blocks.

    The lock is the caller's. One that is mounted only gets its bad chunks marked; raises
    CorruptData if that is not enough.
    """
    if is_mounted(paths, digest):
        if tree is None or bad is None or wrong_entries(tree, paths.tree(digest)):
            raise CorruptData(
                f"tree {digest.short} is mounted and its files are not as they must be; unmount it"
                " and try again"
            )
        add_damage(paths, digest, bad)
        mark = read_mark(paths, digest)
        if mark is not None:
            raw = replace(mark, synced=True).encode()
            replace_file(paths.mark(digest), [raw], fsync=True)
        return
    remove_file(paths.mark(digest))
    sync_folder(os.path.dirname(paths.mark(digest)))
    if (
        tree is None
        or bad is None
        or set(wrong_entries(tree, paths.tree(digest))) - set(tree.paths())
    ):
        remove_file(paths.object(digest))
        remove_file(paths.owners(digest))
        if os.path.isdir(paths.tree(digest)):
            discard(cache, paths.tree(digest))
        return
    done = np.ones(tree.n_chunks, np.bool_)
    done[bad] = False
    begin_journal(paths.journal(digest), digest, done, cache.session).close()
    if os.path.isdir(paths.partial(digest)):
        discard(cache, paths.partial(digest))
    os.rename(paths.tree(digest), paths.partial(digest))


async def mend(
    cache: CacheRoot,
    paths: DomainPaths,
    catalog: Catalog,
    threads: Threads,
    config: TransferConfig,
) -> list[Digest]:
    """Mend the marked trees of a domain; returns those that are sound again.

    A chunk is fetched for the first tree that has it, and shared from there to the others.
    """
    run = threads.run
    mended: list[Digest] = []
    good: _Good = {}
    for digest in await run(damaged_trees, paths):
        held = await run(lock, paths.lock(digest), shared=True, wait=False)
        if held is None:
            continue
        with held:
            numbers = await run(_doubted, paths, digest)
            tree, root = await run(read_object, paths, digest), paths.tree(digest)
            bad = await bad_chunks(tree, root, numbers, threads)
            await run(_share_good, tree, root, bad, good)
            left = await bad_chunks(tree, root, bad, threads)
            if len(left):
                content = await catalog.content(digest)
                executor = await run(Executor, catalog, [content], threads, config)
                await executor.read(InPlace(tree, root), left)
            await run(sync_filesystem, cache.path)
            wrong = await run(wrong_entries, tree, root)
            if not wrong and not len(await bad_chunks(tree, root, bad, threads)):
                good |= {tree.chunk_digest[n].tobytes(): (root, tree, n) for n in numbers.tolist()}
                await run(clear_damage, paths, digest)
                mended.append(digest)
    return mended


_Good = dict[bytes, tuple[str, Tree, int]]
"""For digests of chunks: a sound tree's folder, the tree, and the number of the chunk in it."""


def _doubted(paths: DomainPaths, digest: Digest) -> Numbers:
    """Chunks of a marked tree to look at: those of the mark, or all where it could not hold all."""
    damage, tree = read_damage(paths, digest), read_object(paths, digest)
    if damage is not None and len(damage.chunks) < MAX_DAMAGED:
        return np.array([n for n in damage.chunks if n < tree.n_chunks], np.int64)
    return np.arange(tree.n_chunks, dtype=np.int64)


class InPlace(Strict):
    """A sink that writes chunks into the files of a complete tree, whose attributes stay."""

    def __init__(self, tree: Tree, root: str) -> None:
        self._tree = tree
        self._names = [os.path.join(os.fsencode(root), path) for path in tree.paths()]

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        for number, view in zip(numbers.tolist(), views, strict=True):
            with self.opened(number) as descriptor:
                write_all(descriptor, [view], int(self._tree.chunk_offset[number]))

    @contextlib.contextmanager
    def opened(self, number: int) -> Iterator[int]:
        """The file that has a chunk, to be written to; its times stay as they are."""
        entry = int(self._tree.chunk_entry[number])
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


def _share_good(tree: Tree, root: str, bad: Numbers, good: _Good) -> None:
    """Take bad chunks from trees that were mended before."""
    sink, sharer = InPlace(tree, root), Sharer()
    for number in bad.tolist():
        found = good.get(tree.chunk_digest[number].tobytes())
        if found is None:
            continue
        other_root, other, chunk = found
        one, from_one = np.array([number], np.int64), np.array([chunk], np.int64)
        runs = join_runs(tree, one, other, from_one)
        path = os.path.join(os.fsencode(other_root), other.path(int(runs.source_entry[0])))
        source = os.open(path, _READ)
        try:
            with sink.opened(number) as to:
                place = int(runs.source_offset[0]), to, int(runs.offset[0]), int(runs.length[0])
                sharer.take(source, *place)
        finally:
            os.close(source)


async def find_damage(
    paths: DomainPaths, digest: Digest, threads: Threads
) -> tuple[list[bytes], list[Digest]]:
    """Read a complete tree back. Returns paths that are wrong, and the trees that were marked.

    What holds the tree's lock is the caller's affair: a tree that is read must not go away.
    """
    run = threads.run
    tree = await run(read_object, paths, digest)
    root = paths.tree(digest)
    wrong = await run(wrong_entries, tree, root)
    bad = await bad_chunks(tree, root, np.arange(tree.n_chunks, dtype=np.int64), threads)
    if not len(bad):
        if wrong:
            await run(add_damage, paths, digest, bad)
        return wrong, [digest] if wrong else []
    files = {tree.path(int(tree.chunk_entry[number])) for number in bad.tolist()}
    marked = await run(mark_damage, paths, tree.chunk_digest[bad])
    return sorted({*wrong, *files}), marked
