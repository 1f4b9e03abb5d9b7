"""What is to be loaded: named tensors, each a range of bytes in a file. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from restore.dtypes import U8, DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The bytes [start, end) of `file` (a path below the source's root) are this tensor."""

    name: str
    file: str
    start: int
    end: int
    dtype: DType
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Length of the tensor."""
        return self.end - self.start


def octets(name: str, file: str, start: int, n_bytes: int) -> TensorSpec:
    """A range of bytes as a tensor of bytes."""
    return TensorSpec(name, file, start, start + n_bytes, U8, (n_bytes,))
