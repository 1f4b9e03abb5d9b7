"""Where missing chunks come from that no complete tree has: a twin, another flight, or the store.

Who looks at the others' flights and states the own does so under the cache's plan lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import OutOfResources
from transfer.cache.flights import OtherFlight, OwnFlight, live_flights, reserved
from transfer.cache.layout import DomainPaths
from transfer.cache.locks import waited
from transfer.cache.owners import ABSENT, keys_of
from transfer.cache.records import Flight
from transfer.plan import U1, ChunkTable, Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """Chunks of a plan that are the same as another chunk of it, `source`. Ascending."""

    numbers: Numbers
    source: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """Chunks that another flight is fetching: item i is chunk `chunk[i]` of the tree `tree`."""

    other: OtherFlight
    tree: Digest
    numbers: Numbers
    chunk: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """What this plan fetches, and what it waits for."""

    own: Numbers
    awaited: list[Awaited]


def find_twins(digests: U1, done: Numbers, missing: Numbers) -> tuple[Numbers, Twins]:
    """The missing chunks that are not the same as a done or an earlier missing one, and the rest.

    `digests` are of all chunks of the plan.
    """
    ordered = np.concatenate([done, missing])
    _, first, inverse = np.unique(keys_of(digests[ordered]), return_index=True, return_inverse=True)
    leader = ordered[first[inverse.reshape(-1)[len(done) :]]]
    twin = (leader != missing) & (digests[leader] == digests[missing]).all(axis=1)
    return missing[~twin], Twins(missing[twin], leader[twin])


@dataclass(frozen=True, slots=True, eq=False)
class Claimant:
    """States what a plan fetches. `trees` are those that are built, as `table` numbers them."""

    paths: DomainPaths
    table: ChunkTable
    trees: Sequence[Digest]
    flight: OwnFlight

    def claim(
        self, wanted: Numbers, before: Numbers, *, extra_bytes: int, ignored: frozenset[str]
    ) -> Claims:
        """Claim what nobody else fetches of `wanted`, beside what was claimed `before`.

        `extra_bytes` are written besides what is fetched. The flights at the paths `ignored` are
        not waited for. Raises OutOfResources where space is missing, and claims nothing. Blocks.
        """
        with waited(self.paths.plan_lock):
            others = live_flights(self.paths, self.flight)
            own, awaited = self._divide(wanted, [o for o in others if o.path not in ignored])
            claimed = np.concatenate([before, own])
            fetched = int(self.table.plain_bytes[own].sum(dtype=np.uint64))
            needed_bytes = fetched + extra_bytes
            self._check_space(needed_bytes)
            first = np.array(self.table.first)
            tree = np.searchsorted(first, claimed, side="right") - 1
            flight = Flight(
                tuple(self.trees),
                self.flight.done_bytes + needed_bytes,
                self.table.digest[claimed],
                tree.astype("u4"),
                (claimed - first[tree]).astype("u4"),
            )
            self.flight.state(flight)
        return Claims(own, awaited)

    def _divide(
        self, wanted: Numbers, others: Sequence[OtherFlight]
    ) -> tuple[Numbers, list[Awaited]]:
        awaited = []
        for other in others:
            item = other.find(self.table.digest[wanted])
            has = item != ABSENT
            trees = other.flight.tree[item[has]]
            for index in np.unique(trees).tolist():
                of_tree = trees == index
                chunk = other.flight.chunk[item[has][of_tree]].astype(np.int64)
                numbers = wanted[has][of_tree]
                awaited.append(Awaited(other, other.flight.trees[index], numbers, chunk))
            wanted = wanted[~has]
        return wanted, awaited

    def _check_space(self, needed_bytes: int) -> None:
        found = os.statvfs(self.paths.folder)
        free_bytes = found.f_bavail * found.f_frsize
        reserved_bytes = reserved(self.paths.root, self.flight)
        if found.f_blocks and needed_bytes > free_bytes - reserved_bytes:
            raise OutOfResources(
                f"the cache needs {needed_bytes} bytes; its filesystem has {free_bytes} free, of"
                f" which {reserved_bytes} are reserved by other downloads; remove images, or unpin"
                " or unmount some so that they can be removed"
            )
