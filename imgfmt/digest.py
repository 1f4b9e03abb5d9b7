"""Digests: BLAKE3-256, raw and as `blake3:<hex>`. The only module that knows the algorithm."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from imgfmt.errors import InvalidInput

DIGEST_BYTES = 32
PREFIX = "blake3:"
_HEX = re.compile(r"[0-9a-f]{64}")

Octets = bytes | bytearray | memoryview
"""Anything that holds bytes and is not copied to be read."""


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """The BLAKE3-256 of some bytes. `raw` has 32 bytes."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != DIGEST_BYTES:
            raise InvalidInput(f"a digest has {DIGEST_BYTES} bytes, this one has {len(self.raw)}")

    def __str__(self) -> str:
        return PREFIX + self.raw.hex()

    @property
    def hex(self) -> str:
        """64 lower-case hexadecimal digits, without the algorithm's name."""
        return self.raw.hex()

    @property
    def short(self) -> str:
        """The algorithm's name and 12 digits, for messages."""
        return PREFIX + self.raw.hex()[:12]

    @classmethod
    def parse(cls, text: str) -> Digest:
        """Read `blake3:<64 hex digits>`. Raises InvalidInput for anything else."""
        digits = text.removeprefix(PREFIX)
        if digits == text or not _HEX.fullmatch(digits):
            raise InvalidInput(f"{text!r} is not a digest: expected {PREFIX}<64 hex digits>")
        return cls(bytes.fromhex(digits))


def digest_of(*pieces: Octets) -> Digest:
    """Digest of the concatenation of `pieces`, which are not copied. Releases the GIL."""
    return Digest(raw_digest(pieces))


def raw_digest(pieces: Iterable[Octets]) -> bytes:
    """As `digest_of`, but the 32 raw bytes, for loops over many chunks."""
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()
