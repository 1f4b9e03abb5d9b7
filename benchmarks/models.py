"""Safetensors models of any size, made fast: every byte differs, as in real weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

MIB = 1 << 20
SHARD_BYTES = 4 << 30
ROW_BYTES = 8192  # of a matrix of 4096 columns of two bytes


def write_model(root: Path, size_bytes: int, *, tensor_bytes: int = 64 * MIB) -> int:
    """Write files of BF16 matrices below `root`; returns the bytes of all tensors."""
    root.mkdir(parents=True, exist_ok=True)
    base = np.frombuffer(np.random.default_rng(1).bytes(tensor_bytes), np.uint64)
    n_tensors = max(1, size_bytes // tensor_bytes)
    per_shard = max(1, SHARD_BYTES // tensor_bytes)
    for shard, first in enumerate(range(0, n_tensors, per_shard)):
        numbers = range(first, min(n_tensors, first + per_shard))
        header = {
            f"model.layers.{i}.weight": {
                "dtype": "BF16",
                "shape": [tensor_bytes // ROW_BYTES, ROW_BYTES // 2],
                "data_offsets": [(i - first) * tensor_bytes, (i - first + 1) * tensor_bytes],
            }
            for i in numbers
        }
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with open(root / f"model-{shard + 1:05d}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(raw)) + raw)
            for i in numbers:
                file.write((base + np.uint64(i * 0x9E3779B97F4A7C15 % 2**64)).data)
    return n_tensors * tensor_bytes
