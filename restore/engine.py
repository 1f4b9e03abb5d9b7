"""Runs a load plan: threads fill slots from files, verify them, and have devices copy them.

Where the CPU has nothing to verify, the C library reads, and where it has much, processes read and
verify; one thread then sends what they filled. Else each of some threads does all, with slots and
streams of its own, so that none waits for another. A byte is settled once its
copy has arrived and its piece had the right digest, seen by the CPU before the copy or by the
device after it. Nothing is settled otherwise.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from functools import partial

from imgfmt.errors import InvalidInput
from restore.checkers import Checkers
from restore.direct_storage import DirectStorage
from restore.driver import Driver, Hasher
from restore.files import Files
from restore.fillers import Damaged, Filler
from restore.lanes import Lane, StageTimes, Target, Workshop
from restore.libc_fillers import LibcFillers
from restore.libc_reads import N_THREADS, can_read
from restore.load_config import LoadConfig, Verify, Workers
from restore.load_plan import LoadPlan, Read
from restore.pinned import Arena
from restore.process_fillers import PROCESSES_FROM_BYTES, ProcessFillers
from restore.sender import Sender
from restore.slots import Slot

N_LANES = 4
"""Streams of each device where one thread sends all."""

Fillers = LibcFillers | ProcessFillers
"""Who fills slots for a thread that sends them."""

_POLL_S = 0.00002
_PR_SET_TIMERSLACK = 29

_log = logging.getLogger(__name__)


class Engine:
    """Runs one plan. Blocks: it is for a thread.

    `damaged` makes the error for a row of the plan whose piece has another digest. `settled` is
    told of each read once, from several threads, and at once if `eager`. With `storage` files that
    are fit for it are read by the device.
    """

    def __init__(
        self,
        driver: Driver,
        targets: Sequence[Target],
        config: LoadConfig,
        *,
        damaged: Damaged,
        settled: Callable[[Sequence[Read]], None],
        eager: bool = True,
        storage: DirectStorage | None = None,
    ) -> None:
        self._driver = driver
        self._targets = targets
        self._config = config
        self._damaged = damaged
        self._settled = settled
        self._eager = eager
        self._storage = storage
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
        with Workshop(self._driver, devices, self._config) as workshop, ExitStack() as stack:
            slots = workshop.slots(arena)
            self.n_threads = max(1, min(self._config.n_threads, len(slots), len(plan.reads)))
            checkers = Checkers(self._driver, verify, self.n_threads)
            checkers.require(devices)
            fillers: Fillers | None = self._processes(plan, files, verify, slots, arena, checkers)
            if fillers is not None:
                stack.callback(fillers.close)
            staged = self._storage is not None or verify in (Verify.AUTO, Verify.DEVICE)
            workshop.make_lanes(N_LANES if fillers else self.n_threads, plan, staged=staged)
            self._sender(workshop, workshop.lanes).prepare(plan, slots[0])
            if fillers is None:
                fillers = self._threads(plan, files, checkers, workshop, slots)
                if fillers is not None:
                    stack.callback(fillers.close)
            if fillers is not None:
                self._run_sender(fillers, slots, self._sender(workshop, workshop.lanes))
        if fillers is not None:
            self.times.add(fillers.times)

    def _sender(self, workshop: Workshop, lanes: Sequence[Lane]) -> Sender:
        return Sender(
            self._driver, self._targets, workshop, lanes,
            damaged=self._damaged, settled=self._settled, eager=self._eager,
        )  # fmt: skip

    # Threads, each of which does all.

    def _threads(
        self,
        plan: LoadPlan,
        files: Files,
        checkers: Checkers,
        workshop: Workshop,
        slots: Sequence[Slot],
    ) -> LibcFillers | None:
        """Load what the CPU verifies, or all; returns who is to fill the rest."""
        filler = Filler(plan, files, self._targets, checkers, self._damaged)
        reads = iter(plan.reads)  # shared: its next() is one step for all threads
        if self._libc_may_read():
            known = partial(checkers.settled, workshop.devices[0])
            if not known():
                self._run_threads(reads, filler, workshop, slots, known)
            if not checkers.by_cpu:
                n_reads = min(self.n_threads, N_THREADS) * 3 // 2  # some wait their turn
                return LibcFillers(reads, files, n_reads, filler.device_hasher)
        self._run_threads(reads, filler, workshop, slots, _never)
        return None

    def _run_threads(
        self,
        reads: Iterator[Read],
        filler: Filler,
        workshop: Workshop,
        slots: Sequence[Slot],
        enough: Callable[[], bool],
    ) -> None:
        """Load what is left of `reads`, or until it is `enough`."""
        senders = [self._sender(workshop, [lane]) for lane in workshop.lanes]
        n_threads = len(senders)
        times = [StageTimes() for _ in senders]
        with ThreadPoolExecutor(n_threads, thread_name_prefix="snapcask-load") as threads:
            work = [
                threads.submit(
                    self._work, reads, filler, sender, list(slots[i::n_threads]), mine, enough
                )
                for i, (sender, mine) in enumerate(zip(senders, times, strict=True))
            ]
            done, _ = wait(work, return_when=FIRST_EXCEPTION)
            failed = [future for future in done if future.exception() is not None]
            if failed:
                self._stopped.set()
        for future in failed or work:
            future.result()
        if self._stopped.is_set():
            raise InvalidInput("loading was stopped")
        for mine in times:
            self.times.add(mine)
        self.device_checked_bytes += sum(sender.device_checked_bytes for sender in senders)

    def _work(
        self,
        reads: Iterator[Read],
        filler: Filler,
        sender: Sender,
        free: list[Slot],
        times: StageTimes,
        enough: Callable[[], bool],
    ) -> None:
        clock = time.perf_counter
        while not (self._stopped.is_set() or enough()):
            read = next(reads, None)
            if read is None:
                break
            begun_s = clock()
            slot = free.pop() if free else sender.wait()
            times.wait_s += clock() - begun_s
            if self._storage is not None and filler.pull(read, slot, sender, self._storage):
                continue
            hasher = filler.fill(read, slot, times)
            filled_s = clock()
            sender.send(slot, read, hasher)
            times.send_s += clock() - filled_s
        sender.drain()

    # Others that fill, and this thread, which sends.

    def _libc_may_read(self) -> bool:
        """Whether the C library can do what the CPU does not verify."""
        alone = self._driver.immediate or self._storage is not None
        return not alone and self._config.workers is Workers.AUTO and can_read()

    def _processes(
        self,
        plan: LoadPlan,
        files: Files,
        verify: Verify,
        slots: Sequence[Slot],
        arena: Arena,
        checkers: Checkers,
    ) -> ProcessFillers | None:
        """None where threads are to do all."""
        wanted = self._config.workers
        much = verify is Verify.CPU and plan.read_bytes >= PROCESSES_FROM_BYTES
        if self._driver.immediate or self._storage is not None or not arena.shared:
            return None
        if wanted is Workers.THREADS or (wanted is Workers.AUTO and not much):
            return None
        try:
            return ProcessFillers(
                plan, files, slots, arena, max(1, self.n_threads - 1),
                verify=verify in (Verify.AUTO, Verify.CPU), targets=self._targets,
                checkers=checkers, damaged=self._damaged,
            )  # fmt: skip
        except OSError as error:  # such as a limit to processes
            _log.warning("threads verify, which is slower: no processes (%s)", str(error))
            return None

    def _run_sender(self, fillers: Fillers, slots: Sequence[Slot], sender: Sender) -> None:
        _sleep_exactly()
        for slot in slots:
            fillers.give(slot)
        clock = time.perf_counter
        begun_s = clock()
        while (found := self._next(fillers, sender)) is not None:
            slot, read, hasher = found
            ready_s = clock()
            sender.send(slot, read, hasher)
            self.times.wait_s += ready_s - begun_s
            begun_s = clock()
            self.times.send_s += begun_s - ready_s
        sender.drain()
        self.device_checked_bytes += sender.device_checked_bytes

    def _next(self, fillers: Fillers, sender: Sender) -> tuple[Slot, Read, Hasher | None] | None:
        """What to send next, None at the end. Meanwhile slots that arrived are filled again."""
        while not self._stopped.is_set():
            while (slot := sender.reap()) is not None:
                fillers.give(slot)
            if fillers.finished:
                return None
            found = fillers.next(_POLL_S)
            if found is not None:
                return found
        raise InvalidInput("loading was stopped")


def _never() -> bool:
    return False


def _sleep_exactly() -> None:
    """Have short sleeps of this thread end in time; the kernel may add 50 microseconds else."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
