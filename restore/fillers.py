"""Threads that fill slots from files and verify them: how a load gets its bytes to the sender.

`ProcessFillers` (in `process_fillers`) do the same where threads would wait for Python's lock.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from blake3 import blake3

from imgfmt.digest import DIGEST_BYTES
from imgfmt.errors import CorruptData
from restore.checkers import Checkers
from restore.driver import Hasher
from restore.files import Files
from restore.lanes import StageTimes, Target
from restore.load_plan import LoadPlan, Read
from restore.slots import Slot

STEP_BYTES = 1 << 20
"""Read and hashed at a time where the CPU verifies, so that it finds the bytes in its own cache."""

Damaged = Callable[[int], CorruptData]
Filled = tuple[Slot, Read, Hasher | None]
"""A slot, what it holds, and what is to check that on a device; None: it is as it must be."""


class Fillers(Protocol):
    """Fill slots with the reads of a plan, in about its order. Used by one thread."""

    times: StageTimes

    def give(self, slot: Slot) -> None:
        """Have the slot filled with the next read, if there is one left."""

    def next(self, timeout_s: float) -> Filled | None:
        """A slot that was filled, or None if none is yet. Raises what filling one raised."""

    def close(self) -> None:
        """Give up. Nobody writes to slots afterwards."""


@dataclass(frozen=True, slots=True)
class FillJob:
    """What there is to fill. `early` is done on the filling thread with a slot that is full."""

    plan: LoadPlan
    files: Files
    targets: Sequence[Target]
    checkers: Checkers
    damaged: Damaged
    early: Callable[[Slot, Read], None] | None = None


class ThreadFillers:
    """See `Fillers`. The slot that became free last is filled first: it is in the CPU's cache."""

    def __init__(self, job: FillJob, n_threads: int) -> None:
        self.times = StageTimes()
        self._job = job
        self._reads = iter(job.plan.reads)  # shared: its next() is one step for all threads
        self._free: list[Slot] = []
        self._tokens: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._ready: deque[Filled | BaseException] = deque()
        self._mine = [StageTimes() for _ in range(n_threads)]
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="snapcask-load")
        for times in self._mine:
            self._threads.submit(self._run, times)

    def give(self, slot: Slot) -> None:
        """See `Fillers.give`."""
        self._free.append(slot)
        self._tokens.put(True)

    def next(self, timeout_s: float) -> Filled | None:
        """See `Fillers.next`."""
        if not self._ready:
            time.sleep(timeout_s)
            return None
        item = self._ready.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        """See `Fillers.close`."""
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
                hasher = self._fill(read, slot, times)
                if self._job.early is not None:
                    self._job.early(slot, read)
                self._ready.append((slot, read, hasher))
        except BaseException as error:
            self._ready.append(error)

    def _fill(self, read: Read, slot: Slot, times: StageTimes) -> Hasher | None:
        """Fill a slot, and verify it unless a device's hasher, which this returns, is to."""
        job = self._job
        hasher = None
        if not job.checkers.off:
            hasher = job.checkers.hasher(job.targets[read.copies[0].block].device)
            if hasher is None:
                self._fill_checked(read, slot, times)
                return None
        begun_s = time.perf_counter()
        job.files.fill(read.file, read.offset, read.n_bytes, slot.view)
        times.read_s += time.perf_counter() - begun_s
        return hasher

    def _fill_checked(self, read: Read, slot: Slot, times: StageTimes) -> None:
        """Fill a slot step by step, and compare the pieces of each step with their digests."""
        rows = self._job.plan.rows[read.first : read.end]
        begins, lengths = rows["offset"].tolist(), rows["n_bytes"].tolist()
        digests = rows["digest"].tobytes()
        files, view = self._job.files, slot.view
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
                    raise self._job.damaged(read.first + i)
            times.read_s += read_s - begun_s
            times.hash_s += time.perf_counter() - read_s
        times.checked_bytes += sum(lengths)


def steps(begins: Sequence[int]) -> list[int]:
    """Indices at which to cut pieces into steps of about `STEP_BYTES`, 0 and the end with them."""
    edges = [0]
    for index, begin in enumerate(begins):
        if begin - begins[edges[-1]] >= STEP_BYTES:
            edges.append(index)
    return [*edges, len(begins)]
