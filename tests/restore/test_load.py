"""Loading: every byte arrives where it belongs, whichever way it takes; or nothing is kept.

Long, because every way to a device is asked of one model that is made once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgfmt.errors import (
    CorruptData,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
    Unsupported,
)
from imgfmt.store_record import NewChunks
from restore import sources
from restore.direct_storage import DirectStorage
from restore.driver import DeviceFailed
from restore.files import Route
from restore.host_driver import HostDriver
from restore.load import Devices, FileRange, load, load_ranges
from restore.load_config import LoadConfig, Verify
from restore.pinned import PinnedPool
from restore.sources import DirectorySource
from restore.tensor import Tensor
from restore.testing.fake_driver import FakeDriver
from tests.restore.loading import (
    CONFIG,
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
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore
from transfer.threads import Threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Content, Path]:
    """A model, what it holds, and a store with it. Nobody changes them."""
    root = tmp_path_factory.mktemp("made")
    content = model(root / "model")
    asyncio.run(pushed(root / "model", root / "store"))
    return root / "model", content, root / "store"


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Content, Path]:
    """The same, to be damaged."""
    content = model(tmp_path / "model")
    asyncio.run(pushed(tmp_path / "model", tmp_path / "store"))
    return tmp_path / "model", content, tmp_path / "store"


def opened(place: Path) -> Store:
    return PosixStore(str(place))


def wired(place: Path) -> Store:
    """The same store as one whose packs are no files."""

    async def before(operation: str, key: str) -> None:
        """Nothing."""

    return InterposedStore(opened(place), before)


Made = tuple[Path, Content, Path]


@pytest.mark.parametrize("route", list(Route))
def test_a_directory_is_loaded_as_it_is(made: Made, route: Route) -> None:
    root, content, _ = made
    driver = FakeDriver()
    loaded = load_directory(root, driver, config=replace(CONFIG, route=route))
    assert held(loaded) == content
    assert not loaded.report.verified
    assert loaded.report.n_bytes == sum(map(len, content.values()))
    assert driver.most_pending > 1
    del loaded
    gc.collect()
    assert driver.leaks == []


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.CPU, Verify.DEVICE, Verify.OFF])
def test_a_directory_is_compared_with_its_image(made: Made, verify: Verify) -> None:
    root, content, place = made
    driver = FakeDriver()
    checked = asyncio.run(content_of(opened(place)))
    loaded = load_directory(root, driver, checked=checked, verify=verify)
    assert held(loaded) == content
    report = loaded.report
    assert report.verified is (verify is not Verify.OFF)
    assert (report.cpu_checked_bytes > 0) is (verify in (Verify.CPU, Verify.AUTO))
    assert (report.device_checked_bytes > 0) is (verify in (Verify.DEVICE, Verify.AUTO))
    del loaded
    gc.collect()
    assert driver.leaks == []


@pytest.mark.parametrize("verify", [Verify.AUTO, Verify.CPU, Verify.DEVICE])
def test_an_image_in_a_directory_store_is_loaded_from_its_packs(made: Made, verify: Verify) -> None:
    _, content, place = made
    driver = FakeDriver()
    loaded = load_image(opened(place), driver, verify=verify)
    assert held(loaded) == content
    assert loaded.report.verified
    del loaded
    gc.collect()
    assert driver.leaks == []


def test_an_image_in_any_store_goes_from_the_wire_to_pinned_memory_to_the_device(
    made: Made,
) -> None:
    _, content, place = made
    driver = FakeDriver(2)
    loaded = load_image(wired(place), driver, devices=(0, 1))
    assert held(loaded, 0) == content
    assert held(loaded, 1) == content
    assert loaded.report.verified
    del loaded
    gc.collect()
    assert driver.leaks == []


def test_an_image_of_encoded_chunks_is_decoded_into_pinned_memory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tensors = {"a": b"text " * 300_000, "b": noise(100_000, 1), "c": bytes(MIB)}
    write_safetensors(tmp_path / "model/m.safetensors", tensors)
    store = asyncio.run(pushed(tmp_path / "model", tmp_path / "store", NewChunks.ZSTD))
    driver = FakeDriver()
    assert held(load_image(store, driver)) == tensors
    gc.collect()
    assert driver.leaks == []


def test_each_byte_is_read_once_for_several_devices(made: Made) -> None:
    root, content, place = made
    checked = asyncio.run(content_of(opened(place)))
    one = load_directory(root, FakeDriver(), checked=checked)
    driver = FakeDriver(3)
    three = load_directory(root, driver, devices=(2, 0, 1), checked=checked, verify=Verify.DEVICE)
    assert three.report.read_bytes == one.report.read_bytes
    assert three.report.n_bytes == 3 * one.report.n_bytes
    for replica in range(3):
        assert held(three, replica) == content
    assert [r["big"].device for r in three.replicas] == ["cuda:2", "cuda:0", "cuda:1"]


def test_host_tensors_need_no_gpu(made: Made) -> None:
    root, content, place = made
    checked = asyncio.run(content_of(opened(place)))
    loaded = load_directory(root, HostDriver(), checked=checked)
    assert {name: np.from_dlpack(t).tobytes() for name, t in loaded.replicas[0].items()} == content
    assert loaded.report.verified
    assert held(load_image(opened(place), HostDriver())) == content


def test_host_tensors_can_be_pinned(made: Made) -> None:
    root, content, _ = made
    gpu = FakeDriver()
    loaded = load_directory(root, HostDriver(pinned_by=gpu))
    assert gpu.registered
    assert loaded.replicas[0]["big"].__dlpack_device__() == (3, 0)
    assert held(loaded) == content
    del loaded
    gc.collect()
    assert gpu.leaks == []


def test_tensors_are_handed_out_as_they_become_complete(made: Made) -> None:
    root, content, _ = made
    driver = FakeDriver()
    seen: Content = {}

    def deliver(tensors: Any) -> None:
        (tensor,) = tensors
        assert tensor.name not in seen
        seen[tensor.name] = driver.read(tensor.pointer, tensor.n_bytes) if tensor.n_bytes else b""

    load_directory(root, driver, deliver=deliver)
    assert seen == content


def test_only_the_tensors_asked_for_are_read(made: Made) -> None:
    root, content, _ = made
    loaded = load_directory(root, FakeDriver(), names=lambda name: name == "tail")
    assert held(loaded) == {"tail": content["tail"]}
    assert loaded.report.read_bytes < 4 * 4096
    loaded = load_directory(root, FakeDriver(), patterns=["*-2.safetensors"])
    assert set(held(loaded)) == {name for name in content if name[0] in "sl"} - {
        name for name in content if name.startswith("layer")
    }
    with pytest.raises(NotFound):
        load_directory(root, FakeDriver(), names=lambda name: name == "absent")


def test_ranges_of_files_go_to_memory_of_the_caller(made: Made) -> None:
    root, _, _ = made
    driver = FakeDriver()
    whole = (root / "model-1.safetensors").read_bytes()
    pointer = driver.allocate(0, 3 * MIB)

    async def work() -> None:
        with Threads("test", 2) as threads:
            source = DirectorySource(str(root), threads)
            ranges = [
                FileRange("model-1.safetensors", 12_345, 2 * MIB + 1, pointer),
                FileRange("model-1.safetensors", 0, 3, pointer + 2 * MIB + 1),
            ]
            await load_ranges(source, ranges, Devices(driver, (0,)), threads, CONFIG)
            for wrong in (("none", 0, 1), ("config.json", 1, 2), ("config.json", -1, 1)):
                bad = [FileRange(*wrong, pointer)]
                with pytest.raises(ImageError):
                    await load_ranges(source, bad, Devices(driver, (0,)), threads, CONFIG)

    asyncio.run(work())
    expected = whole[12_345 : 12_345 + 2 * MIB + 1] + whole[:3]
    assert driver.read(pointer, len(expected)) == expected


# Payloads of checkpoints.


def test_gms_shards_are_loaded_by_their_manifest(tmp_path: Path) -> None:
    shard = tmp_path / "gms/device-0/shards/shard_0000.bin"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(noise(MIB + 9000, 1))
    allocations = [
        {"allocation_id": f"a{i}", "size": size, "aligned_size": 2 * MIB, "tag": "weights",
         "tensor_file": "shards/shard_0000.bin", "tensor_offset": offset}
        for i, (offset, size) in enumerate([(0, 5000), (8192, MIB)])
    ]  # fmt: skip
    manifest = shard.parent.parent / "manifest.json"
    manifest.write_text(json.dumps({"allocations": allocations}))
    raw = shard.read_bytes()
    found = held(load_directory(tmp_path, FakeDriver()))
    assert found == {
        "gms/device-0/a0": raw[:5000],
        "gms/device-0/a1": raw[8192 : 8192 + MIB],
    }


def test_custom_storage_payloads_are_loaded_and_must_have_their_length(tmp_path: Path) -> None:
    data = noise(MIB + 1, 1)
    (tmp_path / "device-0000.bin").write_bytes(data)
    line = f"device 0 GPU-00000000-0000-0000-0000-000000000000 {len(data)} device-0000.bin\n"
    (tmp_path / "manifest.txt").write_text(f"version 4\ndevice_count 1\n{line}")
    assert held(load_directory(tmp_path, FakeDriver())) == {"device-0000": data}
    (tmp_path / "device-0000.bin").write_bytes(data + b"x")
    with pytest.raises(InvalidInput, match="it has"):
        load_directory(tmp_path, FakeDriver())


def test_names_that_are_there_twice_and_directories_without_any_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_directory(tmp_path / "absent", FakeDriver())
    with pytest.raises(NotFound, match="to load"):
        load_directory(tmp_path, FakeDriver())
    for name in "ab":
        write_safetensors(tmp_path / f"{name}.safetensors", {"t": b"x"})
    with pytest.raises(InvalidInput, match="choose files"):
        load_directory(tmp_path, FakeDriver())


# What goes wrong.


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
def test_a_damaged_file_fails_the_load_and_names_the_tensor(own: Made, verify: Verify) -> None:
    root, _, place = own
    file = root / "model-1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(noise(7 * MIB + 12_345, 50)) + 2 * MIB] ^= 1
    file.write_bytes(raw)
    driver = FakeDriver()
    handed: list[str] = []
    checked = asyncio.run(content_of(opened(place)))
    with pytest.raises(CorruptData, match=r"model-1.*chunk blake3:.*'big' is lost"):
        load_directory(
            root, driver, checked=checked, verify=verify,
            deliver=lambda tensors: handed.append(tensors[0].name),
        )  # fmt: skip
    assert "big" not in handed
    gc.collect()
    assert driver.leaks == []


def test_a_damaged_header_is_not_believed(own: Made) -> None:
    root, _, place = own
    file = root / "model-2.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw.replace(b'"small.0"', b'"small.x"'))
    checked = asyncio.run(content_of(opened(place)))
    with pytest.raises(CorruptData, match="not as in the image"):
        load_directory(root, FakeDriver(), checked=checked)


@pytest.mark.parametrize("verify", [Verify.CPU, Verify.DEVICE])
@pytest.mark.parametrize("wire", [False, True])
def test_a_damaged_pack_fails_the_load_and_names_chunk_and_tensor(
    own: Made, verify: Verify, wire: bool
) -> None:
    _, content, place = own
    needle = content["big"][2 * MIB : 2 * MIB + 64]
    (pack,) = [path for path in place.glob("packs/*/*") if needle in path.read_bytes()]
    raw = bytearray(pack.read_bytes())
    raw[raw.index(needle)] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(raw)
    store: Store = wired(place) if wire else opened(place)
    driver = FakeDriver()
    with pytest.raises(CorruptData, match=r"chunk blake3:.*model-1.*'big' is lost"):
        load_image(store, driver, verify=verify)
    gc.collect()
    assert driver.leaks == []


def test_a_pack_that_is_gone_is_looked_for_and_then_told(own: Made) -> None:
    _, content, place = own
    needle = content["big"][2 * MIB : 2 * MIB + 64]
    (pack,) = [path for path in place.glob("packs/*/*") if needle in path.read_bytes()]
    pack.unlink()
    driver = FakeDriver()
    with pytest.raises(NotFound, match="pack"):
        load_image(opened(place), driver)
    gc.collect()
    assert driver.leaks == []


def test_a_file_cut_short_fails_the_load(own: Made) -> None:
    root, _, place = own
    checked = asyncio.run(content_of(opened(place)))
    file = root / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-MIB])
    driver = FakeDriver()
    with pytest.raises(CorruptData, match="cut short"):
        load_directory(root, driver, checked=checked, verify=Verify.CPU)
    gc.collect()
    assert driver.leaks == []


def test_a_device_without_room_is_told_before_anything_is_loaded(made: Made) -> None:
    root, content, _ = made
    driver = FakeDriver(memory_bytes=sum(map(len, content.values())) // 2)
    with pytest.raises(OutOfResources, match="are free there"):
        load_directory(root, driver)
    assert driver.leaks == []
    assert not driver.copied_bytes


def test_too_little_pinned_memory_is_told(made: Made) -> None:
    root, _, _ = made
    with pytest.raises(InvalidInput, match="pinned memory"):
        LoadConfig(slot_bytes=2 * MIB, pinned_bytes=2 * MIB)
    driver = FakeDriver()
    with PinnedPool(driver, MIB) as pool:

        async def work() -> None:
            with Threads("test", 4) as threads:
                source = DirectorySource(str(root), threads)
                await load(source, Devices(driver, (0,), pool), threads, CONFIG)

        with pytest.raises(OutOfResources, match="no slot"):
            asyncio.run(work())
    gc.collect()
    assert driver.leaks == []


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("register", 1), ("allocate", 1), ("allocate", 3), ("create_event", 2),
        ("create_stream", 2), ("copy_to_device", 1), ("copy_to_device", 4), ("record", 2),
        ("wait", 2), ("synchronize", 1), ("clear", 1), ("check", 3), ("copy_on_device", 3),
        ("activate", 4), ("destroy_stream", 1), ("free", 1),
    ],
)  # fmt: skip
def test_whatever_call_fails_nothing_is_leaked(made: Made, name: str, call: int) -> None:
    root, _, place = made
    driver = FakeDriver(fail_at={name: call})
    checked = asyncio.run(content_of(opened(place)))
    try:
        loaded = load_directory(root, driver, checked=checked, verify=Verify.DEVICE)
    except DeviceFailed:
        pass
    else:
        assert name in ("destroy_stream", "free")  # clean-up of what is complete
        del loaded
        gc.collect()
        driver.streams.clear()
        driver.memory.clear()
    gc.collect()
    assert driver.calls[name] >= call
    assert driver.leaks == []


def test_a_device_that_disappears_ends_the_load_and_host_memory_comes_back(made: Made) -> None:
    root, _, _ = made
    driver = FakeDriver()
    real = driver.record

    def lose(event: object, stream: object) -> None:
        real(event, stream)
        driver.lost.add(0)

    driver.record = lose  # type: ignore[method-assign]
    with pytest.raises(DeviceFailed, match="gone"):
        load_directory(root, driver)
    assert not driver.registered


def test_a_device_that_can_not_hash_leaves_it_to_the_cpu_or_says_so(made: Made) -> None:
    root, content, place = made
    checked = asyncio.run(content_of(opened(place)))
    driver = FakeDriver(hashes=False)
    loaded = load_directory(root, driver, checked=checked)
    assert held(loaded) == content
    assert loaded.report.verified
    assert not loaded.report.device_checked_bytes
    del loaded
    with pytest.raises(Unsupported, match="verify=cpu"):
        load_directory(root, driver, checked=checked, verify=Verify.DEVICE)
    gc.collect()
    assert driver.leaks == []


def test_a_cancelled_load_leaves_nothing(made: Made) -> None:
    root, _, _ = made
    driver = FakeDriver()

    async def work() -> None:
        with Threads("test", 4) as threads:
            source = DirectorySource(str(root), threads)
            task = asyncio.create_task(load(source, Devices(driver, (0,)), threads, CONFIG))
            while not driver.calls["record"]:  # noqa: ASYNC110 - threads make it
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    gc.collect()
    assert driver.leaks == []


def test_a_pool_is_used_again_and_again(made: Made) -> None:
    root, content, _ = made
    driver = FakeDriver()
    with PinnedPool(driver, 8 * MIB, poison=True) as pool:

        async def work() -> dict[str, Tensor]:
            with Threads("test", 4) as threads:
                source = DirectorySource(str(root), threads)
                loaded = await load(source, Devices(driver, (0,), pool), threads, CONFIG)
                return loaded.replicas[0]

        for _ in range(2):
            tensors = asyncio.run(work())
            assert {name: tensor.to_bytes() for name, tensor in tensors.items()} == content
            del tensors
        assert len(driver.registered) == 1


def test_an_image_is_never_loaded_unverified(made: Made) -> None:
    with pytest.raises(InvalidInput, match="always verified"):
        load_image(opened(made[2]), FakeDriver(), verify=Verify.OFF)


def test_a_slot_that_is_used_again_before_its_event_would_be_noticed(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, _ = made
    driver = FakeDriver()
    monkeypatch.setattr(driver, "wait", lambda event: None)
    monkeypatch.setattr(driver, "reached", lambda event: True)
    few = replace(CONFIG, pinned_bytes=CONFIG.least_bytes, n_threads=1)
    assert held(load_directory(root, driver, config=few)) != content


# Reads by the device itself.


class FakeFileApi:
    """cuFile on a fake driver. `fails_at` is the read that returns -5."""

    def __init__(self, driver: FakeDriver, statistics: Path, fails_at: int = 0) -> None:
        self._driver = driver
        self._statistics = statistics
        self._fails_at = fails_at
        self.open_files: dict[int, int] = {}
        self.n_reads = 0
        self._count()

    def _count(self) -> None:
        self._statistics.write_text(f"Reads : err=0 n={self.n_reads} ok={self.n_reads} MiB=1\n")

    def open(self, descriptor: int) -> int:
        self.open_files[descriptor] = descriptor
        return descriptor

    def close(self, handle: int) -> None:
        del self.open_files[handle]

    def read(self, handle: int, pointer: int, n_bytes: int, offset: int) -> int:
        self.n_reads += 1
        if self.n_reads == self._fails_at:
            return -5
        with open(f"/proc/self/fd/{handle}", "rb") as file:
            raw = os.pread(file.fileno(), n_bytes, offset)
        data, at = self._driver._resolve(pointer, len(raw))
        data[at : at + len(raw)] = raw
        self._count()
        return len(raw)


@pytest.mark.parametrize("fails_at", [0, 1, 5])
@pytest.mark.parametrize("verify", [Verify.OFF, Verify.DEVICE, Verify.CPU])
def test_a_device_reads_files_itself_where_that_works_and_else_does_not(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Verify, fails_at: int
) -> None:
    root, content, place = made
    driver = FakeDriver()
    (tmp_path / "node").touch()
    api = FakeFileApi(driver, tmp_path / "stats", fails_at)
    storage = partial(DirectStorage, node=tmp_path / "node", statistics=tmp_path / "stats")
    monkeypatch.setattr(sources, "DirectStorage", lambda make: storage(lambda: api))
    checked = asyncio.run(content_of(opened(place)))
    config = replace(CONFIG, gpudirect=True)
    loaded = load_directory(root, driver, checked=checked, verify=verify, config=config)
    assert held(loaded) == content
    assert (loaded.report.gpudirect_bytes > 0) is (verify is not Verify.CPU)
    assert not api.open_files
    del loaded
    gc.collect()
    assert driver.leaks == []


def test_what_a_device_read_wrongly_is_found(
    own: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, content, place = own
    checked = asyncio.run(content_of(opened(place)))
    file = root / "model-1.safetensors"
    raw = bytearray(file.read_bytes())
    raw[raw.index(content["big"]) + 3 * MIB] ^= 1
    file.write_bytes(raw)
    driver = FakeDriver()
    (tmp_path / "node").touch()
    api = FakeFileApi(driver, tmp_path / "stats")
    storage = partial(DirectStorage, node=tmp_path / "node", statistics=tmp_path / "stats")
    monkeypatch.setattr(sources, "DirectStorage", lambda make: storage(lambda: api))
    config = replace(CONFIG, gpudirect=True)
    with pytest.raises(CorruptData, match="'big' is lost"):
        load_directory(root, driver, checked=checked, verify=Verify.DEVICE, config=config)
    gc.collect()
    assert driver.leaks == []
    assert not api.open_files


def test_where_gpudirect_is_not_there_files_are_read_as_usual(made: Made) -> None:
    root, content, _ = made
    loaded = load_directory(root, FakeDriver(), config=replace(CONFIG, gpudirect=True))
    assert held(loaded) == content
    assert not loaded.report.gpudirect_bytes
    (warning,) = loaded.report.warnings
    assert warning.startswith("GPUDirect did not read all of 2 files: the module nvidia-fs is not")


def test_why_gpudirect_is_of_no_use_for_a_load_is_told(made: Made) -> None:
    root, content, place = made
    checked = asyncio.run(content_of(opened(place)))
    config = replace(CONFIG, gpudirect=True)
    loaded = load_directory(root, FakeDriver(), checked=checked, verify=Verify.CPU, config=config)
    assert held(loaded) == content
    (warning,) = loaded.report.warnings
    assert "GPUDirect read nothing: it is for files, one device" in warning
    loaded = load_image(wired(place), FakeDriver(), config=config)
    assert held(loaded) == content
    assert loaded.report.warnings == (warning,)
