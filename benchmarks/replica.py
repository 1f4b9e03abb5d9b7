"""A small process that holds what an inference server holds, to capture and to compare.

    python benchmarks/replica.py --model-seed 1 --order-seed 2 --weights-mb 32 --ready-file READY

Two processes of one model seed hold the same weights and token table; the order seed changes the
order in which tensors are loaded, and so their addresses. The file READY holds the process id once
all is in place. The process then waits to be killed and ends by itself after `--max-seconds`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

N_TENSORS = 16
N_TOKENS = 20_000
KV_CACHE_BYTES = 8 << 20
SCRATCH_BYTES = 1 << 20
MB = 1_000_000

Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Model:
    """What a replica keeps in memory. Tensors are in the order in which they were loaded."""

    tensors: tuple[Halves, ...]
    token_ids: dict[str, int]
    kv_cache: Halves
    scratch: bytearray


def main() -> None:
    """Parse the command line, load, report, wait."""
    parser = argparse.ArgumentParser(description="A small inference-like process.")
    parser.add_argument("--model-seed", type=int, required=True, help="which model")
    parser.add_argument("--order-seed", type=int, required=True, help="order of loading")
    parser.add_argument("--weights-mb", type=float, required=True, help="weights, in 10^6 bytes")
    parser.add_argument("--ready-file", type=Path, required=True, help="written when loaded")
    parser.add_argument(
        "--changed-layers", type=int, default=0, help=f"of {N_TENSORS}: a fine-tune of the model"
    )
    parser.add_argument("--kv-mb", type=float, default=0, help="a KV cache in use, in 10^6 bytes")
    parser.add_argument(
        "--kv", choices=("kept", "zeroed", "released"), default="kept", help="then done with it"
    )
    parser.add_argument("--max-seconds", type=float, default=120, help="end by itself after this")
    options = parser.parse_args()
    if not 0 <= options.changed_layers <= N_TENSORS:
        parser.error(f"--changed-layers must be 0 to {N_TENSORS}")
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait, daemon=True)
    worker.start()
    model = load_model(
        model_seed=options.model_seed,
        order_seed=options.order_seed,
        weights_bytes=int(options.weights_mb * MB),
        n_changed=options.changed_layers,
    )
    used = use_kv_cache(int(options.kv_mb * MB), options.kv)
    report_ready(options.ready_file)
    stop.wait(options.max_seconds)
    del model, used


def load_model(*, model_seed: int, order_seed: int, weights_bytes: int, n_changed: int) -> Model:
    """Fill the memory of a replica. The first `n_changed` tensors are those of a fine-tune."""
    n_values = max(1, weights_bytes // N_TENSORS // np.dtype(np.float16).itemsize)
    order = np.random.default_rng(order_seed).permutation(N_TENSORS)
    tensors = tuple(
        tensor(seeds=[model_seed, int(index), int(index < n_changed)], n_values=n_values)
        for index in order
    )
    numbers = np.random.default_rng([model_seed, N_TENSORS]).integers(0, 1 << 40, N_TOKENS)
    kv_cache = private_memory(KV_CACHE_BYTES // 2)
    kv_cache[:] = 0  # written, so that every page of it is a page of this process
    return Model(
        tensors=tensors,
        token_ids={f"{number:x}": index for index, number in enumerate(numbers.tolist())},
        kv_cache=kv_cache,
        scratch=bytearray(os.urandom(SCRATCH_BYTES)),
    )


def tensor(*, seeds: list[int], n_values: int) -> Halves:
    """Normally distributed weights that depend on nothing but `seeds`."""
    weights = private_memory(n_values)
    weights[:] = np.random.default_rng(seeds).standard_normal(n_values, dtype=np.float32)
    return weights


def private_memory(n_values: int) -> Halves:
    """Memory of its own mapping, as loaders allocate weights: it begins on a page boundary."""
    n_bytes = n_values * np.dtype(np.float16).itemsize
    block = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(block, dtype=np.float16)


def use_kv_cache(size_bytes: int, fate: str) -> mmap.mmap | None:
    """A cache that requests have filled, each in its own way; then kept, zeroed or released."""
    if size_bytes < mmap.PAGESIZE:
        return None
    cache = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    rng = np.random.default_rng()
    for start in range(0, size_bytes, SCRATCH_BYTES):  # large temporaries would stay in the heap
        n_bytes = min(SCRATCH_BYTES, size_bytes - start) // 8
        cache[start : start + 8 * n_bytes] = rng.integers(0, 1 << 63, n_bytes).tobytes()
    if fate == "zeroed":
        for start in range(0, size_bytes, SCRATCH_BYTES):
            n_bytes = min(SCRATCH_BYTES, size_bytes - start)
            cache[start : start + n_bytes] = bytes(n_bytes)
    elif fate == "released":
        cache.madvise(mmap.MADV_DONTNEED)  # as free() and the allocators of frameworks do
    return cache


def report_ready(ready_file: Path) -> None:
    """Write the process id to `ready_file` in one step: whoever sees the file sees all of it."""
    unfinished = ready_file.with_name(f".{ready_file.name}.{os.getpid()}")
    unfinished.write_text(f"{os.getpid()}\n", encoding="ascii")
    unfinished.replace(ready_file)


if __name__ == "__main__":
    main()
