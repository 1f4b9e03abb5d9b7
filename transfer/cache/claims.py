"""Where missing chunks come from that no complete tree has: a twin, another flight, or the store.

Who looks at the others' flights and states the own does so under the cache's plan lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import OutOfResources
from transfer.cache.disks import MAIN, ByDisk, free_of
from transfer.cache.flights import OtherFlight, OwnFlight, live_flights, reserved
from transfer.cache.layout import DomainPaths
from transfer.cache.locks import waited
from transfer.cache.owners import ABSENT, keys_of
from transfer.cache.records import Flight
from transfer.oserrors import printable
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
    """States what a plan fetches. `trees` are those that are built, as `table` numbers them.

    `bytes_on` tells the bytes of some of these chunks on each disk, `roots` has the disks' paths.
    """

    paths: DomainPaths
    table: ChunkTable
    trees: Sequence[Digest]
    flight: OwnFlight
    bytes_on: Callable[[Numbers], ByDisk]
    roots: Mapping[bytes, str]

    def claim(
        self, wanted: Numbers, before: Numbers, *, extra: ByDisk, ignored: frozenset[str]
    ) -> Claims:
        """Claim what nobody else fetches of `wanted`, beside what was claimed `before`.

        `extra` bytes are written besides what is fetched. The flights at the paths `ignored` are
        not waited for. Raises OutOfResources where space is missing, and claims nothing. Blocks.
        """
        with waited(self.paths.plan_lock):
            others = live_flights(self.paths, self.flight)
            own, awaited = self._divide(wanted, [o for o in others if o.path not in ignored])
            claimed = np.concatenate([before, own])
            needed = Counter(self.bytes_on(own)) + Counter(extra)
            self._check_space(needed)
            first = np.array(self.table.first)
            tree = np.searchsorted(first, claimed, side="right") - 1
            flight = Flight(
                tuple(self.trees),
                self.flight.done_bytes + needed.total(),
                self.table.digest[claimed],
                tree.astype("u4"),
                (claimed - first[tree]).astype("u4"),
                dict(needed) if needed.keys() - {MAIN} else {},
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

    def _check_space(self, needed: ByDisk) -> None:
        reserved_bytes = reserved(self.paths.root, self.flight)
        for disk, root in self.roots.items():
            needed_bytes, taken_bytes = needed.get(disk, 0), reserved_bytes.get(disk, 0)
            free_bytes, all_bytes = free_of(root)
            if all_bytes and needed_bytes > free_bytes - taken_bytes:
                where = f" on disk {printable(root)}" if disk else ""
                way_out = "remove images, or unpin or unmount some so that they can be removed"
                if needed_bytes > all_bytes:
                    way_out = f"it has {all_bytes} in all, so it needs a larger one"
                raise OutOfResources(
                    f"the cache needs {needed_bytes} bytes{where}; its filesystem has {free_bytes}"
                    f" free, of which {taken_bytes} are reserved by other downloads; {way_out}"
                )
