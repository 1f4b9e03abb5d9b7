"""What the bare machine can do, to set beside a result: memory, hash, disk, loopback.

The suite says through the environment how much the probes may write and copy (BENCH_PROBE_MIB),
and where the first script that probes leaves what it found for those after it (BENCH_LIMITS).
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import tempfile
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.report import Row, Samples, Value, Work, repeat

_MOST_MIB = int(os.environ.get("BENCH_PROBE_MIB") or 1024)


@dataclass(frozen=True, slots=True)
class ProbeConfig:
    """How much the probes move. Less memory than the CPU caches hold measures those instead."""

    n_repeats: int = 5
    memory_bytes: int = min(256, _MOST_MIB) * 1024 * 1024  # copied and hashed
    piece_bytes: int = 256 * 1024  # hashed at a time
    file_bytes: int = _MOST_MIB * 1024 * 1024
    block_bytes: int = 4 * 1024 * 1024  # of one read or write; O_DIRECT wants multiples of 4096


def probe_limits(folder: Path, config: ProbeConfig) -> list[Row]:
    """Rates in GB/s: memory copy and hash on one core, a file made in `folder`, one TCP connection.

    The file is removed again; a write ends with fsync. Where the file system has no O_DIRECT, the
    value is "unsupported".
    """
    return [
        *memory_limits(config),
        *(Row(case, {"gb_s": rate}) for case, rate in _file_rates(folder, config).items()),
        Row("loopback", {"gb_s": _loopback(config)}),
    ]


def shared_limits(folder: Path, config: ProbeConfig) -> list[Row]:
    """As `probe_limits`, or what an earlier script of the suite's quick mode has found."""
    kept = os.environ.get("BENCH_LIMITS")
    if kept is None:
        return probe_limits(folder, config)
    path = Path(kept)
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        return [Row(case, {"gb_s": _parsed(rate)}) for case, rate in found]
    rows = probe_limits(folder, config)
    rates = [(row.case, row.values["gb_s"]) for row in rows]
    plain = [(case, rate.values if isinstance(rate, Samples) else rate) for case, rate in rates]
    path.write_text(json.dumps(plain), encoding="utf-8")
    return rows


def _parsed(rate: list[float] | str) -> Value:
    return rate if isinstance(rate, str) else Samples(tuple(rate))


def memory_limits(config: ProbeConfig) -> list[Row]:
    """The first two of them, memory copy and hash."""
    n_bytes, step, n_repeats = config.memory_bytes, config.piece_bytes, config.n_repeats
    source = memoryview(np.random.default_rng(0).bytes(n_bytes))
    target = np.ones(n_bytes, np.uint8)  # each page touched before the clock runs
    copy = partial(np.copyto, target, np.frombuffer(source, np.uint8))

    def digest() -> None:
        for start in range(0, n_bytes, step):
            blake3(source[start : start + step]).digest()

    return [
        Row("memory copy", {"gb_s": repeat(copy, n_repeats).wall_s.gb_s(n_bytes)}),
        Row("BLAKE3", {"gb_s": repeat(digest, n_repeats).wall_s.gb_s(n_bytes)}),
    ]


def _loopback(config: ProbeConfig) -> Samples:
    """Between two threads over 127.0.0.1; system calls are most of it and hold no lock."""
    piece = bytes(config.piece_bytes)
    n_pieces = config.memory_bytes // config.piece_bytes

    def send(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            for _ in range(n_pieces):
                connection.sendall(piece)

    def work() -> None:
        buffer = bytearray(config.piece_bytes)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            thread = threading.Thread(target=send, args=(port,), name="loopback", daemon=True)
            thread.start()
            connection, _ = listener.accept()
            with connection:
                while connection.recv_into(buffer):
                    pass
            thread.join()

    return repeat(work, config.n_repeats).wall_s.gb_s(n_pieces * config.piece_bytes)


def _file_rates(folder: Path, config: ProbeConfig) -> dict[str, Value]:
    size_bytes = config.file_bytes // config.block_bytes * config.block_bytes
    with (
        tempfile.NamedTemporaryFile(prefix="probe-", dir=folder) as file,
        mmap.mmap(-1, config.block_bytes) as block,  # aligned to a page, as O_DIRECT wants
    ):
        block.write(os.urandom(config.block_bytes))  # which no file system can compress
        empty = partial(file.truncate, 0)
        evict = partial(os.posix_fadvise, file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def rate(flags: int, before: Work) -> Value:
            work = partial(_stream, file.name, flags, block, size_bytes)
            try:
                return repeat(work, config.n_repeats, before=before).wall_s.gb_s(size_bytes)
            except OSError as error:
                if error.errno == errno.EINVAL and flags & os.O_DIRECT:
                    return "unsupported"
                raise

        return {
            "write": rate(os.O_WRONLY, empty),
            "read, cold": rate(os.O_RDONLY, evict),
            "read, cached": rate(os.O_RDONLY, file.tell),
            "read, O_DIRECT": rate(os.O_RDONLY | os.O_DIRECT, evict),
            "write, O_DIRECT": rate(os.O_WRONLY | os.O_DIRECT, empty),
        }


def _stream(path: str, flags: int, block: mmap.mmap, size_bytes: int) -> None:
    transfer = os.writev if flags & os.O_WRONLY else os.readv
    descriptor = os.open(path, flags)
    try:
        for offset in range(0, size_bytes, len(block)):
            if transfer(descriptor, [block]) != len(block):
                raise OSError(errno.EIO, f"short transfer at offset {offset}", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
