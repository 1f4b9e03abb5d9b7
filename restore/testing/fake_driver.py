"""A `Driver` without a device. Its work is done as late as it may be: when somebody waits for it.

So memory that is reused, or device memory that is freed, before its event gives wrong bytes. It
counts what it gave, refuses what a real driver would refuse, and fails where it is told to.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sized
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from imgfmt.errors import NotFound, OutOfResources
from restore.driver import CHECK_ROW, STATUS_BYTES, DeviceFacts, DeviceFailed, Event, Hasher, Stream

POISON = b"\xdb"
FIRST_POINTER = 1 << 40
STEP_BYTES = 1 << 32

Work = Callable[[], None]


@dataclass(eq=False)
class FakeStream:
    """Work that was asked for and is not done."""

    device: int
    queue: list[Work] = field(default_factory=list)
    done: int = 0


@dataclass(eq=False)
class FakeEvent:
    """Reached once `stream` has done `position` pieces of work."""

    stream: FakeStream | None = None
    position: int = 0
    asked: int = 0


class FakeDriver:
    """See `restore.driver.Driver`. `fail_at` maps a method's name to its call (from 1) that fails.

    `lost` has devices that answer nothing any more.
    """

    kind = "cuda"
    immediate = False

    def __init__(
        self,
        n_devices: int = 1,
        memory_bytes: int = 1 << 40,
        *,
        hashes: bool = True,
        fail_at: dict[str, int] | None = None,
    ) -> None:
        self.n_devices = n_devices
        self.memory_bytes = memory_bytes
        self.hashes = hashes
        self.fail_at = fail_at or {}
        self.calls: Counter[str] = Counter()
        self.lost: set[int] = set()
        self.memory: dict[int, tuple[int, bytearray]] = {}
        self.registered: dict[int, int] = {}
        self.streams: set[FakeStream] = set()
        self.events: set[FakeEvent] = set()
        self.copied_bytes = 0
        self.most_pending = 0
        self._next = FIRST_POINTER
        self._lock = threading.RLock()

    # What tests look at.

    @property
    def leaks(self) -> list[str]:
        """What was given and not taken back."""
        kinds: dict[str, Sized] = {
            "device memory": self.memory,
            "registrations": self.registered,
            "streams": self.streams,
            "events": self.events,
        }
        return [f"{len(left)} {name}" for name, left in kinds.items() if left]

    def read(self, pointer: int, n_bytes: int) -> bytes:
        """Device memory as it is now: without the work that nobody waited for."""
        data, offset = self._resolve(pointer, n_bytes)
        return bytes(data[offset : offset + n_bytes])

    def _enter(self, name: str, device: int | None = None) -> None:
        with self._lock:
            self.calls[name] += 1
            if device in self.lost:
                raise DeviceFailed(f"{name}: cuda:{device} is gone")
            if self.fail_at.get(name) == self.calls[name]:
                raise DeviceFailed(f"{name} fails as it was told to")

    def _resolve(self, pointer: int, n_bytes: int) -> tuple[bytearray, int]:
        with self._lock:
            bases = sorted(self.memory)
            base = bases[bisect.bisect_right(bases, pointer) - 1] if bases else 0
            if not bases or pointer < base or pointer - base + n_bytes > len(self.memory[base][1]):
                raise DeviceFailed(f"illegal address {pointer:#x}, {n_bytes} bytes")
            return self.memory[base][1], pointer - base

    def _check_locked(self, address: int, n_bytes: int) -> None:
        with self._lock:
            inside = any(
                start <= address and address + n_bytes <= start + length
                for start, length in self.registered.items()
            )
        if not inside:
            raise DeviceFailed("a copy of memory that is not page-locked")

    def _lower(self, status: int, value: int) -> None:
        """What a kernel does to a word of device memory, or of mapped host memory."""
        if status < FIRST_POINTER or status > self._next:
            self._check_locked(status, STATUS_BYTES)
            word = ctypes.c_uint32.from_address(status)
            word.value = min(word.value, value)
            return
        data, offset = self._resolve(status, STATUS_BYTES)
        worst = min(value, int.from_bytes(data[offset : offset + STATUS_BYTES], "little"))
        data[offset : offset + STATUS_BYTES] = worst.to_bytes(STATUS_BYTES, "little")

    # Devices and memory.

    def device_count(self) -> int:
        """See `Driver.device_count`."""
        return self.n_devices

    def describe(self, device: int) -> DeviceFacts:
        """See `Driver.describe`."""
        if not 0 <= device < self.n_devices:
            raise NotFound(f"there is no cuda:{device}")
        return DeviceFacts(f"fake {device}", "", self.memory_bytes)

    def activate(self, device: int) -> None:
        """See `Driver.activate`."""
        self._enter("activate", device)

    def allocate(self, device: int, n_bytes: int) -> int:
        """See `Driver.allocate`; poisoned."""
        self._enter("allocate", device)
        with self._lock:
            if n_bytes > self.free_bytes(device):
                raise OutOfResources(f"{n_bytes} bytes of cuda:{device} can't be had")
            pointer = self._next
            self._next += STEP_BYTES
            self.memory[pointer] = (device, bytearray(POISON * n_bytes))
            return pointer

    def free(self, device: int, pointer: int) -> None:
        """See `Driver.free`."""
        self._enter("free", device)
        for stream in list(self.streams):
            if stream.device == device:
                self._advance(stream, len(stream.queue))
        with self._lock:
            owner, _ = self.memory.pop(pointer)
            assert owner == device

    def free_bytes(self, device: int) -> int:
        """See `Driver.free_bytes`."""
        used = sum(len(data) for owner, data in self.memory.values() if owner == device)
        return self.memory_bytes - used

    def register(self, address: int, n_bytes: int) -> None:
        """See `Driver.register`."""
        self._enter("register")
        assert address % 4096 == 0
        self.registered[address] = n_bytes

    def unregister(self, address: int) -> None:
        """See `Driver.unregister`. Work that is not done would read what is gone."""
        self._enter("unregister")
        del self.registered[address]

    def mapped(self, address: int) -> int:
        """See `Driver.mapped`: host memory has addresses of its own."""
        self._check_locked(address, 1)
        return address

    # Streams and events.

    def create_stream(self, device: int) -> Stream:
        """See `Driver.create_stream`."""
        self._enter("create_stream", device)
        stream = FakeStream(device)
        self.streams.add(stream)
        return stream

    def destroy_stream(self, device: int, stream: Stream) -> None:
        """See `Driver.destroy_stream`."""
        self._enter("destroy_stream", device)
        assert isinstance(stream, FakeStream)
        self.streams.remove(stream)

    def create_event(self, device: int) -> Event:
        """See `Driver.create_event`."""
        self._enter("create_event", device)
        event = FakeEvent()
        self.events.add(event)
        return event

    def destroy_event(self, device: int, event: Event) -> None:
        """See `Driver.destroy_event`."""
        self._enter("destroy_event", device)
        assert isinstance(event, FakeEvent)
        self.events.remove(event)

    def record(self, event: Event, stream: Stream) -> None:
        """See `Driver.record`."""
        assert isinstance(event, FakeEvent)
        assert isinstance(stream, FakeStream)
        self._enter("record", stream.device)
        with self._lock:
            event.stream, event.position, event.asked = stream, len(stream.queue), 0
            self.most_pending = max(self.most_pending, sum(len(s.queue) for s in self.streams))

    def reached(self, event: Event) -> bool:
        """See `Driver.reached`. The work is done when this is asked the third time."""
        assert isinstance(event, FakeEvent)
        if event.stream is None:
            return True
        self._enter("reached", event.stream.device)
        event.asked += 1
        if event.asked > 2:
            self._advance(event.stream, event.position)
        return event.stream.done >= event.position

    def wait(self, event: Event) -> None:
        """See `Driver.wait`: does the work."""
        assert isinstance(event, FakeEvent)
        if event.stream is not None:
            self._enter("wait", event.stream.device)
            self._advance(event.stream, event.position)

    def synchronize(self, stream: Stream) -> None:
        """See `Driver.synchronize`: does the work."""
        assert isinstance(stream, FakeStream)
        self._enter("synchronize", stream.device)
        self._advance(stream, len(stream.queue))

    def _advance(self, stream: FakeStream, position: int) -> None:
        with self._lock:
            while stream.done < position:
                work = stream.queue[stream.done]
                stream.done += 1
                work()

    # Work.

    def _queue(self, name: str, stream: Stream, work: Work) -> None:
        assert isinstance(stream, FakeStream)
        self._enter(name, stream.device)
        with self._lock:
            stream.queue.append(work)

    def copy_to_device(self, pointer: int, address: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_to_device`: reads the host's memory when the work is done."""
        self._check_locked(address, n_bytes)

        def copy() -> None:
            data, offset = self._resolve(pointer, n_bytes)
            data[offset : offset + n_bytes] = ctypes.string_at(address, n_bytes)
            self.copied_bytes += n_bytes

        self._queue("copy_to_device", stream, copy)

    def copy_from_device(self, address: int, pointer: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_from_device`."""
        self._check_locked(address, n_bytes)

        def copy() -> None:
            ctypes.memmove(address, self.read(pointer, n_bytes), n_bytes)

        self._queue("copy_from_device", stream, copy)

    def copy_on_device(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_on_device`."""

        def copy() -> None:
            data, offset = self._resolve(target, n_bytes)
            data[offset : offset + n_bytes] = self.read(source, n_bytes)

        self._queue("copy_on_device", stream, copy)

    def clear(self, pointer: int, value: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.clear`."""

        def fill() -> None:
            data, offset = self._resolve(pointer, n_bytes)
            data[offset : offset + n_bytes] = bytes([value]) * n_bytes

        self._queue("clear", stream, fill)

    def load_hasher(self, device: int, *, wait: bool) -> Hasher | None:
        """See `Driver.load_hasher`. In the background it takes three calls."""
        self._enter("load_hasher", device)
        ready = wait or self.calls["load_hasher"] > 3
        return _FakeHasher(self) if self.hashes and ready else None


class _FakeHasher:
    """See `restore.driver.Hasher`."""

    bytes_per_s = float("inf")

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver

    def check(
        self, stream: Stream, staged: int, rows: int, n_rows: int, first: int, status: int
    ) -> None:
        """See `Hasher.check`."""
        driver = self._driver

        def hash_rows() -> None:
            table = np.frombuffer(driver.read(rows, n_rows * CHECK_ROW.itemsize), CHECK_ROW)
            for index, row in enumerate(table):
                piece = driver.read(staged + int(row["offset"]), int(row["n_bytes"]))
                if blake3(piece).digest() != row["digest"].tobytes():
                    driver._lower(status, first + index)

        driver._queue("check", stream, hash_rows)
