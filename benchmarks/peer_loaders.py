"""Loads a directory of safetensors files to cuda:0 with one library, and prints seconds as JSON.

A process of its own for each library: `python benchmarks/peer_loaders.py NAME DIR ROUNDS`. Every
round ends when all tensors are on the device. What a library does not release stays its own.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Load = Callable[[Sequence[str]], int]
"""Loads files; returns the bytes that are then on the device."""


def by_safetensors(paths: Sequence[str]) -> int:
    """The reference implementation, a file after the other."""
    import torch
    from safetensors.torch import load_file

    kept = [load_file(path, device="cuda:0") for path in paths]
    torch.cuda.synchronize()
    return sum(t.nbytes for found in kept for t in found.values())


def by_fastsafetensors(paths: Sequence[str]) -> int:
    """Its loader without GPUDirect, 16 threads."""
    import torch
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cuda:0"), nogds=True)
    loader.add_filenames({0: list(paths)})
    buffers = loader.copy_files_to_device()
    names = list(buffers.key_to_rank_lidx)
    kept = [buffers.get_tensor(name) for name in names]
    torch.cuda.synchronize()
    total = sum(int(t.nbytes) for t in kept)
    del kept
    buffers.close()
    loader.close()
    return total


def by_runai(paths: Sequence[str]) -> int:
    """Run:ai Model Streamer: to host memory in its threads, then to the device."""
    import torch
    from runai_model_streamer import SafetensorsStreamer

    kept = []
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths))
        for _, tensor in streamer.get_tensors():
            kept.append(tensor.to("cuda:0"))
    torch.cuda.synchronize()
    return sum(int(t.nbytes) for t in kept)


def by_pageable(paths: Sequence[str]) -> int:
    """Mapped files, copied from pageable memory."""
    import torch
    from safetensors.torch import load_file

    kept = [{n: t.to("cuda:0") for n, t in load_file(path).items()} for path in paths]
    torch.cuda.synchronize()
    return sum(t.nbytes for found in kept for t in found.values())


def by_snapcask(paths: Sequence[str]) -> int:
    """All that a program would do, pinned memory made and given back in each round."""
    import torch

    import snapcask

    tensors = snapcask.load(Path(paths[0]).parent, device="cuda:0")
    kept = {name: torch.from_dlpack(tensor) for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    return sum(t.nbytes for t in kept.values())


LOADERS: dict[str, tuple[str, Load]] = {
    "snapcask": ("snapcask", by_snapcask),
    "safetensors": ("safetensors", by_safetensors),
    "fastsafetensors": ("fastsafetensors", by_fastsafetensors),
    "runai": ("runai-model-streamer", by_runai),
    "pageable": ("torch", by_pageable),
}


def version_of(package: str) -> str:
    """Of a distribution, or that it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def main() -> None:
    """Measure one library."""
    name, folder, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ.setdefault("RUNAI_STREAMER_CONCURRENCY", "16")
    import torch

    torch.zeros(1, device="cuda:0")
    paths = sorted(str(path) for path in Path(folder).glob("*.safetensors"))
    package, load = LOADERS[name]
    seconds = []
    n_bytes = 0
    for _ in range(rounds):
        begun_s = time.perf_counter()
        n_bytes = load(paths)
        seconds.append(time.perf_counter() - begun_s)
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps({"seconds": seconds, "bytes": n_bytes, "version": version_of(package)}))


if __name__ == "__main__":
    main()
