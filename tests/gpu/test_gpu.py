"""Loading to a real GPU: every path, sizes and offsets of all kinds, read back and compared."""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from imgfmt.errors import CorruptData, OutOfResources
from restore.cuda_driver import CudaDriver
from restore.files import Route
from restore.load import Devices, FileRange, load_ranges
from restore.load_config import LoadConfig, Verify
from restore.pinned import PinnedPool
from restore.sources import DirectorySource
from restore.tensor import Memory
from tests.restore.loading import (
    MIB,
    Content,
    content_of,
    held,
    load_directory,
    load_image,
    model,
    noise,
    pushed,
    write_safetensors,
)
from tests.restore.test_load import wired
from transfer.store.posix import PosixStore
from transfer.threads import Threads

pytestmark = pytest.mark.gpu

CONFIG = LoadConfig(pinned_bytes=128 * MIB)
HUGE_BYTES = int(os.environ.get("SNAPCASK_TEST_HUGE_BYTES", 1 << 30))

Made = tuple[Path, Content, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("gpu")
    content = model(root / "model")
    asyncio.run(pushed(root / "model", root / "store"))
    return root / "model", content, root / "store"


@pytest.mark.parametrize("verify", list(Verify))
@pytest.mark.parametrize("route", [Route.BUFFERED, Route.DIRECT])
def test_a_directory_arrives_whole(
    driver: CudaDriver, made: Made, verify: Verify, route: Route
) -> None:
    root, content, place = made
    before = driver.free_bytes(0)
    checked = asyncio.run(content_of(PosixStore(str(place))))
    config = replace(CONFIG, route=route)
    loaded = load_directory(root, driver, checked=checked, verify=verify, config=config)
    assert held(loaded) == content
    assert loaded.report.verified is (verify is not Verify.OFF)
    if verify is Verify.DEVICE:
        assert loaded.report.device_checked_bytes > 0
    del loaded
    gc.collect()
    assert abs(driver.free_bytes(0) - before) <= 64 * MIB


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
@pytest.mark.parametrize("wire", [False, True])
def test_an_image_arrives_whole(driver: CudaDriver, made: Made, verify: Verify, wire: bool) -> None:
    _, content, place = made
    store = wired(place) if wire else PosixStore(str(place))
    assert held(load_image(store, driver, verify=verify)) == content


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
def test_twenty_thousand_small_tensors_arrive(
    driver: CudaDriver, tmp_path: Path, verify: Verify
) -> None:
    (tmp_path / "m").mkdir()
    tensors = {f"t{i}": noise(1 + i % 4099, i) for i in range(20_000)}
    write_safetensors(tmp_path / "m/m.safetensors", tensors, pad=1)
    store = asyncio.run(pushed(tmp_path / "m", tmp_path / "store"))
    checked = asyncio.run(content_of(store))
    loaded = load_directory(tmp_path / "m", driver, checked=checked, verify=verify, config=CONFIG)
    assert held(loaded) == tensors


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.CPU, Verify.DEVICE])
def test_a_huge_tensor_arrives(driver: CudaDriver, tmp_path: Path, verify: Verify) -> None:
    (tmp_path / "m").mkdir()
    base = np.frombuffer(noise(64 * MIB, 1), np.uint64)
    with open(tmp_path / "m/device-0000.bin", "wb") as file:
        for i in range(HUGE_BYTES // base.nbytes):
            file.write((base + np.uint64(i)).tobytes())
    line = f"device 0 GPU-00000000-0000-0000-0000-000000000000 {HUGE_BYTES} device-0000.bin\n"
    (tmp_path / "m/manifest.txt").write_text(f"version 4\ndevice_count 1\n{line}")
    checked = None
    if verify is not Verify.OFF:
        store = asyncio.run(pushed(tmp_path / "m", tmp_path / "store"))
        checked = asyncio.run(content_of(store))
    loaded = load_directory(tmp_path / "m", driver, checked=checked, verify=verify, config=CONFIG)
    found = loaded.replicas[0]["device-0000"].to_bytes()
    for i in range(HUGE_BYTES // base.nbytes):
        part = found[i * base.nbytes : (i + 1) * base.nbytes]
        assert part == (base + np.uint64(i)).tobytes()


def test_ranges_at_odd_offsets_arrive(driver: CudaDriver, tmp_path: Path) -> None:
    raw = noise(20 * MIB + 7, 3)
    (tmp_path / "f").write_bytes(raw)
    spans = [(0, 1), (1, 1), (4095, 2), (12_345, 8 * MIB), (8 * MIB - 1, 3), (len(raw) - 5, 5)]
    memory = Memory(driver, 0, sum(n for _, n in spans))
    ranges, at = [], 0
    for offset, n_bytes in spans:
        ranges.append(FileRange("f", offset, n_bytes, memory.pointer + at))
        at += n_bytes

    async def work() -> None:
        with Threads("test", 4) as threads:
            source = DirectorySource(str(tmp_path), threads)
            await load_ranges(source, ranges, Devices(driver, (0,)), threads, CONFIG)

    asyncio.run(work())
    from restore.dtypes import U8
    from restore.tensor import Tensor

    found = Tensor("all", memory, 0, U8, (memory.n_bytes,)).to_bytes()
    assert found == b"".join(raw[o : o + n] for o, n in spans)


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
def test_damage_is_found_and_device_memory_comes_back(
    driver: CudaDriver, tmp_path: Path, verify: Verify
) -> None:
    content = model(tmp_path / "m")
    store = asyncio.run(pushed(tmp_path / "m", tmp_path / "store"))
    checked = asyncio.run(content_of(store))
    file = tmp_path / "m/model-1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(content["big"]) + 3 * MIB] ^= 4
    file.write_bytes(raw)
    before = driver.free_bytes(0)
    with pytest.raises(CorruptData, match="'big' is lost"):
        load_directory(tmp_path / "m", driver, checked=checked, verify=verify, config=CONFIG)
    gc.collect()
    assert abs(driver.free_bytes(0) - before) <= 64 * MIB


def test_a_device_that_is_full_is_told(driver: CudaDriver) -> None:
    with pytest.raises(OutOfResources, match="OUT_OF_MEMORY"):
        driver.allocate(0, driver.free_bytes(0) + (1 << 30))
    with PinnedPool(driver, 64 * MIB) as pool, pool.lend() as arena:
        assert len(arena.allocate(MIB)) == MIB


def test_frameworks_take_tensors_without_a_copy(driver: CudaDriver, made: Made) -> None:
    root, content, _ = made
    loaded = load_directory(root, driver, config=CONFIG)
    tensor = loaded.replicas[0]["big"]
    pointer = tensor.pointer
    torch = pytest.importorskip("torch")
    array = torch.from_dlpack(tensor)
    assert array.data_ptr() == pointer
    assert array.cpu().numpy().tobytes() == content["big"]
    cupy = pytest.importorskip("cupy")
    assert cupy.asnumpy(cupy.from_dlpack(tensor)).tobytes() == content["big"]
    del loaded, tensor
    gc.collect()
    assert array.cpu().numpy().tobytes() == content["big"]  # still alive
