"""Further ways to a real GPU: the node's cache, memory of the caller, reads by the device."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import snapcask
from restore.cuda_driver import CudaDriver
from restore.device_paths import Place, device_paths
from restore.dtypes import U8
from restore.tensor import Memory, Tensor
from tests.restore.loading import MIB, Content, model
from tests.snapcask.support import command

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content]:
    """A folder with a model, and a store that has it as `m:1`."""
    root = tmp_path_factory.mktemp("ways")
    content = model(root / "model")
    snapcask.init_store(root / "store")
    snapcask.push(root / "model", "m:1", store=root / "store")
    return root, content


def held(tensors: snapcask.Tensors) -> Content:
    return {name: tensor.to_bytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("verify", ["auto", "cpu", "device"])
def test_an_image_of_the_nodes_cache_arrives_whole(
    driver: CudaDriver, made: tuple[Path, Content], tmp_path: Path, verify: str
) -> None:
    root, content = made
    store, cache = root / "store", tmp_path / "cache"
    options = "--store", store, "--cache", cache, "--allow-root-filesystem"
    assert command("prefetch", "m:1", *options).code == 0
    before = driver.free_bytes(0)
    tensors = snapcask.load("m:1", store=store, cache=cache, verify=verify)
    assert held(tensors) == content
    assert (tensors.report.from_cache, tensors.report.verified) == (True, True)
    del tensors
    gc.collect()
    assert abs(driver.free_bytes(0) - before) <= 64 * MIB


def test_tensors_go_by_their_names_to_memory_of_the_caller(
    driver: CudaDriver, made: tuple[Path, Content]
) -> None:
    root, content = made
    names = ["tail", "big", "layer.3"]
    memory = Memory(driver, 0, sum(len(content[name]) for name in names))
    wanted, at = [], memory.pointer
    for name in names:
        wanted.append(snapcask.TensorTarget(name, len(content[name]), at))
        at += len(content[name])
    report = snapcask.load_ranges("m:1", wanted, store=root / "store")
    assert report.verified
    found = Tensor("all", memory, 0, U8, (memory.n_bytes,)).to_bytes()
    assert found == b"".join(content[name] for name in names)


@pytest.mark.parametrize("verify", ["off", "device"])
def test_reads_by_the_device_bring_the_same_or_say_why_there_are_none(
    driver: CudaDriver, made: tuple[Path, Content], verify: str
) -> None:
    root, content = made
    image = "m:1" if verify == "device" else None
    tensors = snapcask.load(
        root / "model", image=image, store=root / "store", verify=verify, gpudirect=True
    )
    assert held(tensors) == content
    report = tensors.report
    print(f"by GPUDirect: {report.gpudirect_bytes} bytes; {report.warnings}")
    assert report.gpudirect_bytes or report.warnings


def test_each_device_tells_how_it_gets_files(driver: CudaDriver, tmp_path: Path) -> None:
    found = device_paths(driver, [Place(str(tmp_path)), Place("/dev/shm")])
    assert len(found) == driver.device_count()
    for device in found:
        print(device)
        assert not device.problem
        assert device.name
        assert device.disks[0].directory == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
