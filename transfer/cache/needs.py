"""Which chunks of a plan belong to which tree, and how many bytes of them go to which disk."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from transfer.cache.build import Build
from transfer.cache.claims import Twins
from transfer.cache.disks import MAIN, ByDisk
from transfer.cache.owners import Donor
from transfer.cache.places import Places
from transfer.cache.share import can_clone
from transfer.plan import ChunkTable, Numbers


class Needs:
    """Of the chunks of `builds`, which `table` numbers through, on the disks with these `roots`."""

    def __init__(
        self, table: ChunkTable, builds: Sequence[Build], roots: Mapping[bytes, str]
    ) -> None:
        self._table = table
        self._builds = builds
        self._roots = roots
        self._first = np.array(table.first)

    def by_tree(self, numbers: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        """For each tree that has some of these: its index, which they are, their numbers in it."""
        trees = np.searchsorted(self._first, numbers, side="right") - 1
        found = []
        for index in np.unique(trees).tolist():
            where = np.flatnonzero(trees == index)
            found.append((index, where, numbers[where] - self._first[index]))
        return found

    def total(self, numbers: Numbers) -> int:
        """Bytes of these chunks."""
        return int(self._table.plain_bytes[numbers].sum(dtype=np.uint64))

    def on_disks(self, numbers: Numbers) -> ByDisk:
        """Bytes of these chunks on each disk. The builds are open."""
        if len(self._roots) == 1:
            return {MAIN: self.total(numbers)}
        weights = self._table.plain_bytes[numbers].astype(np.float64)
        found = np.bincount(self._disks(numbers), weights, minlength=len(self._roots))
        return {disk: int(found[i]) for i, disk in enumerate(self._roots)}

    def copied(self, donors: Sequence[Donor], twins: Twins) -> Numbers:
        """Chunks that are here, but can't be shared where they are wanted. Blocks."""
        clones = np.array([can_clone(os.path.join(p, "trash")) for p in self._roots.values()])
        pairs = [(twins.numbers, self._disks(twins.source))]
        for donor in donors:
            entries = donor.tree.chunk_entry[donor.chunk]
            pairs.append((donor.wanted, self._index(donor.places)[donor.places.of[entries]]))
        copied = []
        for numbers, source in pairs:
            to = self._disks(numbers)
            copied.append(numbers[(to != source) | ~clones[to]])
        return np.concatenate(copied)

    def _disks(self, numbers: Numbers) -> Numbers:
        """The index of the disk that each of these chunks goes to."""
        found = np.zeros(len(numbers), np.int64)
        for index, where, of_tree in self.by_tree(numbers) if len(self._roots) > 1 else ():
            places, tree = self._builds[index].places, self._builds[index].tree
            found[where] = self._index(places)[places.of[tree.chunk_entry[of_tree]]]
        return found

    def _index(self, places: Places) -> Numbers:
        """For each disk of these places its index in the roots, -1 if it is none of them."""
        known = {disk: index for index, disk in enumerate(self._roots)}
        return np.array([known.get(disk, -1) for disk in places.ids], np.int64)
