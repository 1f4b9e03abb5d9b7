"""On which disk each file of a new tree goes: where its donor lies, else spread evenly.

docs/node-cache.md has the rule. All of it blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Digest
from imgfmt.tree import EntryType, Tree
from transfer.cache.disks import free_of
from transfer.cache.flights import OwnFlight, reserved
from transfer.cache.layout import DomainPaths
from transfer.cache.owners import find_donors, keys_of
from transfer.cache.places import Places
from transfer.cache.share import can_clone
from transfer.plan import Numbers

SPREAD_BYTES = 1024 * 1024
"""Files with less than this and without a donor go together."""

_TO_PLACE = -1


class Spread:
    """Places the `trees` of one plan, one after the other, on the disks with these `roots`.

    `ids` are the ids of these disks, the main one first; `session` is that of the main one.
    """

    def __init__(
        self,
        roots: Mapping[bytes, str],
        paths: DomainPaths,
        session: bytes,
        own: OwnFlight,
        trees: frozenset[Digest],
    ) -> None:
        self._paths = paths
        self._session = session
        self._trees = trees
        self.ids = list(roots)
        self._room: list[int] = []
        self._clones: list[bool] = []
        self._placed: dict[int, int] = {}  # keys of chunks, and the disk they go to
        if len(roots) > 1:
            taken = reserved(paths.root, own)
            self._room = [max(0, free_of(p)[0] - taken.get(i, 0)) for i, p in roots.items()]
            self._clones = [can_clone(os.path.join(path, "trash")) for path in roots.values()]

    def place(self, tree: Tree, kept: Places | None = None) -> Places:
        """Where each entry goes. Files that lie on a disk that counts, as `kept` says, stay."""
        of, to_place, n_bytes = self._begin(tree, kept)
        if len(self.ids) > 1:
            self._place_all(tree, of, to_place, n_bytes)
        else:
            of[to_place] = 0
        of = of[tree.columns["group"].astype(np.int64)]  # all names of an inode
        used = np.unique(of[of > 0])
        renumbered = np.where(of > 0, np.searchsorted(used, of) + 1, 0)
        return Places(tuple(self.ids[i] for i in used.tolist()), renumbered.astype(np.int64))

    def _begin(
        self, tree: Tree, kept: Places | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
        """What is placed already, by index of the disk; which files are not; bytes of all."""
        weights = tree.chunk_bytes.astype(np.float64)
        n_bytes = np.bincount(tree.chunk_entry, weights, minlength=tree.n_entries).astype(np.int64)
        files = (tree.columns["type"] == EntryType.FILE) & (n_bytes > 0)
        of = np.where(files, _TO_PLACE, 0).astype(np.int64)
        if kept is not None:
            known = {disk: index for index, disk in enumerate(self.ids)}
            where = np.array([known.get(disk, _TO_PLACE) for disk in kept.ids], np.int64)
            of[files] = where[kept.of[files]]
        return of, np.flatnonzero(of == _TO_PLACE), n_bytes

    def _place_all(
        self,
        tree: Tree,
        of: npt.NDArray[np.int64],
        to_place: npt.NDArray[np.intp],
        n_bytes: npt.NDArray[np.int64],
    ) -> None:
        weight = [max(1, room) for room in self._room]
        load = [int(n_bytes[of == index].sum()) for index in range(len(self.ids))]
        donated = self._donated(tree)
        order = np.argsort(tree.chunk_entry, kind="stable")
        edges = np.searchsorted(tree.chunk_entry[order], np.arange(tree.n_entries + 1))
        small: list[int] = []
        by_size = sorted(to_place.tolist(), key=lambda i: (-donated[:, i].max(), -int(n_bytes[i])))
        for entry in by_size:
            size = int(n_bytes[entry])
            chunks = order[edges[entry] : edges[entry + 1]]
            index, had = self._donor(tree, chunks, donated[:, entry])
            if not had or size - had > self._room[index]:
                if size < SPREAD_BYTES:
                    small.append(entry)
                    continue
                index, had = self._emptiest(size, load, weight), 0
            self._put(tree, chunks, index, size - had)
            of[entry] = index
            load[index] += size
        if small:
            index = max(range(len(self.ids)), key=lambda i: self._room[i])
            of[small] = index
            self._room[index] -= int(n_bytes[small].sum())

    def _emptiest(self, size: int, load: Sequence[int], weight: Sequence[int]) -> int:
        """The disk with room for `size` bytes that would have least of the tree for its weight."""
        fitting = [index for index, room in enumerate(self._room) if size <= room]
        return min(
            fitting or range(len(self.ids)),
            key=lambda i: ((load[i] + size) / weight[i], -self._room[i]),
        )

    def _put(self, tree: Tree, chunks: Numbers, index: int, fresh_bytes: int) -> None:
        self._room[index] -= fresh_bytes
        if self._clones[index]:
            self._placed |= dict.fromkeys(keys_of(tree.chunk_digest[chunks]).tolist(), index)

    def _donor(self, tree: Tree, chunks: Numbers, donated: Numbers) -> tuple[int, int]:
        """The disk that has most of these chunks already, and bytes of them there."""
        had = donated.astype(np.int64).tolist()
        if self._placed:
            keys = keys_of(tree.chunk_digest[chunks]).tolist()
            for key, length in zip(keys, tree.chunk_bytes[chunks].tolist(), strict=True):
                if (index := self._placed.get(key)) is not None:
                    had[index] += length
        best = max(range(len(had)), key=had.__getitem__)
        return best, min(had[best], int(tree.chunk_bytes[chunks].sum(dtype=np.uint64)))

    def _donated(self, tree: Tree) -> Numbers:
        """Bytes of each entry that could be shared on each disk; shape (disks, entries)."""
        found = np.zeros((len(self.ids), tree.n_entries), np.int64)
        donors = find_donors(self._paths, self._session, tree.chunk_digest, but=self._trees)
        index_of = {disk: i for i, disk in enumerate(self.ids) if self._clones[i]}
        for donor in donors:
            donor.lock.close()
            where = np.array([index_of.get(disk, -1) for disk in donor.places.ids], np.int64)
            index = where[donor.places.of[donor.tree.chunk_entry[donor.chunk]]]
            has = index >= 0
            place = index[has], tree.chunk_entry[donor.wanted[has]].astype(np.int64)
            np.add.at(found, place, tree.chunk_bytes[donor.wanted[has]].astype(np.int64))
        return found
