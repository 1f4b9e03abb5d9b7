"""Which chunks the processes of this machine are fetching: stated in files that are locked.

A flight ends with its lock, however its process ends. Reading and stating happen under the
cache's plan lock, which the caller holds. All of it blocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from imgfmt.errors import ImageError
from imgfmt.wire import decode_record, encode_record
from transfer.cache.disks import MAIN
from transfer.cache.durable import TEMPORARY, read_file, remove_file, write_all
from transfer.cache.layout import DomainPaths
from transfer.cache.locks import Lock, is_held, lock_open
from transfer.cache.owners import ABSENT, keys_of
from transfer.cache.records import Flight
from transfer.plan import U1, Numbers
from transfer.session import boot_id, start_ticks

_PROGRESS = struct.Struct("<QQ")
_PROGRESS_SUFFIX = ".progress"
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class OwnFlight:
    """The flight of a plan of this process."""

    def __init__(self, paths: DomainPaths) -> None:
        self.id = secrets.token_hex(16)
        self._folder = paths.flights
        self._path = os.path.join(paths.flights, self.id)
        self._lock: Lock | None = None
        self._progress = -1
        self._guard = threading.Lock()
        self.done_bytes = 0

    def state(self, flight: Flight) -> None:
        """Say what is fetched, in place of what was said before."""
        temporary = os.path.join(self._folder, TEMPORARY + secrets.token_hex(8))
        descriptor = os.open(temporary, _NEW_FILE, 0o600)
        held = lock_open(temporary, descriptor)
        try:
            for piece in flight.encode():
                write_all(descriptor, memoryview(piece).cast("B"))
            os.rename(temporary, self._path)
        except BaseException:
            held.close()
            remove_file(temporary)
            raise
        if self._lock is not None:
            self._lock.close()
        self._lock = held

    def advance(self, n_bytes: int, total_bytes: int) -> None:
        """Tell the others how far it is. From any thread."""
        with self._guard:
            if self._progress < 0:
                self._progress = os.open(self._path + _PROGRESS_SUFFIX, _NEW_FILE, 0o600)
            self.done_bytes += n_bytes
            os.pwrite(self._progress, _PROGRESS.pack(self.done_bytes, total_bytes), 0)

    def close(self) -> None:
        """End the flight."""
        if self._lock is not None:
            remove_file(self._path)
            self._lock.close()
            self._lock = None
        if self._progress >= 0:
            os.close(self._progress)
            self._progress = -1
            remove_file(self._path + _PROGRESS_SUFFIX)


@dataclass(frozen=True, slots=True, eq=False)
class OtherFlight:
    """A flight of another plan, as it was stated."""

    path: str
    flight: Flight
    order: Numbers = field(init=False)

    def __post_init__(self) -> None:
        order = np.argsort(keys_of(self.flight.digest), kind="stable")
        object.__setattr__(self, "order", order)

    @property
    def alive(self) -> bool:
        """Whether its owner is still at it. May turn to False at any time."""
        return is_held(self.path)

    def remaining(self) -> dict[bytes, int]:
        """What it has reserved on each disk and not yet written; at least that much."""
        done, _ = read_progress(self.path)
        left = max(0, self.flight.reserved_bytes - done)
        if not self.flight.by_disk:
            return {MAIN: left}
        return {disk: min(n_bytes, left) for disk, n_bytes in self.flight.by_disk.items()}

    def find(self, digests: U1) -> Numbers:
        """For each digest the item of the flight that has it, or ABSENT."""
        owned, keys = keys_of(self.flight.digest)[self.order], keys_of(digests)
        if not len(owned):
            return np.full(len(keys), ABSENT, np.int64)
        place = np.minimum(np.searchsorted(owned, keys), len(owned) - 1)
        item = self.order[place]
        same = (self.flight.digest[item] == digests).all(axis=1)
        return np.where(same, item, ABSENT)


def reserved(root: str, own: OwnFlight | None) -> dict[bytes, int]:
    """Bytes on each disk that flights of others, of all domains, have reserved and not written."""
    domains = os.path.join(root, "domains")
    found: Counter[bytes] = Counter()
    for name in os.listdir(domains):
        for other in live_flights(DomainPaths(root, name), own):
            found.update(other.remaining())
    return found


def live_flights(paths: DomainPaths, own: OwnFlight | None) -> list[OtherFlight]:
    """Flights of others in one domain. What the dead left is removed."""
    try:
        names = sorted(os.listdir(paths.flights))
    except FileNotFoundError:  # a domain that is just being made
        return []
    found = []
    for name in names:
        path = os.path.join(paths.flights, name)
        if name.startswith(TEMPORARY) or name.endswith(_PROGRESS_SUFFIX):
            if not os.path.exists(path.removesuffix(_PROGRESS_SUFFIX)) or not is_held(path):
                _remove_dead(path)
            continue
        if own is not None and name == own.id:
            continue
        if not is_held(path):
            remove_file(path)
            remove_file(path + _PROGRESS_SUFFIX)
            continue
        with contextlib.suppress(ImageError):  # of another version: what it fetches is not known
            found.append(OtherFlight(path, Flight.decode(read_file(path) or b"", "flight")))
    return found


def _remove_dead(path: str) -> None:
    flight = path.removesuffix(_PROGRESS_SUFFIX)
    if flight == path or not os.path.exists(flight):
        remove_file(path)


def read_progress(flight_path: str) -> tuple[int, int]:
    """Bytes that a flight has done, and in all; zeros if it has not begun."""
    raw = read_file(flight_path + _PROGRESS_SUFFIX) or b""
    done, total = _PROGRESS.unpack(raw) if len(raw) == _PROGRESS.size else (0, 0)
    return int(done), int(total)


@dataclass(frozen=True, slots=True)
class Builder:
    """Who builds a tree. Only shown: the process may be in another process namespace."""

    pid: int
    start_ticks: int
    boot: bytes
    flight: str

    @classmethod
    def of_this(cls, flight: OwnFlight) -> Builder:
        """This process."""
        return cls(os.getpid(), start_ticks(os.getpid()), boot_id(), flight.id)

    def encode(self) -> bytes:
        """The canonical bytes."""
        fields = {
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "boot": self.boot,
            "flight": self.flight,
        }
        return encode_record("cache-builder", fields)


def read_builder(lock_path: str) -> Builder | None:
    """Who wrote its name into a tree's lock, if that can be read."""
    try:
        fields = decode_record(read_file(lock_path) or b"", "cache-builder", "builder")
        return Builder(
            fields.integer("pid"),
            fields.integer("start_ticks"),
            fields.raw("boot", 16),
            fields.text("flight"),
        )
    except ImageError:
        return None
