"""What a store and this machine can do: checked by doing it, and what limits a transfer.

Nothing that it writes to the store stays there.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np
from blake3 import blake3

from imgfmt import layout
from imgfmt.errors import ImageError, NotFound
from transfer.buffers import page_aligned
from transfer.catalog import open_catalog, probe_creation
from transfer.config import MIB
from transfer.oserrors import printable, translate
from transfer.store.base import Probed, Store
from transfer.threads import Threads

MAX_SKEW_S = 300
"""AWS refuses requests whose clock is 15 minutes off; a third of it is worth a warning."""

N_STREAMS = 16
_RANGE_BYTES = 8 * MIB
_PROBE_RANGES = 8
_LOCAL_BYTES = 256 * MIB
_PIECE_BYTES = 256 * 1024


class Health(StrEnum):
    """How a check went."""

    GOOD = "good"
    DOUBTFUL = "doubtful"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, how it went, and a line of what was found or what to do."""

    check: str
    health: Health
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks. `rates_gb_s`: what was measured; `limited_by`: the lowest of what pulls need."""

    findings: tuple[Finding, ...]
    rates_gb_s: dict[str, float]
    limited_by: str | None

    @property
    def healthy(self) -> bool:
        """Whether nothing is bad."""
        return all(finding.health is not Health.BAD for finding in self.findings)


@runtime_checkable
class KeepsUploads(Protocol):
    """A store whose server keeps uploads that were begun and never ended."""

    async def list_unfinished(self) -> Sequence[object]:
        """All of them."""


async def diagnose(store: Store, directory: str) -> Diagnosis:
    """Check `store` and this machine; `directory` is where pulls write. Raises for neither."""
    doctor = _Doctor(store, directory)
    await doctor.run()
    return Diagnosis(tuple(doctor.findings), doctor.rates, doctor.limit())


class _Doctor:
    def __init__(self, store: Store, directory: str) -> None:
        self._store = store
        self._is_no_store = False
        self._directory = directory
        self._key = f"{layout.TMP}doctor-{secrets.token_hex(8)}"
        self.findings: list[Finding] = []
        self.rates: dict[str, float] = {}

    async def run(self) -> None:
        """All checks; those of the store end at the first that shows it to be out of reach."""
        with Threads("doctor", 1) as threads:
            async with self._check("machine"):
                await threads.run(self._measure_machine)
            async with self._check("local disk"):
                await threads.run(self._measure_disk)
        if not await self._try("store", self._look_at_record) and not (
            self._is_no_store and isinstance(self._store, Probed)
        ):
            return  # a directory that is no store is left as it is; a bucket may become one
        if await self._try("conditional writes", self._try_conditions):
            await self._try("clock", self._compare_clocks)
            await self._try("range reads", self._try_ranges)
            await self._try("throughput", self._measure_reads)
        await self._try("unfinished uploads", self._count_uploads)
        with contextlib.suppress(ImageError):
            await self._store.delete(self._key)

    def limit(self) -> str | None:
        """The slowest of what a pull needs."""
        needed = ("store, many streams", "hash, all cores", "disk write")
        if needed[0] not in self.rates:
            return None
        known = {name: self.rates[name] for name in needed if name in self.rates}
        return min(known, key=known.__getitem__) if known else None

    def _say(self, check: str, detail: str, health: Health = Health.GOOD) -> None:
        self.findings.append(Finding(check, health, detail))

    @contextlib.asynccontextmanager
    async def _check(self, check: str) -> AsyncIterator[None]:
        try:
            yield
        except ImageError as error:
            self._say(check, str(error), Health.BAD)

    async def _try(self, check: str, work: Callable[[str], Awaitable[None]]) -> bool:
        before = len(self.findings)
        async with self._check(check):
            await work(check)
        return all(f.health is not Health.BAD for f in self.findings[before:])

    async def _look_at_record(self, check: str) -> None:
        try:
            record = (await open_catalog(self._store, write=True)).record
        except NotFound as error:
            if await self._store.facts(layout.STORE_KEY) is not None:
                raise
            self._say(check, str(error), Health.BAD)
            self._is_no_store = True
            return
        self._say(check, f"{self._store.url} is readable, profile {record.profile}")

    async def _try_conditions(self, check: str) -> None:
        if isinstance(self._store, Probed):
            await self._store.probe()
        else:
            await probe_creation(self._store)
        self._say(check, "honoured, so several writers at once are safe")

    async def _compare_clocks(self, check: str) -> None:
        before_s = time.time()
        await self._store.put(self._key, [b"clock"])
        facts = await self._store.facts(self._key)
        after_s = time.time()
        if facts is None:
            self._say(check, "an object is absent right after it was written", Health.BAD)
            return
        written_s = facts.written_ns / 1e9
        skew_s = max(before_s - 1 - written_s, written_s - after_s, 0.0)
        health = Health.GOOD if skew_s <= MAX_SKEW_S else Health.BAD
        advice = "" if health is Health.GOOD else "; set this machine's clock (NTP)"
        self._say(check, f"{skew_s:.0f} s apart from the store's{advice}", health)

    async def _try_ranges(self, check: str) -> None:
        content = np.random.default_rng(0).bytes(_PROBE_RANGES * _RANGE_BYTES)
        await self._store.put(self._key, [content])
        part = bytearray(4096)
        await self._store.read_into(self._key, _RANGE_BYTES - 1000, memoryview(part))
        if part != content[_RANGE_BYTES - 1000 : _RANGE_BYTES - 1000 + len(part)]:
            self._say(check, "a range came back with other bytes than were written", Health.BAD)
            return
        self._say(check, "exact")

    async def _measure_reads(self, check: str) -> None:
        buffers = [page_aligned(_RANGE_BYTES) for _ in range(N_STREAMS)]

        async def stream(number: int, n_reads: int) -> None:
            for read in range(n_reads):
                offset = (number + read) % _PROBE_RANGES * _RANGE_BYTES
                await self._store.read_into(self._key, offset, buffers[number])

        for name, n_streams in (("store, one stream", 1), ("store, many streams", N_STREAMS)):
            n_reads = _PROBE_RANGES if n_streams == 1 else 2
            begun_s = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number in range(n_streams):
                    group.create_task(stream(number, n_reads))
            seconds = time.perf_counter() - begun_s
            self.rates[name] = n_streams * n_reads * _RANGE_BYTES / seconds / 1e9
            self._say(check, f"{name}: {self.rates[name]:.2f} GB/s")

    async def _count_uploads(self, check: str) -> None:
        if not isinstance(self._store, KeepsUploads):
            return
        if count := len(await self._store.list_unfinished()):
            advice = "give the bucket a lifecycle rule that aborts old multipart uploads"
            self._say(check, f"{count} are not finished and cost space; {advice}", Health.DOUBTFUL)
        else:
            self._say(check, "none")

    def _measure_machine(self) -> None:
        n_cores = len(os.sched_getaffinity(0))
        source = memoryview(np.random.default_rng(0).bytes(_LOCAL_BYTES))
        target = np.ones(_LOCAL_BYTES, np.uint8)
        copy = _seconds(lambda: np.copyto(target, np.frombuffer(source, np.uint8)))
        hashing = _seconds(lambda: [blake3(piece).digest() for piece in _pieces(source)])
        self.rates["memory copy"] = _LOCAL_BYTES / copy / 1e9
        self.rates["hash, all cores"] = n_cores * _LOCAL_BYTES / hashing / 1e9
        self._say(
            "machine",
            f"{n_cores} cores; hashing {self.rates['hash, all cores']:.1f} GB/s on all of them,"
            f" memory copy {self.rates['memory copy']:.1f} GB/s",
        )

    def _measure_disk(self) -> None:
        shown = printable(self._directory)
        try:
            for name, seconds in _disk_seconds(self._directory).items():
                self.rates[name] = _LOCAL_BYTES / seconds / 1e9
        except OSError as error:
            raise translate(error, shown) from error
        write, read = self.rates["disk write"], self.rates["disk read"]
        self._say("local disk", f"{shown}: write {write:.2f} GB/s, read {read:.2f} GB/s")


def _pieces(view: memoryview) -> list[memoryview]:
    return [view[i : i + _PIECE_BYTES] for i in range(0, len(view), _PIECE_BYTES)]


def _seconds(work: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def _disk_seconds(directory: str) -> dict[str, float]:
    """Seconds to write a file to the disk and to read it back, past the page cache if possible."""
    block = mmap.mmap(-1, _RANGE_BYTES)
    block.write(np.random.default_rng(1).bytes(_RANGE_BYTES))
    n_blocks = _LOCAL_BYTES // _RANGE_BYTES
    with tempfile.NamedTemporaryFile(prefix=".snapcask-doctor-", dir=directory) as file:
        direct = os.O_DIRECT
        try:
            os.close(os.open(file.name, os.O_RDONLY | direct))
        except OSError:
            direct = 0
        descriptor = os.open(file.name, os.O_RDWR | direct)

        def write() -> None:
            for number in range(n_blocks):
                os.pwrite(descriptor, block, number * _RANGE_BYTES)
            os.fsync(descriptor)

        def read() -> None:
            for number in range(n_blocks):
                os.preadv(descriptor, [block], number * _RANGE_BYTES)

        try:
            write_s = _seconds(write)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read_s = _seconds(read)
        finally:
            os.close(descriptor)
    return {"disk write": write_s, "disk read": read_s}
