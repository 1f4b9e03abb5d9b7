"""What loading asks of a device: memory, page-locking, streams, events, copies, hashing.

`cuda_driver` does it on NVIDIA GPUs, `host_driver` in plain memory, and `testing.fake_driver` for
tests. Addresses and device pointers are integers. Devices are numbered as the driver numbers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from imgfmt.errors import ErrorKind, ImageError

Stream = object
"""A queue of work of one device. Opaque; of the driver that made it."""

Event = object
"""A moment in a stream. Opaque; of the driver that made it."""

NO_MISMATCH = 0xFFFFFFFF
"""What a status word holds while every piece had its digest."""

STATUS_BYTES = 4

CHECK_ROW = np.dtype([("offset", "<u4"), ("n_bytes", "<u4"), ("digest", "u1", 32)])
"""One piece of a staged slot that a device is to hash: where it is, and what its digest must be."""


class DeviceFailed(ImageError):
    """A device or its driver failed: the device is gone, or its context is of no more use."""

    kind = ErrorKind.UNAVAILABLE


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device. `pci_address` as in sysfs ("0000:1b:00.0"), empty where there is none."""

    name: str
    pci_address: str
    total_bytes: int


class Hasher(Protocol):
    """Compares BLAKE3 digests on a device, in the order of a stream. See `Driver.load_hasher`."""

    @property
    def bytes_per_s(self) -> float:
        """How fast it was seen to be."""

    def check(
        self, stream: Stream, staged: int, rows: int, n_rows: int, first: int, status: int
    ) -> None:
        """Hash pieces of the bytes at `staged`, as the `CHECK_ROW`s at `rows` describe them.

        For a piece that differs, the word at `status` becomes at most `first` plus its row's index.
        All are device pointers. The word may be mapped host memory (`Driver.mapped`), to be read
        once an event behind this was reached.
        """


class Driver(Protocol):
    """Errors are OutOfResources where memory ran out, else DeviceFailed.

    `activate` is for threads of our own; all that takes a stream is called on a thread that
    activated the stream's device. Everything else may be called on any thread and leaves the
    thread's current device as it was.
    """

    @property
    def kind(self) -> str:
        """What devices are called: "cuda" for `cuda:0`, or "cpu"."""

    @property
    def immediate(self) -> bool:
        """Whether a copy is made by the thread that asks for it, before the call returns."""

    def device_count(self) -> int:
        """How many devices there are."""

    def describe(self, device: int) -> DeviceFacts:
        """Facts of one device."""

    def activate(self, device: int) -> None:
        """Make a device current on this thread."""

    def allocate(self, device: int, n_bytes: int) -> int:
        """Device memory, not initialised, at a multiple of 256."""

    def free(self, device: int, pointer: int) -> None:
        """Give back what `allocate` gave; waits for work that uses it."""

    def free_bytes(self, device: int) -> int:
        """Device memory that may still be allocated."""

    def register(self, address: int, n_bytes: int) -> None:
        """Page-lock host memory, for all devices."""

    def unregister(self, address: int) -> None:
        """Undo `register`."""

    def mapped(self, address: int) -> int:
        """Device pointer of registered memory, for kernels of any device."""

    def create_stream(self, device: int) -> Stream:
        """A stream that does not wait for others."""

    def destroy_stream(self, device: int, stream: Stream) -> None:
        """Let go of a stream."""

    def create_event(self, device: int) -> Event:
        """An event that was not recorded; it counts as reached."""

    def destroy_event(self, device: int, event: Event) -> None:
        """Let go of an event."""

    def copy_to_device(self, pointer: int, address: int, n_bytes: int, stream: Stream) -> None:
        """Begin to copy host memory, which must stay as it is until the stream is that far."""

    def copy_from_device(self, address: int, pointer: int, n_bytes: int, stream: Stream) -> None:
        """Begin to copy device memory to host memory."""

    def copy_on_device(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """Begin to copy within a device."""

    def clear(self, pointer: int, value: int, n_bytes: int, stream: Stream) -> None:
        """Begin to set device memory to the byte `value`."""

    def record(self, event: Event, stream: Stream) -> None:
        """Put an event behind all work that the stream has now."""

    def reached(self, event: Event) -> bool:
        """Whether the stream has done all that was before the event."""

    def wait(self, event: Event) -> None:
        """Sleep until the event is reached; other threads run on. Raises errors of that work."""

    def synchronize(self, stream: Stream) -> None:
        """Sleep until the stream has done all its work. Raises errors of that work."""

    def load_hasher(self, device: int, *, wait: bool) -> Hasher | None:
        """Make a device able to hash, which may take a second; None where it can't.

        Without `wait` that begins in the background, and the answer is None until it is done.
        """


@contextmanager
def owned_stream(driver: Driver, device: int) -> Iterator[Stream]:
    """A stream for a while. Its work must be done at the end."""
    stream = driver.create_stream(device)
    try:
        yield stream
    finally:
        driver.destroy_stream(device, stream)


@contextmanager
def owned_memory(driver: Driver, device: int, n_bytes: int) -> Iterator[int]:
    """Device memory for a while."""
    pointer = driver.allocate(device, n_bytes)
    try:
        yield pointer
    finally:
        driver.free(device, pointer)
