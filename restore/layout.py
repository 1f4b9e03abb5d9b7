"""Where tensors go in device memory: a few large blocks, each tensor at a multiple of 256. Pure.

Tensors that follow each other in their file do so in memory too wherever that keeps the alignment,
so that one copy brings many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from restore.spec import TensorSpec

ALIGNMENT = 256
"""What DLPack asks of the address of a tensor."""

BLOCK_BYTES = 512 << 20
"""Memory is given back a block at a time, once no tensor in it is used any more."""


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor begins at `offset` of a block."""

    block: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of the blocks, and the place of each tensor."""

    block_bytes: tuple[int, ...]
    places: tuple[Place, ...]


def lay_out(specs: Sequence[TensorSpec], block_bytes: int = BLOCK_BYTES) -> Layout:
    """Place tensors, which are in the order of their files and bytes. A large one has a block."""
    blocks: list[int] = []
    places: list[Place] = []
    used = 0
    for spec in specs:
        offset = -(-used // ALIGNMENT) * ALIGNMENT
        if not blocks or offset + spec.n_bytes > max(block_bytes, blocks[-1]):
            blocks.append(0)
            offset = 0
        used = offset + spec.n_bytes
        blocks[-1] = used
        places.append(Place(len(blocks) - 1, offset))
    return Layout(tuple(blocks), tuple(places))
