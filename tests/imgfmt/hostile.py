"""What tests of decoders share: damaged copies of an object, and the memory that a call takes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from imgfmt.digest import Octets
from imgfmt.errors import CorruptData, InvalidImage, Unsupported

REFUSALS = (CorruptData, InvalidImage, Unsupported)
ALLOWED_EXTRA_BYTES = 16 << 20

Decoded = TypeVar("Decoded")


def damaged(raw: bytes, step: int = 1) -> Iterator[bytes]:
    """Every proper beginning of `raw`, and the copies with one bit flipped, of each `step` bits."""
    for end in range(len(raw)):
        yield raw[:end]
    for bit in range(0, len(raw) * 8, step):
        copy = bytearray(raw)
        copy[bit // 8] ^= 1 << bit % 8
        yield bytes(copy)


def check_damage(
    raw: bytes,
    decode: Callable[[bytes], Decoded],
    encode: Callable[[Decoded], bytes | Sequence[Octets]],
    step: int = 1,
) -> int:
    """Assert that damage is refused in one line, or accepted as just what would be written.

    Returns how many of the damaged copies were accepted.
    """
    accepted = 0
    for copy in damaged(raw, step):
        refusal = ""
        try:
            value = decode(copy)
        except REFUSALS as error:
            refusal = str(error)
        if refusal:
            assert len(refusal.splitlines()) == 1
        else:
            accepted += 1
            assert joined(encode(value)) == copy
    return accepted


def joined(pieces: bytes | Sequence[Octets]) -> bytes:
    """The bytes of an object that may have been encoded in pieces."""
    return pieces if isinstance(pieces, bytes) else b"".join(pieces)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that `call` held at once; what it raises of ours is dropped."""
    tracemalloc.start()
    try:
        call()
    except REFUSALS:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak
