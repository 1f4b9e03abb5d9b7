"""The `Driver` of NVIDIA GPUs, on `cuda.bindings.driver`. Uses primary contexts, as frameworks do.

Making one without `cuda-python`, or without a GPU's driver, raises Unsupported.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

from imgfmt.errors import ImageError, NotFound, OutOfResources, Unsupported
from restore import cuda_hasher
from restore.driver import DeviceFacts, DeviceFailed, Event, Hasher, Stream

try:
    from cuda.bindings import driver as cuda
except ImportError:
    cuda = None

_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_HOST_FLAGS = 0x01 | 0x02  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_NON_BLOCKING = 0x01  # CU_STREAM_NON_BLOCKING
_EVENT_FLAGS = 0x01 | 0x02  # CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING

_log = logging.getLogger(__name__)


def failure(code: Any, what: str) -> ImageError:
    """The error for a CUresult other than success."""
    number = int(code)
    _, name = cuda.cuGetErrorName(code)
    _, text = cuda.cuGetErrorString(code)
    shown = f"{(name or b'error').decode()} ({number}): {(text or b'').decode()}"
    if number == _NO_MEMORY:
        return OutOfResources(f"{what}: {shown}")
    return DeviceFailed(f"{what}: {shown}")


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """The values of a call's result, which begins with its CUresult."""
    if result[0]:
        raise failure(result[0], what)
    return result[1] if len(result) == 2 else result[1:]


