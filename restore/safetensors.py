"""Headers of safetensors files, read strictly: no hole, no overlap, sizes that agree. Pure.

https://github.com/huggingface/safetensors#format has the format.
"""

from __future__ import annotations

import json
import math
from typing import Any

from imgfmt.errors import InvalidInput
from restore.dtypes import DTYPES
from restore.spec import TensorSpec

SUFFIX = ".safetensors"
LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
"""What the reference implementation accepts."""

MAX_TENSORS = 1_000_000
MAX_RANK = 64
MAX_NAME_BYTES = 4096
_MAX_DIMENSION = 2**63 - 1
_KEYS = {"dtype", "shape", "data_offsets"}
_METADATA = "__metadata__"


def header_length(prefix: bytes, file_bytes: int, file: str) -> int:
    """Length of the header, from the first 8 bytes. Raises InvalidInput."""
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) < LENGTH_BYTES:
        raise _broken(file, "it is shorter than 8 bytes")
    if length > HEADER_LIMIT_BYTES:
        raise _broken(file, f"its header of {length} bytes is larger than {HEADER_LIMIT_BYTES}")
    if LENGTH_BYTES + length > file_bytes:
        raise _broken(file, f"its header of {length} bytes does not end within the file")
    if not length:
        raise _broken(file, "its header is empty")
    return length


def parse_header(header: bytes, file_bytes: int, file: str) -> list[TensorSpec]:
    """The tensors of a file in the order of their bytes. Raises InvalidInput.

    `header` is what follows the 8 bytes of its length. Every byte behind it belongs to exactly one
    tensor.
    """
    document = _document(header, file)
    data_start = LENGTH_BYTES + len(header)
    found = [
        _tensor(name, fields, data_start, file)
        for name, fields in document.items()
        if name != _METADATA
    ]
    found.sort(key=lambda spec: (spec.start, spec.end))
    at = data_start
    for spec in found:
        if spec.start != at:
            what = "overlaps another" if spec.start < at else "begins behind a hole"
            raise _broken(file, f"tensor {spec.name!r} {what}")
        at = spec.end
    if at != file_bytes:
        raise _broken(file, f"its tensors end at byte {at}, the file at {file_bytes}")
    return found


def _document(header: bytes, file: str) -> dict[str, Any]:
    if header[:1] != b"{":
        raise _broken(file, "its header does not begin with {")
    try:
        document = json.loads(header, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _broken(file, f"its header is not JSON ({error})") from None
    if len(document) > MAX_TENSORS:
        raise _broken(file, f"it has more than {MAX_TENSORS} tensors")
    metadata = document.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(file, "its metadata is not a map of text")
    found: dict[str, Any] = document
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _tensor(name: str, fields: object, data_start: int, file: str) -> TensorSpec:
    what = f"tensor {name[:80]!r}"
    if len(name.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
        raise _broken(file, f"{what} has a name of more than {MAX_NAME_BYTES} bytes")
    if not isinstance(fields, dict) or set(fields) != _KEYS:
        raise _broken(file, f"{what} has not exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
    if dtype is None:
        raise _broken(file, f"{what} has an unknown dtype {str(fields['dtype'])[:40]!r}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise _broken(file, f"{what} has no valid shape")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _broken(file, f"{what} has no valid data_offsets")
    bits = math.prod(shape) * dtype.bits
    if bits % 8 or bits // 8 != offsets[1] - offsets[0]:
        raise _broken(
            file, f"{what}: {offsets[1] - offsets[0]} bytes are not {dtype.name} of shape {shape}"
        )
    start, end = data_start + offsets[0], data_start + offsets[1]
    return TensorSpec(name, file, start, end, dtype, tuple(shape))


def _naturals(value: object) -> bool:
    """Whether this is a list of integers from 0 to 2**63 - 1; True and False are none."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item <= _MAX_DIMENSION for item in value
    )


def _broken(file: str, why: str) -> InvalidInput:
    return InvalidInput(f"{file} is no safetensors file that can be loaded: {why}")
