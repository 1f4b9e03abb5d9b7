"""A `Driver` whose one device, `cpu`, is host memory: copies are made at once, by the CPU.

With a GPU driver as `pinned_by`, what it allocates is page-locked, ready to be copied to GPUs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from imgfmt.errors import NotFound, OutOfResources
from restore.driver import DeviceFacts, Driver, Event, Hasher, Stream

_EMPTY_BYTES = 1


class HostDriver:
    """See `restore.driver.Driver`."""

    kind = "cpu"
    immediate = True

    def __init__(self, pinned_by: Driver | None = None) -> None:
        self._pinned_by = pinned_by
        self._lock = threading.Lock()
        self._memory: dict[int, mmap.mmap] = {}

    @property
    def pinned(self) -> bool:
        """Whether its memory is page-locked."""
        return self._pinned_by is not None

    def device_count(self) -> int:
        """See `Driver.device_count`."""
        return 1

    def describe(self, device: int) -> DeviceFacts:
        """See `Driver.describe`."""
        if device:
            raise NotFound("there is one device cpu only")
        return DeviceFacts("host memory", "", os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)

    def activate(self, device: int) -> None:
        """See `Driver.activate`."""

    def allocate(self, device: int, n_bytes: int) -> int:
        """See `Driver.allocate`: begins on a page, and is zero."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            memory = mmap.mmap(-1, max(n_bytes, _EMPTY_BYTES), flags=flags)
        except (OSError, OverflowError) as error:
            raise OutOfResources(f"{n_bytes} bytes of host memory can't be had") from error
        address = address_of(memoryview(memory))
        if self._pinned_by is not None:
            self._pinned_by.register(address, len(memory))
        with self._lock:
            self._memory[address] = memory
        return address

    def free(self, device: int, pointer: int) -> None:
        """See `Driver.free`."""
        with self._lock:
            memory = self._memory.pop(pointer)
        if self._pinned_by is not None:
            self._pinned_by.unregister(pointer)
        memory.close()

    def free_bytes(self, device: int) -> int:
        """See `Driver.free_bytes`."""
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE

    def register(self, address: int, n_bytes: int) -> None:
        """Nothing: the CPU copies from any memory."""

    def unregister(self, address: int) -> None:
        """Nothing."""

    def mapped(self, address: int) -> int:
        """See `Driver.mapped`."""
        return address

    def create_stream(self, device: int) -> Stream:
        """See `Driver.create_stream`."""
        return object()

    def destroy_stream(self, device: int, stream: Stream) -> None:
        """See `Driver.destroy_stream`."""

    def create_event(self, device: int) -> Event:
        """See `Driver.create_event`."""
        return object()

    def destroy_event(self, device: int, event: Event) -> None:
        """See `Driver.destroy_event`."""

    def copy_to_device(self, pointer: int, address: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_to_device`. Releases the GIL."""
        ctypes.memmove(pointer, address, n_bytes)

    def copy_from_device(self, address: int, pointer: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_from_device`."""
        ctypes.memmove(address, pointer, n_bytes)

    def copy_on_device(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_on_device`."""
        ctypes.memmove(target, source, n_bytes)

    def clear(self, pointer: int, value: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.clear`."""
        ctypes.memset(pointer, value, n_bytes)

    def record(self, event: Event, stream: Stream) -> None:
        """See `Driver.record`."""

    def reached(self, event: Event) -> bool:
        """See `Driver.reached`."""
        return True

    def wait(self, event: Event) -> None:
        """See `Driver.wait`."""

    def synchronize(self, stream: Stream) -> None:
        """See `Driver.synchronize`."""

    def load_hasher(self, device: int, *, wait: bool) -> Hasher | None:
        """None: the CPU verifies before it copies."""
        return None


def address_of(view: memoryview) -> int:
    """Where writable memory is. The view must not be empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
