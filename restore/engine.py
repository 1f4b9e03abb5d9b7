"""Runs a load plan: slots are filled from files and verified, and devices have copies of them.

A byte is settled once its copy has arrived and its piece had the right digest, seen by the CPU
before the copy or by the device after it. Nothing is settled otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress

from imgfmt.errors import CorruptData, InvalidInput
from restore.checkers import Checkers
from restore.driver import Driver
from restore.files import Files
from restore.fillers import Filled, Fillers, FillJob, ThreadFillers
from restore.lanes import StageTimes, Target, Workshop
from restore.load_config import LoadConfig, Verify, Workers
from restore.load_plan import LoadPlan, Read
from restore.pinned import Arena
from restore.process_fillers import PROCESSES_FROM_BYTES, ProcessFillers
from restore.sender import Sender
from restore.slots import Slot

N_LANES = 4
"""Streams of each device: while one checks, others copy."""

_POLL_S = 0.00002

_PR_SET_TIMERSLACK = 29

_log = logging.getLogger(__name__)


class Engine:
    """Runs one plan. Blocks: it is for a thread.

    `damaged` makes the error for a row of the plan whose piece has another digest. `settled` is
    called on the thread of `run`, once for each read.
    """

    def __init__(
        self,
        driver: Driver,
        targets: Sequence[Target],
        config: LoadConfig,
        *,
        damaged: Callable[[int], CorruptData],
        settled: Callable[[Read], None],
    ) -> None:
        self._driver = driver
        self._targets = targets
        self._config = config
        self._damaged = damaged
        self._settled = settled
        self._stopped = threading.Event()
        self.times = StageTimes()
        self.n_threads = 0
        self.device_checked_bytes = 0

    def stop(self) -> None:
        """Have `run` end soon; it then raises InvalidInput."""
        self._stopped.set()

    def run(self, plan: LoadPlan, files: Files, arena: Arena) -> None:
        """Load all. After an error no copy is under way, and only blocks hold device memory."""
        devices = sorted({target.device for target in self._targets})
        verify = self._config.verify if len(plan.rows) else Verify.OFF
        if self._driver.immediate and verify is Verify.AUTO:
            verify = Verify.CPU
        with Workshop(self._driver, devices, self._config) as workshop:
            slots = workshop.slots(arena)
            self.n_threads = max(1, min(self._config.n_threads, len(slots), len(plan.reads)))
            workshop.make_lanes(N_LANES, plan, staged=verify in (Verify.AUTO, Verify.DEVICE))
            checkers = Checkers(self._driver, verify, self.n_threads)
            checkers.require(devices)
            sender = Sender(
                self._driver, self._targets, workshop,
                damaged=self._damaged, settled=self._settled,
            )  # fmt: skip
            sender.prepare(plan, slots[0])
            early = sender.copy_now if self._driver.immediate else None
            job = FillJob(plan, files, self._targets, checkers, self._damaged, early)
            with closing(self._fillers(job, verify, slots, arena)) as fillers:
                for slot in slots:
                    fillers.give(slot)
                self._send_all(len(plan.reads), fillers, sender)
            self.times.add(fillers.times)
            self.device_checked_bytes = sender.device_checked_bytes

    def _fillers(
        self, job: FillJob, verify: Verify, slots: Sequence[Slot], arena: Arena
    ) -> Fillers:
        """Processes where the CPU has much to verify, and can be given the memory."""
        wanted = self._config.workers
        much = verify is Verify.CPU and job.plan.read_bytes >= PROCESSES_FROM_BYTES
        processes = wanted is Workers.PROCESSES or (wanted is Workers.AUTO and much)
        if processes and arena.shared and not self._driver.immediate:
            on_cpu = verify is Verify.CPU
            try:
                return ProcessFillers(job, slots, arena, self.n_threads, verify=on_cpu)
            except OSError as error:  # such as a limit to processes
                _log.warning("threads verify, which is slower: no processes (%s)", str(error))
        return ThreadFillers(job, self.n_threads)

    def _send_all(self, n_reads: int, fillers: Fillers, sender: Sender) -> None:
        _sleep_exactly()
        times, clock = self.times, time.perf_counter
        for _ in range(n_reads):
            begun_s = clock()
            slot, read, hasher = self._next(fillers, sender)
            ready_s = clock()
            sender.send(slot, read, hasher)
            times.wait_s += ready_s - begun_s
            times.send_s += clock() - ready_s
        while sender.n_flying:
            sender.wait()

    def _next(self, fillers: Fillers, sender: Sender) -> Filled:
        """What to send next. Until there is something, slots that arrived are filled again."""
        while not self._stopped.is_set():
            while (slot := sender.reap()) is not None:
                fillers.give(slot)
            found = fillers.next(_POLL_S)
            if found is not None:
                return found
        raise InvalidInput("loading was stopped")


def _sleep_exactly() -> None:
    """Have short sleeps of this thread end in time; the kernel may add 50 microseconds else."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
