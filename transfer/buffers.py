"""A fixed number of page-aligned buffers. Memory leaves the pool only as a `Lease`.

The pool is the engine's only backpressure: a slot is taken before anything is read into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections.abc import Callable
from types import TracebackType

from imgfmt.errors import Internal

HUGE_PAGE_BYTES = 2 * 1024 * 1024

Allocator = Callable[[int], memoryview]
"""Gives writable, page-aligned memory of the asked length in bytes, zero-filled or not."""


def page_aligned(length_bytes: int) -> memoryview:
    """Anonymous, page-aligned memory from the kernel; it goes back when the view is dropped.

    Huge pages are asked for where they fit: the kernel then maps, and pins for O_DIRECT, less.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping costs a file of its own
    memory = mmap.mmap(-1, length_bytes, flags=flags)
    if length_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


class Lease:
    """The right to use one slot. Counted: the slot goes back when every holder has released it."""

    def __init__(self, pool: BufferPool, view: memoryview) -> None:
        self._pool = pool
        self._view = view
        self._holders = 1

    @property
    def view(self) -> memoryview:
        """The slot's memory. Raises after the last release."""
        if not self._holders:
            raise Internal("a buffer was used after its release")
        return self._view

    def retain(self) -> Lease:
        """Count one more holder."""
        if not self._holders:
            raise Internal("a buffer was retained after its release")
        self._holders += 1
        return self

    def release(self) -> None:
        """Count one holder less; the last one gives the slot back."""
        if not self._holders:
            raise Internal("a buffer was released twice")
        self._holders -= 1
        if not self._holders:
            self._pool.give_back(self._view)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class BufferPool:
    """`n_slots` buffers of `slot_bytes`, made when first needed. For one event loop."""

    def __init__(
        self,
        n_slots: int,
        slot_bytes: int,
        allocate: Allocator = page_aligned,
        *,
        poison: bool = False,
    ) -> None:
        self.slot_bytes = slot_bytes
        self.n_slots = n_slots
        self._allocate = allocate
        self._poison = poison
        self._free: asyncio.LifoQueue[memoryview | None] = asyncio.LifoQueue()
        for _ in range(n_slots):
            self._free.put_nowait(None)

    @property
    def n_free(self) -> int:
        """Slots that nobody holds."""
        return self._free.qsize()

    async def acquire(self) -> Lease:
        """Wait for a slot. Its content is arbitrary. A cancelled wait takes none."""
        view = await self._free.get()
        if view is None:
            try:
                view = self._allocate(self.slot_bytes)
            except BaseException:
                self._free.put_nowait(None)
                raise
        return Lease(self, view)

    def give_back(self, view: memoryview) -> None:
        """For `Lease` alone."""
        if self._poison:
            view[:] = b"\xdb" * len(view)
        self._free.put_nowait(view)
