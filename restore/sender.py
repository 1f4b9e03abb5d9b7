"""The side of a load that talks to devices: a thread sends its slots, and takes them back.

A slot is used again only after the events behind its copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from imgfmt.errors import CorruptData
from restore.direct_storage import DirectStorage
from restore.driver import CHECK_ROW, NO_MISMATCH, STATUS_BYTES, Driver, Hasher, Stream
from restore.lanes import Lane, Target, Workshop
from restore.load_plan import LoadPlan, Read
from restore.slots import Slot
from restore.tensor import read_back

_BATCH = 16
_CLEAN = NO_MISMATCH.to_bytes(STATUS_BYTES, "little")


@dataclass(slots=True, eq=False)
class _Flight:
    """A slot that devices copy from; `checked` if one of them compares it with its rows."""

    slot: Slot
    read: Read
    devices: Sequence[int]
    checked: bool


class Sender:
    """For one thread, which uses `lanes` in turn.

    `settled` is told of the reads that arrived and are as they must be: of each at once if `eager`.
    """

    def __init__(
        self,
        driver: Driver,
        targets: Sequence[Target],
        workshop: Workshop,
        lanes: Sequence[Lane],
        *,
        damaged: Callable[[int], CorruptData],
        settled: Callable[[Sequence[Read]], None],
        eager: bool,
    ) -> None:
        self._driver = driver
        self._targets = targets
        self._workshop = workshop
        self._lanes = lanes
        self._damaged = damaged
        self._settled = settled
        self._landed: list[Read] = []
        self._batch = 1 if eager else _BATCH
        self._flying: deque[_Flight] = deque()
        self._turn = 0
        self.device_checked_bytes = 0

    def prepare(self, plan: LoadPlan, slot: Slot) -> None:
        """Zeros, and what devices need to check: all of it there before the first read."""
        driver, workshop = self._driver, self._workshop
        for device in workshop.devices:
            driver.activate(device)
            stream = self._lanes[0].streams[device]
            for fill in plan.fills:
                target = self._targets[fill.block]
                if target.device == device:
                    driver.clear(target.pointer + fill.offset, 0, fill.n_bytes, stream)
            if device in workshop.rows:
                self._upload(plan.rows.tobytes(), workshop.rows[device], stream, slot)
            driver.synchronize(stream)

    def _upload(self, raw: bytes, pointer: int, stream: Stream, slot: Slot) -> None:
        for start in range(0, len(raw), len(slot.view)):
            part = raw[start : start + len(slot.view)]
            slot.view[: len(part)] = part
            self._driver.copy_to_device(pointer + start, slot.address, len(part), stream)
            self._driver.synchronize(stream)

    def send(self, slot: Slot, read: Read, hasher: Hasher | None) -> None:
        """Have devices copy a slot; the first of them checks it if there is a hasher."""
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        devices = self._workshop.devices
        if len(devices) > 1:
            devices = sorted({self._targets[copy.block].device for copy in read.copies})
        for device in devices:
            self._driver.activate(device)
            stream, staged = lane.streams[device], 0
            if hasher is not None and device == devices[0]:
                staged = lane.staging[device]
                self._check(slot, read, device, staged, hasher, stream)
            self._copy(slot, read, device, staged, stream)
            self._driver.record(slot.events[device], stream)
        self._flying.append(_Flight(slot, read, devices, hasher is not None))

    def pull(
        self, slot: Slot, read: Read, hasher: Hasher | None, path: str, storage: DirectStorage
    ) -> bool:
        """Have the device read a file itself, and check and copy what it got.

        False if it does not: the slot is to be filled and sent then. Its buffer is not used here,
        only its event and status word. For reads of one device, and senders with one lane.
        """
        (lane,), (device, *others) = self._lanes, self._workshop.devices
        if others or device not in lane.staging:
            return False
        self._driver.activate(device)
        stream, staged = lane.streams[device], lane.staging[device]
        self._driver.synchronize(stream)  # cuFile writes without asking the stream

        def back(pointer: int, n_bytes: int) -> bytes:
            return read_back(self._driver, device, pointer, n_bytes)

        if storage.prove(path, staged, back) is not None:
            return False
        if not storage.read(path, staged, read.n_bytes, read.offset):
            return False
        if hasher is not None:
            self._hash(slot, read, device, staged, hasher, stream)
        self._copy(slot, read, device, staged, stream)
        self._driver.record(slot.events[device], stream)
        self._flying.append(_Flight(slot, read, (device,), hasher is not None))
        return True

    def _check(
        self, slot: Slot, read: Read, device: int, staged: int, hasher: Hasher, stream: Stream
    ) -> None:
        self._driver.copy_to_device(staged, slot.address, read.n_bytes, stream)
        self._hash(slot, read, device, staged, hasher, stream)

    def _hash(
        self, slot: Slot, read: Read, device: int, staged: int, hasher: Hasher, stream: Stream
    ) -> None:
        slot.status[:] = _CLEAN
        rows = self._workshop.rows[device] + read.first * CHECK_ROW.itemsize
        hasher.check(stream, staged, rows, read.end - read.first, read.first, slot.status_at)
        self.device_checked_bytes += read.n_bytes

    def _copy(self, slot: Slot, read: Read, device: int, staged: int, stream: Stream) -> None:
        """To the blocks of one device, from the slot or from where it was staged there."""
        driver = self._driver
        for at, n_bytes, block, offset in read.copies:
            target = self._targets[block]
            if target.device != device:
                continue
            pointer = target.pointer + offset
            if staged:
                driver.copy_on_device(pointer, staged + at, n_bytes, stream)
            else:
                driver.copy_to_device(pointer, slot.address + at, n_bytes, stream)

    def reap(self) -> Slot | None:
        """The slot that was sent first, if it has arrived."""
        if not self._flying:
            return None
        first = self._flying[0]
        for device in first.devices:
            if not self._driver.reached(first.slot.events[device]):
                return None
        return self.wait()

    def wait(self) -> Slot:
        """The slot that was sent first, once it has arrived."""
        flight = self._flying.popleft()
        for device in flight.devices:
            self._driver.wait(flight.slot.events[device])
        if flight.checked:
            worst = int.from_bytes(flight.slot.status, "little")
            if worst != NO_MISMATCH:
                raise self._damaged(worst)
        self._landed.append(flight.read)
        if len(self._landed) >= self._batch:
            self.flush()
        return flight.slot

    def drain(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._flying:
            self.wait()
        self.flush()

    def flush(self) -> None:
        """Tell of what has arrived."""
        landed, self._landed = self._landed, []
        if landed:
            self._settled(landed)
