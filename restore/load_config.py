"""How much loading may use, and how it verifies. The only home of the defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.chunking import MAX_CHUNK_BYTES
from imgfmt.errors import InvalidInput
from restore.files import PAGE_BYTES, Route

MIB = 1 << 20
_MIN_SLOT_BYTES = 2 * MAX_CHUNK_BYTES
_SLOT_STEP_BYTES = 64 * 1024


class Verify(StrEnum):
    """Where bytes are compared with their digests.

    AUTO: on the device once it can, if that is seen to be faster there; before that on the CPU.
    """

    AUTO = "auto"
    CPU = "cpu"
    DEVICE = "device"
    OFF = "off"


class Workers(StrEnum):
    """What fills slots and verifies them on the CPU.

    AUTO: processes where the CPU has much to verify, the C library where it has nothing to, else
    threads.
    """

    AUTO = "auto"
    THREADS = "threads"
    PROCESSES = "processes"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """`pinned_bytes` bounds all host buffers together, in slots of `slot_bytes`, one a read.

    `n_threads` read and verify. Two slots for each do best: one is filled while the other is
    copied, and all stay in the CPU's cache, where reading is nearly twice as fast. `route` is how
    files are read. With `gpudirect` files that prove to be fit for it are read by the device.
    """

    slot_bytes: int = 4 * MIB
    pinned_bytes: int = 128 * MIB + PAGE_BYTES
    n_threads: int = min(16, os.cpu_count() or 1)
    verify: Verify = Verify.AUTO
    route: Route = Route.AUTO
    workers: Workers = Workers.AUTO
    gpudirect: bool = False

    def __post_init__(self) -> None:
        if self.slot_bytes < _MIN_SLOT_BYTES or self.slot_bytes % _SLOT_STEP_BYTES:
            raise InvalidInput(
                f"slot_bytes {self.slot_bytes} is not a multiple of {_SLOT_STEP_BYTES} from"
                f" {_MIN_SLOT_BYTES} up"
            )
        if self.pinned_bytes < self.least_bytes:
            raise InvalidInput(
                f"{self.pinned_bytes} bytes of pinned memory are too little: give"
                f" {self.least_bytes} or more"
            )
        if self.n_threads < 1:
            raise InvalidInput("n_threads is at least 1")

    @property
    def least_bytes(self) -> int:
        """Pinned memory without which nothing can be loaded."""
        return 3 * self.slot_bytes + PAGE_BYTES
