"""Fills slots from files and verifies them, for threads that do all else too.

`process_fillers` does the same where threads would wait for Python's lock.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from blake3 import blake3

from imgfmt.digest import DIGEST_BYTES
from imgfmt.errors import CorruptData
from restore.checkers import Checkers
from restore.direct_storage import DirectStorage
from restore.driver import Hasher
from restore.files import Files
from restore.lanes import StageTimes, Target
from restore.load_plan import LoadPlan, Read
from restore.sender import Sender
from restore.slots import Slot

STEP_BYTES = 1 << 20
"""Read and hashed at a time where the CPU verifies, so that it finds the bytes in its own cache."""

Damaged = Callable[[int], CorruptData]
"""The error for a row of a plan whose piece has another digest."""


class Filler:
    """Fills slots with reads of a plan. For many threads."""

    def __init__(
        self,
        plan: LoadPlan,
        files: Files,
        targets: Sequence[Target],
        checkers: Checkers,
        damaged: Damaged,
    ) -> None:
        self._plan = plan
        self._files = files
        self._targets = targets
        self._checkers = checkers
        self._damaged = damaged

    def fill(self, read: Read, slot: Slot, times: StageTimes) -> Hasher | None:
        """Fill a slot, and verify it unless a device's hasher, which this returns, is to."""
        hasher = None
        if not self._checkers.off:
            hasher = self._checkers.hasher(self._targets[read.copies[0].block].device)
            if hasher is None:
                self._fill_checked(read, slot, times)
                return None
        begun_s = time.perf_counter()
        self._files.fill(read.file, read.offset, read.n_bytes, slot.view)
        times.read_s += time.perf_counter() - begun_s
        return hasher

    def pull(self, read: Read, slot: Slot, sender: Sender, storage: DirectStorage) -> bool:
        """Have a device read and check it all; False if it can't, and the slot is to be filled."""
        hasher = None
        if not self._checkers.off:
            hasher = self._checkers.hasher(self._targets[read.copies[0].block].device)
            if hasher is None:
                return False
        return sender.pull(slot, read, hasher, self._files.paths[read.file], storage)

    def _fill_checked(self, read: Read, slot: Slot, times: StageTimes) -> None:
        """Fill a slot step by step, and compare the pieces of each step with their digests."""
        rows = self._plan.rows[read.first : read.end]
        begins, lengths = rows["offset"].tolist(), rows["n_bytes"].tolist()
        digests = rows["digest"].tobytes()
        files, view = self._files, slot.view
        edges = [0, len(begins)] if files.direct(read.file) else steps(begins)
        for low, high in pairwise(edges):
            at = begins[low]
            end = begins[high] if high < len(begins) else read.n_bytes
            begun_s = time.perf_counter()
            files.fill(read.file, read.offset + at, end - at, view[at:])
            read_s = time.perf_counter()
            for i in range(low, high):
                found = blake3(view[begins[i] : begins[i] + lengths[i]]).digest()
                if found != digests[DIGEST_BYTES * i : DIGEST_BYTES * (i + 1)]:
                    raise self._damaged(read.first + i)
            times.read_s += read_s - begun_s
            times.hash_s += time.perf_counter() - read_s
        times.checked_bytes += sum(lengths)


class ThreadFillers:
    """Threads that fill slots for one other, which sends them: it makes all calls of a driver.

    The slot that became free last is filled first: it is in the CPU's cache.
    """

    verify = False  # what is filled says itself who is to check it

    def __init__(self, filler: Filler, reads: Sequence[Read], n_threads: int) -> None:
        self.times = StageTimes()
        self._filler = filler
        self._reads = iter(reads)  # shared: its next() is one step for all threads
        self._free: list[Slot] = []
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ready: deque[tuple[Slot, Read, Hasher | None] | BaseException] = deque()
        self._mine = [StageTimes() for _ in range(n_threads)]
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="snapcask-load")
        for times in self._mine:
            self._threads.submit(self._run, times)

    def give(self, slot: Slot) -> None:
        """Have the slot filled with the next read, if there is one left."""
        self._free.append(slot)
        self._tokens.put(True)

    def next(self, timeout_s: float) -> tuple[Slot, Read, Hasher | None] | None:
        """A slot that was filled, and what is to check it, or None if none is yet.

        Raises what filling one raised.
        """
        if not self._ready:
            time.sleep(timeout_s)
            return None
        item = self._ready.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """Nobody writes to slots afterwards."""
        self._reads = iter(())
        for _ in self._mine:
            self._tokens.put(False)
        self._threads.shutdown()
        for times in self._mine:
            self.times.add(times)

    def _run(self, times: StageTimes) -> None:
        try:
            while self._tokens.get():
                read = next(self._reads, None)
                if read is None:
                    return
                slot = self._free.pop()
                self._ready.append((slot, read, self._filler.fill(read, slot, times)))
        except BaseException as error:
            self._ready.append(error)


def steps(begins: Sequence[int]) -> list[int]:
    """Indices at which to cut pieces into steps of about `STEP_BYTES`, 0 and the end with them."""
    edges = [0]
    for index, begin in enumerate(begins):
        if begin - begins[edges[-1]] >= STEP_BYTES:
            edges.append(index)
    return [*edges, len(begins)]
