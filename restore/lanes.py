"""Streams, events and device memory that one load uses, and that go back whatever happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from imgfmt.errors import ImageError, OutOfResources
from restore.driver import Driver, Event, Stream
from restore.load_config import LoadConfig
from restore.load_plan import LoadPlan
from restore.pinned import Arena
from restore.slots import Slot, make_slots

_log = logging.getLogger(__name__)


class Target(NamedTuple):
    """A block of device memory."""

    device: int
    pointer: int


@dataclass(slots=True)
class StageTimes:
    """Seconds that threads spent reading and hashing, and one handing to devices and waiting.

    `checked_bytes` are those that were hashed.
    """

    read_s: float = 0.0
    hash_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    checked_bytes: int = 0

    def add(self, other: StageTimes) -> None:
        """Add another thread's."""
        for stage in fields(self):
            setattr(self, stage.name, getattr(self, stage.name) + getattr(other, stage.name))


@contextmanager
def timed(times: StageTimes, stage: str) -> Iterator[None]:
    """Add the seconds of a block to `stage`."""
    begun_s = time.perf_counter()
    try:
        yield
    finally:
        setattr(times, stage, getattr(times, stage) + time.perf_counter() - begun_s)


@dataclass(slots=True)
class Lane:
    """A stream for each device, and device memory to check slots in."""

    streams: dict[int, Stream] = field(default_factory=dict)
    staging: dict[int, int] = field(default_factory=dict)


class Workshop:
    """All that is made for one load on some devices. Closing it waits for their streams first.

    With `staged`, devices get room for the rows of the plan, and lanes for a slot.
    """

    def __init__(self, driver: Driver, devices: Sequence[int], config: LoadConfig) -> None:
        self._driver = driver
        self.devices = devices
        self._config = config
        self._stack = ExitStack()
        self.lanes: list[Lane] = []
        self.rows: dict[int, int] = {}

    def __enter__(self) -> Workshop:
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self.lanes:  # nothing may be copying when memory goes back
            for device, stream in lane.streams.items():
                _quietly(self._driver.activate, device)
                _quietly(self._driver.synchronize, stream)
        self._stack.close()

    def slots(self, arena: Arena) -> list[Slot]:
        """All slots that the arena holds."""

        def events() -> dict[int, Event]:
            return {device: self.event(device) for device in self.devices}

        slots = make_slots(self._driver, arena, self._config.slot_bytes, events)
        if not slots:
            raise OutOfResources(
                f"{arena.size_bytes} bytes of pinned memory hold no slot of"
                f" {self._config.slot_bytes}; allow more"
            )
        return slots

    def event(self, device: int) -> Event:
        """An event for as long as the load takes."""
        event = self._driver.create_event(device)
        self._stack.callback(_quietly, self._driver.destroy_event, device, event)
        return event

    def _memory(self, device: int, n_bytes: int) -> int:
        try:
            pointer = self._driver.allocate(device, n_bytes)
        except OutOfResources as error:
            advice = "without verifying there (verify=cpu), a load takes no memory beside tensors"
            raise OutOfResources(f"{error}; {advice}") from error
        self._stack.callback(_quietly, self._driver.free, device, pointer)
        return pointer

    def make_lanes(self, n_lanes: int, plan: LoadPlan, *, staged: bool) -> None:
        """Lanes that are used in turn."""
        for device in self.devices if staged and len(plan.rows) else ():
            self.rows[device] = self._memory(device, plan.rows.nbytes)
        for _ in range(n_lanes):
            self.add_lane(staged=staged)

    def add_lane(self, *, staged: bool = False) -> Lane:
        """One more lane."""
        lane = Lane()
        self.lanes.append(lane)
        for device in self.devices:
            if staged:
                lane.staging[device] = self._memory(device, self._config.slot_bytes)
            stream = self._driver.create_stream(device)
            self._stack.callback(_quietly, self._driver.destroy_stream, device, stream)
            lane.streams[device] = stream
        return lane


def _quietly(work: Callable[..., None], *args: object) -> None:
    """Clean up. A device that failed may refuse: the error that matters was raised before."""
    try:
        work(*args)
    except ImageError as error:
        _log.warning("while cleaning up: %s", str(error))  # not its frames, which hold memory
