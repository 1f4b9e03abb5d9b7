"""A tensor in device or host memory, which PyTorch, CuPy, JAX and NumPy take by DLPack.

    weight = torch.from_dlpack(tensors["lm_head.weight"])

Memory is shared, not copied, and freed once nobody refers to the block that it is part of.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from typing import Any

from imgfmt.errors import ImageError
from restore import dlpack
from restore.driver import Driver, owned_stream
from restore.dtypes import U8, DType
from restore.host_driver import HostDriver, address_of

_STEP_BYTES = 16 << 20

_log = logging.getLogger(__name__)


class Memory:
    """A block of device memory, freed with its last reference."""

    def __init__(self, driver: Driver, device: int, n_bytes: int) -> None:
        self.driver = driver
        self.device = device
        self.n_bytes = n_bytes
        self.pointer = driver.allocate(device, n_bytes) if n_bytes else 0
        self._free = weakref.finalize(self, _free, driver, device, self.pointer)
        self._free.atexit = False  # the process gives all back, and its driver may be gone

    def free(self) -> None:
        """Free it now. Nobody may use it, or copy to it, any more."""
        self._free()


def _free(driver: Driver, device: int, pointer: int) -> None:
    """A device that is gone took its memory with it, and nobody is there to be told."""
    if pointer:
        try:
            driver.free(device, pointer)
        except ImageError as error:
            _log.warning("memory of a device is not given back: %s", str(error))


class Tensor:
    """`n_bytes` at `pointer`, rows one after the other. `dtype` is named as in safetensors."""

    __slots__ = ("_dtype", "_memory", "name", "pointer", "shape")

    def __init__(
        self, name: str, memory: Memory, offset: int, dtype: DType, shape: tuple[int, ...]
    ) -> None:
        self.name = name
        self.shape = shape
        self.pointer = memory.pointer + offset
        self._memory = memory
        self._dtype = dtype

    @property
    def dtype(self) -> str:
        """The element type: "BF16", "F32", "I64", ..."""
        return self._dtype.name

    @property
    def n_bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape) * self._dtype.bits // 8

    @property
    def device(self) -> str:
        """Where it is: "cuda:0" or "cpu"."""
        kind = self._memory.driver.kind
        return kind if kind == "cpu" else f"{kind}:{self._memory.device}"

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)} on {self.device}>"

    def octets(self) -> Tensor:
        """The same memory as a tensor of bytes, for libraries that lack the element type."""
        memory = self._memory
        return Tensor(self.name, memory, self.pointer - memory.pointer, U8, (self.n_bytes,))

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's type and number of the device."""
        driver = self._memory.driver
        if not isinstance(driver, HostDriver):
            return dlpack.CUDA, self._memory.device
        return (dlpack.CUDA_HOST if driver.pinned else dlpack.CPU), 0

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule. The memory is complete whatever the `stream`.

        Raises BufferError for a copy or another device.
        """
        device = self.__dlpack_device__()
        if copy or dl_device not in (None, device):
            raise BufferError("a tensor is shared where it is: copy it with your own library")
        versioned = max_version is not None and max_version[0] >= dlpack.VERSION[0]
        return dlpack.capsule(
            self._memory, self.pointer, device, self._dtype, self.shape, versioned=versioned
        )

    def to_bytes(self) -> bytes:
        """A copy of the content in host memory; for checks, and slow."""
        memory = self._memory
        return read_back(memory.driver, memory.device, self.pointer, self.n_bytes)


def read_back(driver: Driver, device: int, pointer: int, n_bytes: int) -> bytes:
    """Device memory, through a small page-locked buffer. Leaves the device current."""
    found = bytearray(n_bytes)
    if not found:
        return b""
    driver.activate(device)
    bounce = memoryview(mmap.mmap(-1, min(n_bytes, _STEP_BYTES)))
    address = address_of(bounce)
    driver.register(address, len(bounce))
    try:
        with owned_stream(driver, device) as stream:
            for start in range(0, n_bytes, len(bounce)):
                length = min(len(bounce), n_bytes - start)
                driver.copy_from_device(address, pointer + start, length, stream)
                driver.synchronize(stream)
                found[start : start + length] = bounce[:length]
    finally:
        driver.unregister(address)
    return bytes(found)
