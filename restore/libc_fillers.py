"""Fills slots by reads of the C library, for one thread, which sends what it filled.

For what the CPU does not verify: no thread of Python reads, and none waits for Python's lock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from restore.driver import Hasher
from restore.files import NO_DIRECT, PAGE_BYTES, Files
from restore.lanes import StageTimes
from restore.libc_reads import LibcReads
from restore.load_plan import Read
from restore.slots import Slot
from transfer.oserrors import translate


@dataclass(slots=True)
class _Filling:
    """A read under way to a slot: `done` bytes of it are there, the rest was begun at `begun_s`."""

    slot: Slot
    read: Read
    done: int
    begun_s: float


class LibcFillers:
    """`n_reads` at a time. `hasher` tells what is to check a read.

    The slot that became free last is filled first: it is in the CPU's cache. Closing waits for the
    reads under way.
    """

    def __init__(
        self,
        reads: Iterator[Read],
        files: Files,
        n_reads: int,
        hasher: Callable[[Read], Hasher | None],
    ) -> None:
        self.times = StageTimes()
        self._reads = reads
        self._files = files
        self._hasher = hasher
        self._libc = LibcReads(n_reads)
        self._free: list[Slot] = []
        self._idle = list(range(n_reads))  # numbers of no read
        self._filling: dict[int, _Filling] = {}
        self._ready: deque[tuple[Slot, Read]] = deque()
        self._open: list[tuple[tuple[int, bool], int] | None] = [None] * n_reads
        self._all_begun = False

    def give(self, slot: Slot) -> None:
        """Have the slot filled with the next read, if there is one left."""
        self._free.append(slot)
        self._begin_some()

    @property
    def finished(self) -> bool:
        """Whether `next` has told of all reads."""
        return self._all_begun and not self._filling and not self._ready

    def next(self, timeout_s: float) -> tuple[Slot, Read, Hasher | None] | None:
        """A slot that was filled, and what is to check it, or None if none is yet.

        Raises what filling one raised.
        """
        if not self._ready:
            self._look()
            if not self._ready:
                self._libc.wait(timeout_s)
                self._look()
            self._begin_some()
        if not self._ready:
            return None
        slot, read = self._ready.popleft()
        return slot, read, self._hasher(read)

    def close(self) -> None:
        """Nobody writes to slots afterwards."""
        self._libc.close()
        for opened in self._open:
            if opened is not None:
                os.close(opened[1])

    def _begin_some(self) -> None:
        while self._idle and self._free and not self._all_begun:
            read = next(self._reads, None)
            if read is None:
                self._all_begun = True
                return
            number = self._idle.pop()
            filling = _Filling(self._free.pop(), read, 0, time.perf_counter())
            self._filling[number] = filling
            self._begin(number, filling)

    def _begin(self, number: int, filling: _Filling) -> None:
        """Have the rest of a read done."""
        read, done = filling.read, filling.done
        try:
            descriptor, direct = self._descriptor(number, read.file)
            left = read.n_bytes - done
            if direct:  # whole pages
                left = -(-left // PAGE_BYTES) * PAGE_BYTES
            at = filling.slot.address + done
            self._libc.begin(number, descriptor, read.offset + done, at, left)
        except OSError as error:
            raise translate(error, self._files.named[read.file]) from error

    def _descriptor(self, number: int, file: int) -> tuple[int, bool]:
        """Of this read alone, and whether it is past the page cache."""
        direct = self._files.direct(file)
        opened = self._open[number]
        if opened is not None and opened[0] == (file, direct):
            return opened[1], direct
        if opened is not None:
            self._open[number] = None
            os.close(opened[1])
        try:
            descriptor = self._files.open(file, direct=direct)
        except OSError as error:
            if not direct or error.errno not in NO_DIRECT:
                raise
            self._files.refuse_direct(file)
            return self._descriptor(number, file)
        self._open[number] = (file, direct), descriptor
        return descriptor, direct

    def _look(self) -> None:
        """See which reads have ended."""
        for number, filling in list(self._filling.items()):
            try:
                found = self._libc.result(number)
            except OSError as error:
                self._fail(number, filling, error)
                continue
            if found is not None:
                self._end(number, filling, found)

    def _fail(self, number: int, filling: _Filling, error: OSError) -> None:
        file = filling.read.file
        if error.errno not in NO_DIRECT or not self._files.direct(file):
            raise translate(error, self._files.named[file]) from error
        self._files.refuse_direct(file)
        self._begin(number, filling)

    def _end(self, number: int, filling: _Filling, found: int) -> None:
        read = filling.read
        filling.done = self._files.after(read.file, read.offset, read.n_bytes, filling.done, found)
        if filling.done < read.n_bytes:
            self._begin(number, filling)
            return
        del self._filling[number]
        self._idle.append(number)
        self.times.read_s += time.perf_counter() - filling.begun_s
        if self._files.direct(read.file):
            self._files.direct_bytes += read.n_bytes
        self._ready.append((filling.slot, read))
