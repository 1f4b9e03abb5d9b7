"""Going on with a pull that was killed or cut off: its journal of verified chunks.

The journal numbers the chunks of all members through. Chunks of another session, which a power cut
may have lost, are read and hashed before they count. All of it blocks and belongs on a thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from imgfmt.digest import Digest, digest_of
from imgfmt.errors import CorruptData, NotFound
from imgfmt.tree import Tree
from transfer.checking import SLICE_CHUNKS, bad_among
from transfer.execute import Executor, Sink
from transfer.plan import Numbers
from transfer.pulling.journal import Flags, Journal, begin_journal, read_journal
from transfer.pulling.staging import Staging
from transfer.session import session_of


class Resumption:
    """What an earlier pull of the same chunks left in a staging directory. Close it in the end."""

    def __init__(self, staging: Staging, executor: Executor, trees: Sequence[Tree]) -> None:
        self._staging = staging
        self._table = executor.table
        self._trees = trees
        self._key = _key_of(trees)
        self._journal: Journal | None = None
        self._guard = threading.Lock()
        self._done: Flags = np.zeros(len(executor.table), np.bool_)

    @property
    def missing(self) -> Numbers:
        """Numbers of the chunks that are still to be fetched."""
        return np.flatnonzero(~self._done)

    def look(self) -> int:
        """Bytes that are there already, as far as is known before the directory is locked."""
        done = chunks_there(self._staging, self._trees)
        return int(self._table.plain_bytes[done].sum(dtype=np.uint64))

    def begin(self, names: Sequence[str]) -> None:
        """Take what is there, in the members' directories `names`, and note what comes."""
        folder = os.path.dirname(self._staging.journal)
        session = session_of(folder)
        found = read_journal(self._staging.journal, self._key, len(self._done))
        if found is None:
            self._staging.clear()
        else:
            self._done = found.done
            if found.session != session:
                self._check(names)
        self._journal = begin_journal(self._staging.journal, self._key, self._done, session)

    def _check(self, names: Sequence[str]) -> None:
        top = os.fsencode(self._staging.filled)
        for tree, name, first in zip(self._trees, names, self._table.first, strict=False):
            root = os.path.join(top, os.fsencode(name))
            paths = [os.path.join(root, path) for path in tree.paths()]
            numbers = np.flatnonzero(self._done[first : first + tree.n_chunks])
            for i in range(0, len(numbers), SLICE_CHUNKS):
                bad = bad_among(tree, paths, numbers[i : i + SLICE_CHUNKS])
                self._done[first + bad] = False

    def noting(self, sink: Sink) -> Sink:
        """A sink that hands on and then notes."""
        return _Noting(self, sink)

    def note(self, numbers: Numbers) -> None:
        """These chunks are in their files now. From any thread."""
        assert self._journal is not None
        with self._guard:
            self._journal.append(numbers)

    def close(self) -> None:
        """Give up the descriptor."""
        if self._journal is not None:
            self._journal.close()


class _Noting:
    def __init__(self, resumption: Resumption, sink: Sink) -> None:
        self._resumption = resumption
        self._sink = sink

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        self._sink.accept(numbers, views)
        self._resumption.note(numbers)

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        """See `Sink.damaged`."""
        self._sink.damaged(numbers, error)


def chunks_there(staging: Staging, trees: Sequence[Tree]) -> Flags:
    """Which chunks a journal beside `staging` says are in their files. Changes nothing."""
    n_chunks = sum(tree.n_chunks for tree in trees)
    found = None
    if staging.has_left_over:
        found = read_journal(staging.journal, _key_of(trees), n_chunks)
    return np.zeros(n_chunks, np.bool_) if found is None else found.done


def _key_of(trees: Sequence[Tree]) -> Digest:
    pieces = (piece for tree in trees for piece in _content(tree))
    return digest_of(b"snapcask pull 1\0", *pieces)


def _content(tree: Tree) -> list[bytes]:
    """What makes two trees have the same chunks at the same places of the same names."""
    names = ("parent", "names", "name_end", "size", "extent_count", "extent_chunks")
    columns = [*names, "extent_hole_pages", "chunk_digest", "chunk_pages"]
    return [np.ascontiguousarray(tree.columns[name]).tobytes() for name in columns]
