"""Proves that a device's hasher finds right and wrong digests, and measures how fast it is."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from blake3 import blake3

from restore.driver import (
    CHECK_ROW,
    NO_MISMATCH,
    STATUS_BYTES,
    Driver,
    Hasher,
    Stream,
    owned_memory,
    owned_stream,
)
from restore.host_driver import address_of

TRIAL_BYTES = 8 << 20
_PIECES = (1 << 20, 256 << 10, 64 << 10, 64 << 10, 4096, 4097, 1025, 1024, 1, 0)
_ROWS_AT = TRIAL_BYTES
_STATUS_AT = TRIAL_BYTES + (64 << 10)
_ALL_BYTES = _STATUS_AT + 4096
_ROUNDS = 3


def proven_rate(driver: Driver, device: int, hasher: Hasher) -> float:
    """Bytes per second that the hasher checks; 0 if it does not tell right from wrong."""
    with _staged(driver, device) as (host, address, pointer, stream):

        def check(rows: np.ndarray[tuple[int], np.dtype[np.void]]) -> int:
            raw = rows.tobytes()
            host[_ROWS_AT : _ROWS_AT + len(raw)] = raw
            host[_STATUS_AT : _STATUS_AT + STATUS_BYTES] = NO_MISMATCH.to_bytes(4, "little")
            driver.copy_to_device(pointer, address, _ALL_BYTES, stream)
            places = pointer + _ROWS_AT, len(rows), 0, pointer + _STATUS_AT
            hasher.check(stream, pointer, *places)
            status = address + _STATUS_AT
            driver.copy_from_device(status, pointer + _STATUS_AT, STATUS_BYTES, stream)
            driver.synchronize(stream)
            return int.from_bytes(host[_STATUS_AT : _STATUS_AT + STATUS_BYTES], "little")

        noise = np.random.default_rng().bytes(TRIAL_BYTES)
        host[:TRIAL_BYTES] = noise
        rows = _rows(host)
        if check(rows) != NO_MISMATCH:
            return 0.0
        for wrong in (len(rows) - 1, 3):
            rows["digest"][wrong, wrong] ^= 1
            if check(rows) != wrong:
                return 0.0
        best_s = min(_timed(driver, hasher, pointer, stream) for _ in range(_ROUNDS))
        return TRIAL_BYTES / best_s


@contextmanager
def _staged(driver: Driver, device: int) -> Iterator[tuple[memoryview, int, int, Stream]]:
    host = memoryview(mmap.mmap(-1, _ALL_BYTES))
    address = address_of(host)
    driver.activate(device)
    driver.register(address, len(host))
    try:
        with (
            owned_memory(driver, device, _ALL_BYTES) as pointer,
            owned_stream(driver, device) as stream,
        ):
            try:
                yield host, address, pointer, stream
            finally:
                driver.synchronize(stream)
    finally:
        driver.unregister(address)


def _rows(host: memoryview) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = np.zeros(len(_PIECES), CHECK_ROW)
    at = 0
    for row, n_bytes in zip(rows, _PIECES, strict=True):
        digest = blake3(host[at : at + n_bytes]).digest()
        row["offset"], row["n_bytes"] = at, n_bytes
        row["digest"] = np.frombuffer(digest, np.uint8)
        at += -(-n_bytes // 4096) * 4096
    return rows


def _timed(driver: Driver, hasher: Hasher, pointer: int, stream: Stream) -> float:
    """Seconds for all of the staged bytes in pieces of usual size, whatever the rows say."""
    rows = np.zeros(TRIAL_BYTES >> 18, CHECK_ROW)
    rows["offset"] = np.arange(len(rows)) << 18
    rows["n_bytes"] = 1 << 18
    host = memoryview(mmap.mmap(-1, 4096))
    host[: rows.nbytes] = rows.tobytes()
    address = address_of(host)
    driver.register(address, 4096)
    try:
        driver.copy_to_device(pointer + _ROWS_AT, address, rows.nbytes, stream)
        driver.synchronize(stream)
        begun_s = time.perf_counter()
        status = pointer + _STATUS_AT
        hasher.check(stream, pointer, pointer + _ROWS_AT, len(rows), 0, status)
        driver.synchronize(stream)
        return time.perf_counter() - begun_s
    finally:
        driver.unregister(address)
