"""Complete trees that become unfinished ones, since something of them is wrong or missing.

What is right of them stays for who builds them again. All of it blocks.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, ImageError, NotFound
from imgfmt.tree import Tree
from transfer.cache.damage import add_damage, read_damage
from transfer.cache.durable import remove_file, replace_file, sync_folder
from transfer.cache.evict import is_mounted
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark, read_object
from transfer.cache.places import (
    Places,
    TreeFiles,
    files_of,
    missing_part,
    part_folders,
    read_places,
    write_places,
)
from transfer.cache.records import Damage, Mark
from transfer.cache.trash import discard_at, domain_roots, take_back
from transfer.checking import bad_among, wrong_entries
from transfer.oserrors import printable
from transfer.plan import Numbers
from transfer.pulling.journal import begin_journal


def build_again(cache: CacheRoot, paths: DomainPaths, digest: Digest) -> bool:
    """Make a tree that lacks a part an unfinished one; says whether it was done.

    Raises CorruptData if it is mounted.
    """
    held = lock(paths.lock(digest), wait=False)
    if held is None:
        return False
    with held:
        mark = read_mark(paths, digest)
        missing = missing_part(paths, mark) if mark is not None else ""
        if mark is None or not missing:
            return True
        if is_mounted(paths, digest):
            raise CorruptData(
                f"tree {digest.short} {missing}, and is mounted; unmount it, try again"
            )
        try:
            tree = read_object(paths, digest)
            places = _places(paths, digest, tree, mark)
        except ImageError:
            demote(cache, paths, digest, None, None)
            return True
        if not missing_part(paths, mark):
            return True  # only its record was lost
        lost = np.flatnonzero(_gone(paths, digest, places)[places.of[tree.chunk_entry]])
        known = _known_bad(tree, read_damage(paths, digest))
        _to_partial(cache, paths, digest, tree, np.union1d(lost, known))
        remove_file(paths.damage(digest))
    return True


def _places(paths: DomainPaths, digest: Digest, tree: Tree, mark: Mark) -> Places:
    """Where the files of a tree lie; found by looking at the disks where the record is lost.

    Raises NotFound if a file is on none of them.
    """
    with contextlib.suppress(ImageError):
        places = read_places(paths, digest, tree)
        if places.disks == mark.disks:
            return places
    of = np.zeros(tree.n_entries, np.int64)
    folders = [os.fsencode(f) for f in part_folders(paths, digest, mark.disks)]
    for entry, path in enumerate(tree.paths()):
        there = (i for i, top in enumerate(folders) if os.path.lexists(os.path.join(top, path)))
        found = next(there, None)
        if found is None:
            raise NotFound(f"tree {digest.short} has lost {printable(path)}")
        of[entry] = found
    places = Places(mark.disks, of)
    write_places(paths, digest, places)
    return places


def _gone(paths: DomainPaths, digest: Digest, places: Places) -> npt.NDArray[np.bool_]:
    """Which parts of a tree are not there."""
    found = [False]
    for disk_id in places.disks:
        disk = paths.disks.find(disk_id)
        found.append(disk is None or not os.path.isdir(paths.on(disk).tree(digest)))
    return np.array(found)


def rebuild_if_wrong(cache: CacheRoot, paths: DomainPaths, digest: Digest) -> bool:
    """Make a tree an unfinished one if it has not the files that it must have."""
    held = lock(paths.lock(digest), wait=False)
    if held is None:
        return False
    with held:
        try:
            tree = read_object(paths, digest)
            files = files_of(paths, digest, tree)
        except ImageError:
            demote(cache, paths, digest, None, None)
            return True
        if not wrong_entries(tree, files.folders, files.names):
            return False
        bad = bad_among(tree, files.names, np.arange(tree.n_chunks, dtype=np.int64))
        known = _known_bad(tree, read_damage(paths, digest))
        demote(cache, paths, digest, files, np.union1d(bad, known))
        remove_file(paths.damage(digest))
    return True


def _known_bad(tree: Tree, damage: Damage | None) -> Numbers:
    known = np.array(damage.chunks if damage else (), np.int64)
    return known[known < tree.n_chunks]


def demote(
    cache: CacheRoot,
    paths: DomainPaths,
    digest: Digest,
    files: TreeFiles | None,
    bad: Numbers | None,
) -> None:
    """Make a complete tree an unfinished one that has all but its `bad` chunks.

    The lock is the caller's. One that is mounted only gets its bad chunks marked; raises
    CorruptData if that is not enough.
    """
    wrong = wrong_entries(files.tree, files.folders, files.names) if files is not None else []
    if is_mounted(paths, digest):
        if files is None or bad is None or wrong:
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
    if files is None or bad is None or set(wrong) - set(files.tree.paths()):
        _remove_mark(paths, digest)
        remove_file(paths.object(digest))
        remove_file(paths.owners(digest))
        for root, of_disk in domain_roots(cache, paths):
            if os.path.isdir(of_disk.tree(digest)):
                discard_at(root, of_disk.tree(digest))
        return
    _to_partial(cache, paths, digest, files.tree, bad)


def _to_partial(
    cache: CacheRoot, paths: DomainPaths, digest: Digest, tree: Tree, bad: Numbers
) -> None:
    """Have a tree built again by who comes next, with all that is there but its `bad` chunks."""
    mark = read_mark(paths, digest)
    _remove_mark(paths, digest)
    done = np.ones(tree.n_chunks, np.bool_)
    done[bad] = False
    there = [disk for disk in (mark.disks if mark else ()) if paths.disks.find(disk) is not None]
    session = paths.disks.session(cache.session, there)
    begin_journal(paths.journal(digest), digest, done, session).close()
    for root, of_disk in domain_roots(cache, paths):
        if os.path.isdir(of_disk.partial(digest)):
            discard_at(root, of_disk.partial(digest))
    take_back(cache, paths, digest)


def _remove_mark(paths: DomainPaths, digest: Digest) -> None:
    remove_file(paths.mark(digest))
    sync_folder(os.path.dirname(paths.mark(digest)))
