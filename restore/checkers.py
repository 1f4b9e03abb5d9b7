"""Who compares a read's pieces with their digests: the CPU, or a device that can and is faster."""

from __future__ import annotations

import time
from collections.abc import Sequence

from blake3 import blake3

from imgfmt.errors import Unsupported
from restore.driver import Driver, Hasher
from restore.load_config import Verify


class Checkers:
    """Decides for each read. Used by several threads; what they see late is right too."""

    def __init__(self, driver: Driver, verify: Verify, n_threads: int) -> None:
        self._driver = driver
        self._verify = verify
        self._n_threads = n_threads
        self._hashers: dict[int, Hasher] = {}

    @property
    def off(self) -> bool:
        """Whether nothing is compared."""
        return self._verify is Verify.OFF

    @property
    def by_cpu(self) -> bool:
        """Whether the CPU compares all from now on."""
        return self._verify is Verify.CPU

    def settled(self, device: int) -> bool:
        """Whether it is known who compares what goes to this device."""
        self.hasher(device)
        return self._verify is not Verify.AUTO or device in self._hashers

    def require(self, devices: Sequence[int]) -> None:
        """Where devices must check, have them able to. Raises Unsupported if one is not."""
        if self._verify is not Verify.DEVICE:
            return
        for device in devices:
            hasher = self._driver.load_hasher(device, wait=True)
            if hasher is None:
                what = f"{self._driver.kind}:{device}"
                raise Unsupported(f"{what} can't verify what it gets; use verify=cpu")
            self._hashers[device] = hasher

    def hasher(self, device: int) -> Hasher | None:
        """What is to check a read that goes to `device`; None: the CPU, or nothing."""
        if self._verify is not Verify.AUTO:
            return self._hashers.get(device)
        found = self._hashers.get(device)
        if found is None:
            found = self._driver.load_hasher(device, wait=False)
            if found is not None and found.bytes_per_s < cpu_rate() * self._n_threads:
                self._verify, found = Verify.CPU, None
            if found is not None:
                self._hashers[device] = found
        return found


def cpu_rate() -> float:
    """Bytes per second that this thread hashes now."""
    piece = bytes(1 << 20)
    begun_s = time.perf_counter()
    blake3(piece).digest()
    return len(piece) / max(time.perf_counter() - begun_s, 1e-9)
