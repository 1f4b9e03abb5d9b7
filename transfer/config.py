"""How much a transfer may use. The only home of the defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass

from imgfmt.errors import InvalidInput

MIB = 1024 * 1024

_MIN_SLOTS = 3
_MIN_BLOCK_BYTES = 2 * MIB
_BLOCK_STEP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Limits of one transfer.

    `block_bytes` is what one read takes and one buffer holds; `max_memory_bytes` bounds all buffers
    together; `n_threads` do reading, hashing and writing. What is written goes past the page cache,
    which costs less than half the CPU, unless it is `buffered` for who reads it at once, or need
    not be on disk in the end (`fsync`).
    """

    block_bytes: int = 8 * MIB
    max_memory_bytes: int = 128 * MIB
    n_threads: int = min(4, os.cpu_count() or 1)  # more contend for caches and the interpreter
    index_every_packs: int = 8
    lease_ttl_s: int = 3600
    fsync: bool = True
    buffered: bool = False

    def __post_init__(self) -> None:
        if self.block_bytes < 2 * MIB or self.block_bytes % (64 * 1024):
            raise InvalidInput(
                f"block_bytes {self.block_bytes} is not a multiple of 64 KiB from 2 MiB up"
            )
        if self.n_slots < 3:
            needed = 3 * self.block_bytes
            raise InvalidInput(
                f"max_memory_bytes {self.max_memory_bytes} is too little; it needs {needed} or more"
            )
        if self.n_threads < 1:
            raise InvalidInput("n_threads is at least 1")

    @property
    def direct(self) -> bool:
        """Whether large writes go past the page cache."""
        return self.fsync and not self.buffered

    @property
    def n_slots(self) -> int:
        """Buffers of `block_bytes` that fit into the memory allowed."""
        return self.max_memory_bytes // self.block_bytes


def transfer_config(
    max_memory_bytes: int | None, *, fsync: bool = True, buffered: bool = False
) -> TransferConfig:
    """The configuration with this limit to all buffers together, or the default one.

    Raises InvalidInput for less than 6 MiB, with which nothing can be moved.
    """
    if max_memory_bytes is None:
        return TransferConfig(fsync=fsync, buffered=buffered)
    least = _MIN_SLOTS * _MIN_BLOCK_BYTES
    if max_memory_bytes < least:
        raise InvalidInput(
            f"{max_memory_bytes} bytes for all buffers (--max-memory) are too little; give"
            f" {least >> 20}MiB or more"
        )
    share = max_memory_bytes // _MIN_SLOTS
    block_bytes = min(TransferConfig().block_bytes, share - share % _BLOCK_STEP_BYTES)
    return TransferConfig(
        block_bytes=block_bytes,
        max_memory_bytes=max_memory_bytes,
        fsync=fsync,
        buffered=buffered,
    )
