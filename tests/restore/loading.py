"""What tests of loading share: models, stores, and a load on a fake driver."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from imgfmt.store_record import NewChunks, StoreRecord
from restore.driver import Driver
from restore.image_source import ImageSource
from restore.load import Devices, Loaded, load
from restore.load_config import LoadConfig, Verify
from restore.sources import DirectorySource
from restore.spec import TensorSpec
from transfer.catalog import MemberContent, init_store, open_catalog
from transfer.config import TransferConfig
from transfer.pull import choose_image
from transfer.push import DirectorySource as PushedDirectory
from transfer.push import PushRequest, push
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.threads import Threads

MIB = 1 << 20
CONFIG = LoadConfig(slot_bytes=2 * MIB, pinned_bytes=12 * MIB + 4096, n_threads=3)

Content = dict[str, bytes]


def noise(n_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(n_bytes)


def write_safetensors(path: Path, tensors: Mapping[str, bytes], pad: int = 0) -> None:
    """A file of tensors of bytes. `pad` blanks end the header, so that data begins anywhere."""
    header: dict[str, Any] = {}
    at = 0
    for name, data in tensors.items():
        offsets = [at, at + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": offsets}
        at += len(data)
    raw = json.dumps(header).encode() + b" " * pad
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))


def model(root: Path) -> Content:
    """Two files: tensors of many sizes, some beyond a slot, one of zeros; and what they hold."""
    root.mkdir(parents=True)
    first = {f"layer.{i}": noise(size, i) for i, size in enumerate([1, 256, 0, 5000, 70_000])}
    first["big"] = noise(7 * MIB + 12_345, 50)
    first["zeros"] = bytes(2 * MIB + 777)
    first["tail"] = noise(4097, 51)
    second = {f"small.{i}": noise(i % 7 * 100 + 1, 100 + i) for i in range(300)}
    second["last"] = noise(MIB, 52)
    write_safetensors(root / "model-1.safetensors", first, pad=3)
    write_safetensors(root / "model-2.safetensors", second)
    (root / "config.json").write_text("{}")
    return {**first, **second}


def held(loaded: Loaded, replica: int = 0) -> Content:
    """What the devices hold."""
    return {name: tensor.to_bytes() for name, tensor in loaded.replicas[replica].items()}


async def pushed(root: Path, place: Path, codec: NewChunks = NewChunks.RAW) -> PosixStore:
    """A new store with the directory as `m:v1`."""
    store = PosixStore(str(place))
    await init_store(store, StoreRecord(bytes(16), codec=codec, concurrent_writers=True))
    catalog = await open_catalog(store, write=True)
    source = PushedDirectory("main", str(root), "", "", {})
    request = PushRequest([source], [], ("m", "v1"), {}, (), False)
    await push(catalog, request, config=TransferConfig())
    return store


async def content_of(store: Store) -> MemberContent:
    """The one member of `m:v1`."""
    catalog = await open_catalog(store)
    state = await store.read_reference("m", "v1")
    assert state is not None
    assert state.record.target is not None
    _, image = await choose_image(catalog, state.record.target, {})
    return await catalog.content(image.members[0].tree)


def load_directory(
    root: Path,
    driver: Driver,
    *,
    devices: tuple[int, ...] = (0,),
    checked: MemberContent | None = None,
    verify: Verify = Verify.AUTO,
    config: LoadConfig = CONFIG,
    **given: Any,
) -> Loaded:
    """Load from a directory, compared with a tree if one is given."""

    async def work() -> Loaded:
        with Threads("test", 4) as threads:
            tree = None if checked is None else checked.tree
            source = DirectorySource(str(root), threads, tree)
            chosen = replace(config, verify=verify)
            return await load(source, Devices(driver, devices), threads, chosen, **given)

    return asyncio.run(work())


def load_image(
    store: Store,
    driver: Driver,
    *,
    devices: tuple[int, ...] = (0,),
    verify: Verify = Verify.AUTO,
    config: LoadConfig = CONFIG,
    **given: Any,
) -> Loaded:
    """Load from an image in a store."""

    async def work() -> Loaded:
        with Threads("test", 4) as threads:
            catalog = await open_catalog(store)
            content = await content_of(store)
            source = ImageSource(catalog, content, threads, TransferConfig())
            chosen = replace(config, verify=verify)
            return await load(source, Devices(driver, devices), threads, chosen, **given)

    return asyncio.run(work())


def spec_names(specs: list[TensorSpec]) -> list[str]:
    return [spec.name for spec in specs]


def checked_model(folder: Path) -> tuple[Path, Content, MemberContent]:
    """A model in `folder`, what it holds, and the tree that a store in there has of it."""
    content = model(folder / "model")
    store = asyncio.run(pushed(folder / "model", folder / "store"))
    return folder / "model", content, asyncio.run(content_of(store))