class CudaDriver:
    """See `restore.driver.Driver`. Make it with `cuda_driver`, once for a process."""

    kind = "cuda"
    immediate = False

    def __init__(self) -> None:
        if cuda is None:
            raise Unsupported(
                "loading to a GPU needs cuda-python: install snapcask[gpu], or use device cpu"
            )
        try:
            _checked(cuda.cuInit(0), "the CUDA driver does not start")
            self._count = int(_checked(cuda.cuDeviceGetCount(), "can't count GPUs"))
        except (ImageError, RuntimeError) as error:  # RuntimeError: there is no driver library
            raise Unsupported(f"no GPU can be used here ({error}); use device cpu") from error
        self._contexts: dict[int, Any] = {}
        self._hashers: dict[int, Future[Hasher | None]] = {}
        self._lock = threading.Lock()
        self._current = threading.local()

    def device_count(self) -> int:
        """See `Driver.device_count`."""
        return self._count

    def describe(self, device: int) -> DeviceFacts:
        """See `Driver.describe`."""
        handle = self._handle(device)
        name = _checked(cuda.cuDeviceGetName(256, handle), "can't read the name of a GPU")
        address = _checked(cuda.cuDeviceGetPCIBusId(32, handle), "can't read where a GPU is")
        total = int(_checked(cuda.cuDeviceTotalMem(handle), "can't read the memory of a GPU"))
        return DeviceFacts(_text(name), _text(address).lower(), total)

    def _handle(self, device: int) -> Any:
        if not 0 <= device < self._count:
            raise NotFound(f"there is no GPU cuda:{device}; this machine shows {self._count}")
        return _checked(cuda.cuDeviceGet(device), f"cuda:{device} can't be used")

    def context(self, device: int) -> Any:
        """The primary context of a device, kept for the life of the process."""
        with self._lock:
            if device not in self._contexts:
                handle, what = self._handle(device), f"cuda:{device} can't be used"
                self._contexts[device] = _checked(cuda.cuDevicePrimaryCtxRetain(handle), what)
            return self._contexts[device]

    def activate(self, device: int) -> None:
        """See `Driver.activate`."""
        if getattr(self._current, "device", None) != device:
            _checked(cuda.cuCtxSetCurrent(self.context(device)), f"cuda:{device} can't be used")
            self._current.device = device

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """Have the device current, and then what was current before."""
        _checked(cuda.cuCtxPushCurrent(self.context(device)), f"cuda:{device} can't be used")
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent()

    def allocate(self, device: int, n_bytes: int) -> int:
        """See `Driver.allocate`."""
        with self._on(device):
            what = f"{n_bytes} bytes of memory of cuda:{device} can't be had"
            return int(_checked(cuda.cuMemAlloc(n_bytes), what))

    def free(self, device: int, pointer: int) -> None:
        """See `Driver.free`."""
        with self._on(device):
            _checked(cuda.cuMemFree(pointer), f"memory of cuda:{device} can't be freed")

    def free_bytes(self, device: int) -> int:
        """See `Driver.free_bytes`."""
        with self._on(device):
            return int(_checked(cuda.cuMemGetInfo(), f"cuda:{device} does not answer")[0])

    def register(self, address: int, n_bytes: int) -> None:
        """See `Driver.register`."""
        with self._on(0):
            what = f"{n_bytes} bytes of host memory can't be page-locked (limit: ulimit -l)"
            _checked(cuda.cuMemHostRegister(address, n_bytes, _HOST_FLAGS), what)

    def unregister(self, address: int) -> None:
        """See `Driver.unregister`."""
        with self._on(0):
            _checked(cuda.cuMemHostUnregister(address), "page-locked memory can't be let go")

    def mapped(self, address: int) -> int:
        """See `Driver.mapped`."""
        with self._on(0):
            what = "page-locked memory is not mapped"
            return int(_checked(cuda.cuMemHostGetDevicePointer(address, 0), what))

    def create_stream(self, device: int) -> Stream:
        """See `Driver.create_stream`."""
        with self._on(device):
            found: object = _checked(cuda.cuStreamCreate(_NON_BLOCKING), "no stream can be had")
            return found

    def destroy_stream(self, device: int, stream: Stream) -> None:
        """See `Driver.destroy_stream`."""
        with self._on(device):
            _checked(cuda.cuStreamDestroy(stream), "a stream can't be let go")

    def create_event(self, device: int) -> Event:
        """See `Driver.create_event`."""
        with self._on(device):
            found: object = _checked(cuda.cuEventCreate(_EVENT_FLAGS), "no event can be had")
            return found

    def destroy_event(self, device: int, event: Event) -> None:
        """See `Driver.destroy_event`."""
        with self._on(device):
            _checked(cuda.cuEventDestroy(event), "an event can't be let go")

    def copy_to_device(self, pointer: int, address: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_to_device`."""
        (code,) = cuda.cuMemcpyHtoDAsync(pointer, address, n_bytes, stream)
        if code:
            raise failure(code, f"a copy of {n_bytes} bytes to a GPU failed")

    def copy_from_device(self, address: int, pointer: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_from_device`."""
        (code,) = cuda.cuMemcpyDtoHAsync(address, pointer, n_bytes, stream)
        if code:
            raise failure(code, f"a copy of {n_bytes} bytes from a GPU failed")

    def copy_on_device(self, target: int, source: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.copy_on_device`."""
        (code,) = cuda.cuMemcpyDtoDAsync(target, source, n_bytes, stream)
        if code:
            raise failure(code, f"a copy of {n_bytes} bytes within a GPU failed")

    def clear(self, pointer: int, value: int, n_bytes: int, stream: Stream) -> None:
        """See `Driver.clear`."""
        (code,) = cuda.cuMemsetD8Async(pointer, value, n_bytes, stream)
        if code:
            raise failure(code, f"setting {n_bytes} bytes of a GPU failed")

    def record(self, event: Event, stream: Stream) -> None:
        """See `Driver.record`."""
        (code,) = cuda.cuEventRecord(event, stream)
        if code:
            raise failure(code, "an event can't be recorded")

    def reached(self, event: Event) -> bool:
        """See `Driver.reached`."""
        (code,) = cuda.cuEventQuery(event)
        if code and int(code) != _NOT_READY:
            raise failure(code, "work on a GPU failed")
        return not code

    def wait(self, event: Event) -> None:
        """See `Driver.wait`."""
        (code,) = cuda.cuEventSynchronize(event)
        if code:
            raise failure(code, "work on a GPU failed")

    def synchronize(self, stream: Stream) -> None:
        """See `Driver.synchronize`."""
        (code,) = cuda.cuStreamSynchronize(stream)
        if code:
            raise failure(code, "work on a GPU failed")

    def load_hasher(self, device: int, *, wait: bool) -> Hasher | None:
        """See `Driver.load_hasher`: a kernel that NVRTC compiles for this device, tried out."""
        with self._lock:
            found = self._hashers.get(device)
            if found is None:
                found = self._hashers[device] = Future()
                work = partial(self._load_hasher, device, found)
                threading.Thread(target=work, name="snapcask-compile").start()
        return found.result() if wait or found.done() else None

    def _load_hasher(self, device: int, outcome: Future[Hasher | None]) -> None:
        hasher: Hasher | None = None
        try:
            with self._on(device):
                hasher = cuda_hasher.load(self, device, self._handle(device))
        except (ImageError, RuntimeError) as error:  # RuntimeError: NVRTC is not installed
            _log.warning("cuda:%d can't verify what it gets, the CPU will: %s", device, error)
        finally:
            outcome.set_result(hasher)


def _text(raw: Any) -> str:
    return bytes(raw).split(b"\0")[0].decode(errors="replace")


def cuda_is_installed() -> bool:
    """Whether `cuda-python` is there; a GPU and its driver may be missing all the same."""
    return cuda is not None


@lru_cache(maxsize=1)
def cuda_driver() -> CudaDriver:
    """The driver of this process. Raises Unsupported where no GPU can be used."""
    return CudaDriver()
