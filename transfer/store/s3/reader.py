"""Reads ranges and whole objects. What broke off goes on at its last byte, with the same ETag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from imgfmt.errors import OutOfResources
from transfer.buffers import page_aligned
from transfer.store.base import UNCHECKED_BYTES, SizeCheck
from transfer.store.s3.errors import RequestFailed
from transfer.store.s3.ranges import Found, Wanted
from transfer.store.s3.session import Session, Wire
from transfer.tasks import first_cause

FIRST_BYTES = UNCHECKED_BYTES
"""What is asked for first of an object whose size is not known."""

_N_WORKERS = 8


class _Resumable:
    """One range over as many attempts as it takes. `allocate` is called once at most."""

    def __init__(
        self, wanted: Wanted, allocate: Callable[[Found], memoryview], *, fresh: bool
    ) -> None:
        self._wanted = wanted
        self._allocate = allocate
        self._fresh = fresh
        self._done_bytes = 0
        self.found: Found | None = None
        self.memory = memoryview(b"")

    async def attempt(self, wire: Wire) -> Found:
        """Go on from where the last attempt ended."""
        wanted = replace(self._wanted, start=self._wanted.start + self._done_bytes)
        if self.found is not None and wanted.start == wanted.end:
            return self.found
        try:
            await wire.ranges.read(wanted, self._place, fresh=self._fresh)
        except RequestFailed as failed:
            self._done_bytes += failed.received_bytes
            raise
        assert self.found is not None
        return self.found

    def _place(self, found: Found) -> memoryview:
        if self.found is None:
            self.memory = self._allocate(found)
            self.found = found
            self._wanted = replace(
                self._wanted,
                end=found.end,
                etag=found.etag or None,
                total_bytes=found.total_bytes,
                or_less=False,
            )
        return self.memory[self._done_bytes :]


async def read_range(
    session: Session, wanted: Wanted, buffer: memoryview, *, fresh: bool = False
) -> Found:
    """Fill `buffer` with exactly what is wanted. When this returns or raises, nothing writes there.

    Raises CorruptData if the object is cut short or was overwritten.
    """
    range_ = _Resumable(wanted, lambda found: buffer, fresh=fresh)
    return await session.run(wanted.what, range_.attempt, n_bytes=len(buffer))


async def read_whole(
    session: Session, key: str, what: str, check: SizeCheck | None = None
) -> tuple[memoryview, Found | None]:
    """All bytes of an object as it was at one moment; None if it has no byte at all.

    For `check` see `Store.get`.
    """
    wanted = Wanted(key, what, 0, FIRST_BYTES, or_less=True)
    first = _Resumable(wanted, lambda found: _memory(found.length_bytes, what), fresh=False)

    async def attempt(wire: Wire) -> Found | None:
        try:
            return await first.attempt(wire)
        except RequestFailed as failed:
            if failed.status == 416:  # it has no byte at all
                return None
            raise

    found = await session.run(what, attempt)
    if found is None:
        return memoryview(b""), None
    if found.end == found.total_bytes:
        return first.memory.toreadonly(), found
    if check is not None:
        check(found.total_bytes, first.memory.toreadonly())
    whole = _memory(found.total_bytes, what)
    whole[: found.end] = first.memory
    await _read_rest(session, wanted, found, whole)
    return whole.toreadonly(), found


async def _read_rest(session: Session, wanted: Wanted, found: Found, whole: memoryview) -> None:
    """Fill `whole` from where the first answer ended, a few ranges at a time."""
    step = session.config.range_bytes
    starts = iter(range(found.end, found.total_bytes, step))

    async def worker() -> None:
        for start in starts:
            end = min(start + step, found.total_bytes)
            part = Wanted(
                wanted.key, wanted.what, start, end, found.etag or None, found.total_bytes
            )
            await read_range(session, part, whole[start:end])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_N_WORKERS):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        raise first_cause(failed) from None


def _memory(length_bytes: int, what: str) -> memoryview:
    if length_bytes < FIRST_BYTES:
        return memoryview(bytearray(length_bytes))
    try:
        return page_aligned(length_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfResources(
            f"{what} has {length_bytes} bytes, too many for this machine"
        ) from error
