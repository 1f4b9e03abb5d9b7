"""Waiting for the verified chunks of others' flights, and taking them as they come."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from imgfmt.errors import ImageError
from transfer.cache.claims import Awaited
from transfer.cache.layout import DomainPaths
from transfer.cache.owners import read_object
from transfer.cache.places import Source, part_folders, read_places
from transfer.plan import Numbers
from transfer.pulling.journal import JournalReader
from transfer.threads import Threads

POLL_S = 0.02
STALLED_S = 60.0
"""A flight that brings nothing for so long is not waited for any more."""


Share = Callable[[Source, Numbers, Numbers], Awaitable[None]]
"""Takes chunks (numbers of the plan, chunks of the source) as far as that is possible."""


class _Followed:
    """Chunks that one other build is to bring."""

    def __init__(self, paths: DomainPaths, awaited: Awaited, keep: Callable[[Source], Source]):
        self.awaited = awaited
        self.left = np.ones(len(awaited.numbers), np.bool_)
        self._paths = paths
        self._keep = keep
        self._source: Source | None = None
        self._reader: JournalReader | None = None

    def look(self) -> tuple[Numbers, bool]:
        """Items that can be taken now, and whether there may be more. Blocks."""
        alive = self.awaited.other.alive  # before the rest: what it did at its end is seen then
        ready = self.left & self._has()
        return np.flatnonzero(ready), alive

    def _has(self) -> npt.NDArray[np.bool_]:
        chunk, tree = self.awaited.chunk, self.awaited.tree
        nothing = np.zeros(len(chunk), np.bool_)
        try:
            if self._reader is None:
                self._tree = read_object(self._paths, tree)
                if len(chunk) and int(chunk.max()) >= self._tree.n_chunks:
                    return nothing
                self._reader = JournalReader(self._paths.journal(tree), tree, self._tree.n_chunks)
        except ImageError:
            return nothing
        if self._reader.refresh():
            return self._reader.done[chunk]
        return ~nothing if os.path.exists(self._paths.mark(tree)) else nothing

    def source(self) -> Source:
        """Where to take from. Raises OSError or ImageError if it is gone. Blocks."""
        if self._source is None:
            digest = self.awaited.tree
            places = read_places(self._paths, digest, self._tree)
            try:
                folders = part_folders(self._paths, digest, places.disks, partial=True)
                source = Source.at(self._tree, folders, places)
            except FileNotFoundError:
                folders = part_folders(self._paths, digest, places.disks)
                source = Source.at(self._tree, folders, places)
            self._source = self._keep(source)
        return self._source


async def follow(
    paths: DomainPaths,
    awaited: Sequence[Awaited],
    share: Share,
    keep: Callable[[Source], Source],
    is_done: Callable[[Numbers], npt.NDArray[np.bool_]],
    threads: Threads,
) -> tuple[Numbers, frozenset[str]]:
    """Take all that the flights bring; returns the numbers that they did not, and who is stalled.

    Sources are handed to `keep`, which closes them in the end.
    Returns when every flight has ended or brought all, or none brought anything for STALLED_S.
    """
    stalled: frozenset[str] = frozenset()
    followed = [_Followed(paths, item, keep) for item in awaited]
    brought_s = time.monotonic()
    while followed:
        took = False
        for item in list(followed):
            ready, alive = await threads.run(item.look)
            if len(ready):
                took = True
                await _take(item, ready, share, threads)
            if not alive or not item.left.any():
                followed.remove(item)
        if took:
            brought_s = time.monotonic()
        elif time.monotonic() - brought_s > STALLED_S:
            stalled = frozenset(item.awaited.other.path for item in followed)
            break
        elif followed:
            await asyncio.sleep(POLL_S)
    numbers = np.concatenate([np.zeros(0, np.int64), *(item.numbers for item in awaited)])
    return numbers[~is_done(numbers)], stalled


async def _take(item: _Followed, ready: Numbers, share: Share, threads: Threads) -> None:
    item.left[ready] = False
    try:
        source = await threads.run(item.source)
    except (OSError, ImageError):
        return
    await share(source, item.awaited.numbers[ready], item.awaited.chunk[ready])
