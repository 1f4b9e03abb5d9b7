"""Fills slots from files and verifies them, for threads that do all else too.

`process_fillers` does the same where threads would wait for Python's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from blake3 import blake3

from imgfmt.digest import DIGEST_BYTES
from imgfmt.errors import CorruptData, Internal
from restore.checkers import Checkers
from restore.direct_storage import DirectStorage
from restore.driver import Hasher
from restore.files import Files
from restore.lanes import StageTimes, Target
from restore.load_plan import LoadPlan, Read
from restore.sender import Sender
from restore.slots import Slot

STEP_BYTES = 1 << 19
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
        hasher = self.hasher(read)
        if hasher is None and not self._checkers.off:
            self._fill_checked(read, slot, times)
            return None
        begun_s = time.perf_counter()
        self._files.fill(read.file, read.offset, read.n_bytes, slot.view)
        times.read_s += time.perf_counter() - begun_s
        return hasher

    def hasher(self, read: Read) -> Hasher | None:
        """What is to check a read; None: the CPU, or nothing."""
        if self._checkers.off:
            return None
        return self._checkers.hasher(self._targets[read.copies[0].block].device)

    def device_hasher(self, read: Read) -> Hasher | None:
        """The same for reads that the CPU does not verify. Raises Internal if it would have to."""
        found = self.hasher(read)
        if found is None and not self._checkers.off:
            raise Internal("nobody verifies what was read")
        return found

    def pull(self, read: Read, slot: Slot, sender: Sender, storage: DirectStorage) -> bool:
        """Have a device read and check it all; False if it can't, and the slot is to be filled."""
        hasher = self.hasher(read)
        if hasher is None and not self._checkers.off:
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


def steps(begins: Sequence[int]) -> list[int]:
    """Indices at which to cut pieces into steps of about `STEP_BYTES`, 0 and the end with them."""
    edges = [0]
    for index, begin in enumerate(begins):
        if begin - begins[edges[-1]] >= STEP_BYTES:
            edges.append(index)
    return [*edges, len(begins)]
