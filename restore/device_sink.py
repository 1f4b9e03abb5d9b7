"""A sink of the transfer engine that copies verified chunks from its pinned buffers to devices.

A call returns once its copies have arrived: the buffer may be reused then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from imgfmt.errors import CorruptData, NotFound
from restore.driver import Event
from restore.host_driver import address_of
from restore.lanes import Lane, StageTimes, Workshop, timed
from restore.load_job import LoadJob
from restore.load_plan import Copy, Want, merged
from transfer.plan import Numbers


class DeviceSink:
    """See `transfer.execute.Sink`. `wanted` has what wants each chunk, and where it begins.

    To be closed after the transfer, which waits for copies that an error left behind.
    """

    def __init__(self, job: LoadJob, wanted: Mapping[int, list[tuple[Want, int]]]) -> None:
        self._job = job
        self._wanted = wanted
        self._driver = job.driver
        devices = sorted({target.device for target in job.targets})
        self._workshop = Workshop(job.driver, devices, job.config)
        self._mine = threading.local()
        self._making = threading.Lock()
        self.times = StageTimes()

    def __enter__(self) -> DeviceSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._workshop.__exit__()

    def _lane(self) -> tuple[Lane, dict[int, Event]]:
        """Streams and events of this thread."""
        if not hasattr(self._mine, "lane"):
            with self._making:
                workshop = self._workshop
                events = {device: workshop.event(device) for device in workshop.devices}
                self._mine.lane = workshop.add_lane(), events
        lane: tuple[Lane, dict[int, Event]] = self._mine.lane
        return lane

    def clear(self, fills: Sequence[Copy]) -> None:
        """Make these ranges zero."""
        lane, _ = self._lane()
        for fill in fills:
            target = self._job.targets[fill.block]
            self._driver.activate(target.device)
            stream = lane.streams[target.device]
            self._driver.clear(target.pointer + fill.offset, 0, fill.n_bytes, stream)
        for device, stream in lane.streams.items():
            self._driver.activate(device)
            self._driver.synchronize(stream)

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        lane, events = self._lane()
        mine, used = StageTimes(), set[int]()
        chunks = numbers.tolist()
        with timed(mine, "send_s"):
            for address, n_bytes, block, offset in self._copies(chunks, views):
                target = self._job.targets[block]
                self._driver.activate(target.device)
                stream = lane.streams[target.device]
                self._driver.copy_to_device(target.pointer + offset, address, n_bytes, stream)
                used.add(target.device)
            for device in used:
                self._driver.activate(device)
                self._driver.record(events[device], lane.streams[device])
        with timed(mine, "wait_s"):
            for device in used:
                self._driver.wait(events[device])
        with self._making:
            self.times.add(mine)
        parts = [{want.tensor for want, _ in self._wanted[number]} for number in chunks]
        self._job.settle(parts, sum(map(len, views)))

    def _copies(self, chunks: Sequence[int], views: Sequence[memoryview]) -> Sequence[Copy]:
        """All places that want some of these chunks; `at` is an address. Few where they adjoin."""
        found: list[Copy] = []
        for number, view in zip(chunks, views, strict=True):
            address = address_of(view)
            for want, begin in self._wanted[number]:
                low, high = max(begin, want.start), min(begin + len(view), want.end)
                where = want.offset + low - want.start
                found.append(Copy(address + low - begin, high - low, want.block, where))
        return merged(found)

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        """See `Sink.damaged`."""
        hit = [want.tensor for number in numbers.tolist() for want, _ in self._wanted[number]]
        raise type(error)(f"{error}; {self._job.naming(hit)} is lost") from error
