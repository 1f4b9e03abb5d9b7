"""Reading a local tree back: are its files as the sanitised profile writes them, and its chunks?"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from imgfmt.digest import raw_digest
from imgfmt.tree import ROOT, EntryType, Tree
from transfer.execute import each
from transfer.plan import Numbers
from transfer.threads import Threads

SLICE_CHUNKS = 64
"""Chunks that one thread checks at a time; a scrub rests in between."""

_READ_BYTES = 1024 * 1024
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FORMATS = {
    EntryType.DIRECTORY: stat.S_IFDIR,
    EntryType.FILE: stat.S_IFREG,
    EntryType.SYMLINK: stat.S_IFLNK,
}


async def bad_chunks(tree: Tree, paths: list[bytes], numbers: Numbers, threads: Threads) -> Numbers:
    """Which of these chunks, ascending, the files do not have. Past the page cache.

    `paths` has an item for each entry.
    """
    found: list[Numbers] = []

    async def check(part: Numbers) -> None:
        found.append(await threads.run(bad_among, tree, paths, part))

    slices = (numbers[i : i + SLICE_CHUNKS] for i in range(0, len(numbers), SLICE_CHUNKS))
    await each(slices, check, threads.n_threads)
    return np.sort(np.concatenate([np.zeros(0, np.int64), *found]))


def bad_among(tree: Tree, paths: list[bytes], numbers: Numbers) -> Numbers:
    """Which of these chunks the files at `paths`, an item for each entry, do not have. Blocks."""
    entries = tree.chunk_entry[numbers].tolist()
    bad: list[int] = []
    for entry, of_file in groupby(zip(entries, numbers.tolist(), strict=True), key=itemgetter(0)):
        wanted = [number for _, number in of_file]
        try:
            descriptor = os.open(paths[entry], _READ)
        except OSError:
            bad += wanted
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            bad += _bad_of_file(tree, descriptor, wanted)
        finally:
            os.close(descriptor)
    return np.array(bad, np.int64)


def _bad_of_file(tree: Tree, descriptor: int, numbers: list[int]) -> Iterator[int]:
    for number in numbers:
        offset, length = int(tree.chunk_offset[number]), int(tree.chunk_bytes[number])
        try:
            found = os.pread(descriptor, length, offset)
        except OSError:
            found = b""
        if raw_digest((found,)) != tree.chunk_digest[number].tobytes():
            yield number


def wrong_entries(tree: Tree, folders: Sequence[str], paths: Sequence[bytes]) -> list[bytes]:
    """Paths that are missing, of another type, size, mode or target, or not in the tree. Blocks.

    The entries are at `paths`, each below one of `folders`, of which the first has all directories.
    Owners, times and extended attributes are not looked at: a system may refuse them.
    """
    wrong = []
    inner_paths = tree.paths()
    for index, path in enumerate(paths):
        try:
            there = os.lstat(path)
        except OSError:
            wrong.append(inner_paths[index])
            continue
        if not _fits(tree, index, there, path):
            wrong.append(inner_paths[index])
    known = set(paths)
    directories = {inner_paths[i] for i in np.flatnonzero(_is_directory(tree)).tolist()}
    for top in map(os.fsencode, folders):
        for folder, subfolders, files in os.walk(top):
            inner = os.path.relpath(folder, top)
            for name in subfolders + files:
                if os.path.join(folder, name) in known:
                    continue
                path = os.path.join(inner, name) if inner != b"." else name
                if path not in directories or name not in subfolders:
                    wrong.append(path)
    return wrong


def filled_holes(tree: Tree, paths: Sequence[bytes]) -> list[tuple[int, int, int]]:
    """What is not zero between the chunks of files: entry, start, stop. Holes cost a seek each.

    Blocks. A range may have zeros too; of files that can't be read there is none.
    """
    found: list[tuple[int, int, int]] = []
    numbers = np.arange(len(paths))
    first = np.searchsorted(tree.chunk_entry, numbers, side="left")
    behind = np.searchsorted(tree.chunk_entry, numbers, side="right")
    is_file = tree.columns["type"] == EntryType.FILE
    for index in np.flatnonzero(is_file & (tree.columns["group"] == numbers)).tolist():
        here = slice(first[index], behind[index])
        start = tree.chunk_offset[here].astype(np.int64)
        end = start + tree.chunk_bytes[here].astype(np.int64)
        begins, stops = np.append(0, end), np.append(start, int(tree.columns["size"][index]))
        gaps = np.flatnonzero(stops > begins)
        if len(gaps):
            ranges = zip(begins[gaps].tolist(), stops[gaps].tolist(), strict=True)
            found += [(index, *span) for span in _not_zero(paths[index], ranges)]
    return found


def _not_zero(path: bytes, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of these byte ranges of a file that were read and are not zero."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return
    try:
        for start, stop in ranges:
            while start < stop:
                try:
                    start = os.lseek(descriptor, start, os.SEEK_DATA)
                except OSError:  # no data from here on
                    return
                read = os.pread(descriptor, max(0, min(stop - start, _READ_BYTES)), start)
                if not read:
                    break
                if read.strip(b"\0"):
                    yield start, start + len(read)
                start += len(read)
    finally:
        os.close(descriptor)


def _is_directory(tree: Tree) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = tree.columns["type"] == EntryType.DIRECTORY
    return found


def _fits(tree: Tree, index: int, there: os.stat_result, path: bytes) -> bool:
    kind = EntryType(int(tree.columns["type"][index]))
    if stat.S_IFMT(there.st_mode) != _FORMATS[kind]:
        return False
    if kind is EntryType.SYMLINK:
        return os.readlink(path) == tree.entry(index).target
    mode = int(tree.columns["mode"][index])
    if stat.S_IMODE(there.st_mode) != mode & 0o1777 and index != ROOT:
        return False
    group = int(tree.columns["group"][index])
    return kind is not EntryType.FILE or there.st_size == int(tree.columns["size"][group])
