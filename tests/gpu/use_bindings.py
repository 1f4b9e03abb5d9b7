"""Run by `test_bindings` in a process whose CUDA is a stand-in: loads, and says what happened."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

import snapcask
from restore import device_paths, direct_storage, sources
from restore.cuda_driver import cuda_driver
from tests.restore.loading import Content, model


def use(root: Path) -> dict[str, object]:
    """What each way to load brought, and what was left of all."""
    content = model(root / "model")
    store = snapcask.init_store(root / "store")
    snapcask.push(root / "model", "m:1", store=root / "store")
    node, statistics = root / "node", root / "stats"
    node.touch()
    statistics.write_text("Reads : err=0 n=0 ok=0 readMiB=0\n")
    here = partial(direct_storage.DirectStorage, node=node, statistics=statistics)
    vars(sources)["DirectStorage"] = here
    place = device_paths.Place(str(root))
    (paths,) = device_paths.device_paths(cuda_driver(), [place], node=node, statistics=statistics)
    found: dict[str, object] = {
        "why_not_direct": paths.disks[0].why_not_direct if paths.disks else paths.problem,
        "device": paths.name,
        "image": _as_it_is(snapcask.load("m:1", store=root / "store"), content),
        "directory": _as_it_is(snapcask.load(root / "model", verify="off"), content),
    }
    if not os.environ["STAND_IN_FAILS"]:
        checked = snapcask.load("m:1", store=root / "store", verify="device")
        found["by the device"] = _as_it_is(checked, content)
        found["device_checked_bytes"] = checked.report.device_checked_bytes
        del checked
    direct = snapcask.load(root / "model", verify="off", gpudirect=True)
    found["gpudirect"] = _as_it_is(direct, content)
    found["gpudirect_bytes"] = direct.report.gpudirect_bytes
    found["freezing"] = _freeze()
    cuda_driver().load_hasher(0, wait=True)  # it was being tried out meanwhile
    del direct, store
    gc.collect()
    found["left"] = ctypes.CDLL("libcuda.so.1").stand_in_left()
    found["left_files"] = ctypes.CDLL("libcufile.so.0").stand_in_files()
    return found


def _as_it_is(tensors: snapcask.Tensors, content: Content) -> bool:
    return {name: tensor.to_bytes() for name, tensor in tensors.items()} == content


def _freeze() -> list[object]:
    from cuda.bindings import driver

    from benchmarks.bench_gpu_dedup import freeze
    from imgfmt.errors import ImageError

    stand_in = ctypes.CDLL("libcuda.so.1")
    try:
        freeze(7, driver)
        refused = ""
    except ImageError as error:
        refused = str(error)
    state = stand_in.stand_in_state(7)
    freeze(8, driver)
    return [refused, state, stand_in.stand_in_lock_ms(), stand_in.stand_in_state(8)]


if __name__ == "__main__":
    print(json.dumps(use(Path(sys.argv[1]))))
