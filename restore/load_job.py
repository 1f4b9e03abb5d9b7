"""One load while it runs: which bytes go where, what has arrived, and what it all took."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from imgfmt.errors import Internal
from restore.direct_storage import FileApi
from restore.driver import Driver
from restore.lanes import StageTimes, Target
from restore.layout import Place
from restore.load_config import LoadConfig
from restore.load_plan import Want
from restore.pinned import Arena
from restore.spec import TensorSpec

Arrived = Callable[[int], None]
"""Told the number of each tensor when it is complete. Called from several threads."""

Advance = Callable[[int], None]
"""Told of bytes that arrived. Called from several threads."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did.

    `n_bytes` went to devices, `read_bytes` were read, `direct_bytes` of them past the page cache,
    `gpudirect_bytes` by the device itself; `cpu_checked_bytes` and `device_checked_bytes` were
    compared with digests. `stages` are seconds that `n_threads` threads together spent on each (a
    read by the C library waits its turn in it); `seconds` are by phase and "total". `warnings` are
    about an image that is not for this machine, damage in the cache, and why GPUDirect was not
    used. `from_cache`: an image's bytes came from the cache of this node.
    """

    tensors: int
    n_bytes: int
    read_bytes: int
    direct_bytes: int
    gpudirect_bytes: int
    cpu_checked_bytes: int
    device_checked_bytes: int
    verified: bool
    n_threads: int
    pinned_bytes: int
    stages: StageTimes
    seconds: Mapping[str, float]
    warnings: tuple[str, ...] = ()
    from_cache: bool = False


class LoadJob:
    """Specs, their places in blocks, and the blocks: `len(places)` is that of one device.

    `eager`: tensors are wanted as soon as they are complete.
    `targets` has the blocks of the first device, then those of the second, and so on.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        places: Sequence[Place],
        targets: Sequence[Target],
        n_devices: int,
        *,
        driver: Driver,
        config: LoadConfig,
        arena: Arena,
        arrived: Arrived,
        advance: Advance,
        eager: bool = True,
        file_api: Callable[[], FileApi] | None = None,
    ) -> None:
        self.specs = specs
        self.places = places
        self.targets = targets
        self.driver = driver
        self.config = config
        self.arena = arena
        self._n_devices = n_devices
        self.eager = eager
        self.file_api = file_api
        self._arrived = arrived
        self._advance = advance
        self._lock = threading.Lock()
        self._left: list[int] = [0] * len(specs)
        self._told = [False] * len(specs)
        self.read_bytes = 0
        self.direct_bytes = 0
        self.gpudirect_bytes = 0
        self.cpu_checked_bytes = 0
        self.device_checked_bytes = 0
        self.verified = False
        self.from_cache = False
        self.warnings: list[str] = []
        self.n_threads = 0
        self.stages = StageTimes()

    def wants(self, numbers: Mapping[str, int]) -> list[Want]:
        """What of each file goes where. `numbers` are those of the files by path."""
        n_blocks = len(self.targets) // self._n_devices
        return [
            Want(
                numbers[spec.file], spec.start, spec.end,
                place.block + device * n_blocks, place.offset, tensor,
            )
            for tensor, (spec, place) in enumerate(zip(self.specs, self.places, strict=True))
            for device in range(self._n_devices)
        ]  # fmt: skip

    def expect(self, parts: Iterable[Sequence[int]]) -> None:
        """Each part is the tensors that one piece of work brings some of. Forgets what was."""
        with self._lock:
            self._left = [0] * len(self.specs)
            for tensors in parts:
                for tensor in tensors:
                    self._left[tensor] += 1

    def settle(self, parts: Iterable[Iterable[int]], n_bytes: int) -> None:
        """These parts arrived; each is tensors that one piece of work brought some of."""
        complete: list[int] = []
        with self._lock:
            for tensors in parts:
                for tensor in tensors:
                    self._left[tensor] -= 1
                    if not self._left[tensor] and not self._told[tensor]:
                        self._told[tensor] = True
                        complete.append(tensor)
        for tensor in complete:
            self._arrived(tensor)
        self._advance(n_bytes)

    def finish(self) -> None:
        """All work is done: tell of those tensors too that no work was for."""
        missing = [name for left, name in zip(self._left, self.specs, strict=True) if left > 0]
        if missing:
            raise Internal(f"{len(missing)} tensors did not arrive")
        for tensor, told in enumerate(self._told):
            if not told:
                self._told[tensor] = True
                self._arrived(tensor)

    def warn_of_bounced(self, reasons: Mapping[str, str]) -> None:
        """Say why files were not read by GPUDirect, which was asked for. `reasons` are by path."""
        for why, count in Counter(reasons.values()).items():
            self.warnings.append(f"GPUDirect did not read all of {count} files: {why}")
        if not self.gpudirect_bytes and not reasons:
            self.warnings.append(
                "GPUDirect read nothing: it is for files, one device, and bytes that are verified"
                " there"
            )

    def naming(self, tensors: Iterable[int]) -> str:
        """Some tensors, for messages."""
        names = [self.specs[tensor].name for tensor in dict.fromkeys(tensors)]
        shown = ", ".join(repr(name) for name in names[:3])
        return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
