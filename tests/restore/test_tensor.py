"""Tensors: shared by DLPack without a copy, and their memory is freed when nobody uses it."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys

import numpy as np
import pytest

from restore.dlpack import _kept
from restore.driver import DeviceFailed
from restore.dtypes import DTYPES
from restore.host_driver import HostDriver
from restore.tensor import Memory, Tensor
from restore.testing.fake_driver import FakeDriver


def host_tensor(shape: tuple[int, ...], dtype: str = "F32", n_bytes: int = 4096) -> Tensor:
    memory = Memory(HostDriver(), 0, n_bytes)
    for i in range(n_bytes // 4):
        ctypes.c_float.from_address(memory.pointer + 4 * i).value = float(i)
    return Tensor("t", memory, 256, DTYPES[dtype], shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (0,), (5, 0)])
def test_numpy_takes_a_host_tensor_without_a_copy(shape: tuple[int, ...]) -> None:
    tensor = host_tensor(shape)
    array = np.from_dlpack(tensor)
    assert array.shape == shape
    assert array.dtype == np.float32
    count = int(np.prod(shape))
    assert array.reshape(-1).tolist() == [float(64 + i) for i in range(count)]
    if count:
        assert array.ctypes.data == tensor.pointer
    assert tensor.to_bytes() == array.tobytes()


def test_memory_outlives_the_tensor_while_it_is_shared() -> None:
    before = len(_kept)
    tensor = host_tensor((64,))
    driver = tensor._memory.driver
    assert isinstance(driver, HostDriver)
    array = np.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert len(driver._memory) == 1
    assert float(array[1]) == 65.0
    del array
    gc.collect()
    assert not driver._memory
    assert len(_kept) == before


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3)])
def test_a_capsule_that_nobody_takes_lets_go_of_the_memory(version: tuple[int, int] | None) -> None:
    before = len(_kept)
    tensor = host_tensor((4,))
    held = tensor.__dlpack__(max_version=version)
    assert len(_kept) == before + 1
    expected = "dltensor_versioned" if version and version[0] else "dltensor"
    assert f'"{expected}"' in repr(held)
    del held
    assert len(_kept) == before


def test_copies_and_other_devices_are_refused() -> None:
    tensor = host_tensor((4,))
    with pytest.raises(BufferError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        tensor.__dlpack__(dl_device=(2, 0))
    tensor.__dlpack__(dl_device=(1, 0), copy=False)


def test_devices_are_told() -> None:
    driver = FakeDriver(2)
    on_gpu = Tensor("t", Memory(driver, 1, 256), 0, DTYPES["BF16"], (128,))
    assert on_gpu.__dlpack_device__() == (2, 1)
    assert on_gpu.device == "cuda:1"
    assert repr(on_gpu) == "<Tensor 't' BF16 [128] on cuda:1>"
    pinned = Tensor("t", Memory(HostDriver(driver), 0, 4096), 0, DTYPES["U8"], (4096,))
    assert pinned.__dlpack_device__() == (3, 0)
    assert list(driver.registered.values()) == [4096]
    del on_gpu, pinned
    gc.collect()
    assert driver.leaks == []


def test_what_a_device_holds_is_read_back() -> None:
    driver = FakeDriver()
    memory = Memory(driver, 0, 4096)
    stream = driver.create_stream(0)
    driver.clear(memory.pointer, 7, 4096, stream)
    driver.synchronize(stream)
    driver.destroy_stream(0, stream)
    tensor = Tensor("t", memory, 1024, DTYPES["F16"], (10,))
    assert tensor.to_bytes() == b"\7" * 20
    assert tensor.octets().shape == (20,)
    del tensor, memory
    assert driver.leaks == []


def test_a_tensor_without_bytes_takes_no_memory() -> None:
    driver = FakeDriver()
    tensor = Tensor("t", Memory(driver, 0, 0), 0, DTYPES["F16"], (0, 4))
    assert tensor.to_bytes() == b""
    assert not driver.memory


def test_memory_that_can_not_be_had_leaves_nothing() -> None:
    driver = FakeDriver(fail_at={"allocate": 1})
    with pytest.raises(DeviceFailed):
        Memory(driver, 0, 100)
    assert driver.leaks == []


def test_who_holds_a_tensor_when_python_ends_does_no_harm() -> None:
    code = (
        "import numpy as np, sys\n"
        "from restore.host_driver import HostDriver\n"
        "from restore.dtypes import U8\n"
        "from restore.tensor import Memory, Tensor\n"
        "a = np.from_dlpack(Tensor('t', Memory(HostDriver(), 0, 4096), 0, U8, (4096,)))\n"
        "sys.kept = [a]\n"
        "np.kept = a\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
