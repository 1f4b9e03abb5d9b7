"""Processes that fill slots and verify them: a CPU hashes in each, and none waits for another.

With threads, every chunk takes Python's lock twice, and most of the time goes to waiting for it.
Processes see the slots, which must be in shared memory.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

from imgfmt.errors import CorruptData, Internal
from restore import fill_worker
from restore.checkers import Checkers
from restore.driver import Hasher
from restore.files import Files
from restore.fill_worker import ANSWER, HEAD, READ, REQUEST
from restore.fillers import Damaged
from restore.lanes import StageTimes, Target
from restore.load_plan import LoadPlan, Read
from restore.pinned import Arena
from restore.slots import Slot
from transfer.oserrors import translate

PROCESSES_FROM_BYTES = 2 << 30
"""A load of less is done before processes have started."""


class ProcessFillers:
    """Fill slots, which lie in the pieces of `arena`, in the order of the plan. For one thread.

    Each process has slots of its own: they stay in its CPU's cache, and are mapped by it alone.
    With `verify` the processes compare all with its digests, else what is filled is not checked.
    """

    def __init__(
        self,
        plan: LoadPlan,
        files: Files,
        slots: Sequence[Slot],
        arena: Arena,
        n_processes: int,
        *,
        verify: bool,
        targets: Sequence[Target],
        checkers: Checkers,
        damaged: Damaged,
    ) -> None:
        self.times = StageTimes()
        self._plan = plan
        self._files = files
        self.verify = verify
        self._damaged = damaged
        self._targets = targets
        self._checkers = checkers
        self._slots = slots
        self._number = {id(slot): number for number, slot in enumerate(slots)}
        self._next_read = 0
        self._told = 0
        self._idle = 0
        self._answers: deque[bytes] = deque()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._requests: list[int] = []
        self._answered, answers = os.pipe()
        table = self._table(arena)
        try:
            for _ in range(min(n_processes, len(slots))):
                self._start(answers, table, arena)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(answers)
            os.close(table)

    def _start(self, answers: int, table: int, arena: Arena) -> None:
        """One more process."""
        requests, ours = os.pipe()
        self._requests.append(ours)
        inherited = (requests, answers, table)
        command = [sys.executable, "-S", "-P", fill_worker.__file__, *map(str, inherited)]
        try:
            self._processes.append(
                subprocess.Popen(  # a Ctrl-C is for the process that started them
                    command,
                    pass_fds=(*inherited, *(fd for fd, _, _ in arena.shared)),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        finally:
            os.close(requests)

    def _table(self, arena: Arena) -> int:
        """A descriptor of what the processes must know; see `fill_worker`."""
        plan, files = self._plan, self._files
        starts = [address for _, address, _ in arena.shared]
        places: list[tuple[int, int]] = []
        for slot in self._slots:
            piece = max(i for i, start in enumerate(starts) if start <= slot.address)
            places.append((piece, slot.address - starts[piece]))
        document = {
            "files": [[path, files.direct(n)] for n, path in enumerate(files.paths)],
            "pieces": [[fd, length] for fd, _, length in arena.shared],
            "slots": places,
            "verify": self.verify,
            "slot_bytes": len(self._slots[0].view),
        }
        raw = json.dumps(document).encode()
        reads = b"".join(READ.pack(r.file, r.offset, r.n_bytes, r.first, r.end) for r in plan.reads)
        json_end = HEAD.size + len(raw)
        head = HEAD.pack(json_end, json_end, json_end + len(reads))
        table = os.memfd_create("snapcask-table", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(table), "wb") as file:
            file.writelines((head, raw, reads, plan.rows.tobytes()))
        return table

    def give(self, slot: Slot) -> None:
        """Have the slot filled with the next read, if there is one left."""
        if self._next_read < len(self._plan.reads):
            number = self._number[id(slot)]
            try:
                os.write(
                    self._requests[number % len(self._requests)],
                    REQUEST.pack(number, self._next_read),
                )
            except BrokenPipeError as error:
                raise Internal("a process that reads has ended") from error
            self._next_read += 1

    @property
    def finished(self) -> bool:
        """Whether `next` has told of all reads."""
        return self._told == len(self._plan.reads)

    def next(self, timeout_s: float) -> tuple[Slot, Read, Hasher | None] | None:
        """A slot that was filled, and what is to check it, or None if none is yet.

        Raises what filling one raised.
        """
        if not self._answers:
            if not select.select([self._answered], [], [], timeout_s)[0]:
                self._check_alive()
                return None
            raw = os.read(self._answered, 64 * ANSWER.size)
            if not raw:
                raise Internal("the processes that read have ended")
            self._answers.extend(
                raw[at : at + ANSWER.size] for at in range(0, len(raw), ANSWER.size)
            )
        slot, number, outcome, detail, read_us, hash_us = ANSWER.unpack(self._answers.popleft())
        read = self._plan.reads[number]
        self._raise(read, outcome, detail)
        self._told += 1
        self.times.read_s += read_us / 1e6
        self.times.hash_s += hash_us / 1e6
        if self.verify:
            self.times.checked_bytes += read.n_bytes
            return self._slots[slot], read, None
        device = self._targets[read.copies[0].block].device
        return self._slots[slot], read, self._checkers.hasher(device)

    def _raise(self, read: Read, outcome: int, detail: int) -> None:
        name = self._files.named[read.file]
        if outcome == fill_worker.DIFFERS:
            raise self._damaged(detail)
        if outcome == fill_worker.CUT_SHORT:
            end = read.offset + read.n_bytes
            raise CorruptData(f"{name} is cut short: it ends before {end}")
        if outcome == fill_worker.REFUSED:
            error = OSError(detail, os.strerror(detail))
            raise translate(error, name) from error

    def _check_alive(self) -> None:
        """Now and then: it is a system call for each process."""
        self._idle += 1
        for process in self._processes if self._idle % 64 == 0 else ():
            if process.poll() is not None:
                raise Internal(f"a process that reads ended with {process.returncode}")

    def close(self) -> None:
        """Nobody writes to slots afterwards. The processes keep nothing, and are killed."""
        for descriptor in (*self._requests, self._answered):
            os.close(descriptor)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
