"""Device names: `cpu`, `cuda`, `cuda:1`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from imgfmt.errors import InvalidInput
from restore.cuda_driver import cuda_driver
from restore.host_driver import HostDriver
from restore.load import Devices
from restore.pinned import PinnedPool

_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?")


def named_devices(
    names: Sequence[str], *, pinned: bool = False, pool: PinnedPool | None = None
) -> Devices:
    """Devices of one kind. With `pinned`, memory of `cpu` is page-locked by the GPU's driver.

    Raises InvalidInput, NotFound, Unsupported (no GPU can be used here).
    """
    if list(names) == ["cpu"]:
        return Devices(HostDriver(cuda_driver() if pinned else None), (0,), pool)
    numbers: list[int] = []
    for name in names:
        found = _CUDA.fullmatch(name)
        if found is None:
            raise InvalidInput(f"{name!r} is not cpu, cuda or cuda:N, or not together with others")
        numbers.append(int(found[1] or 0))
    if pinned:
        raise InvalidInput("pinned is for device cpu; memory of a GPU is never paged")
    driver = cuda_driver()
    for number in numbers:
        driver.describe(number)
    return Devices(driver, tuple(numbers), pool)


def pinned_pool(size_bytes: int, device: str = "cuda:0", *, shared: bool = False) -> PinnedPool:
    """Page-locked memory for many loads, made once; to be closed. Raises OutOfResources.

    Only with `shared` memory, loads that verify on the CPU can use processes, which is faster.
    """
    devices = named_devices([device])
    return PinnedPool(devices.driver, size_bytes, device=devices.numbers[0], shared=shared)
