"""Codecs of chunks (SPEC.md section 5.3): how plain bytes are stored. Checks no digest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from imgfmt.digest import Octets
from imgfmt.errors import CorruptData, Unsupported

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

RAW = 0
ZSTD = 1


def encode_zstd(pieces: Sequence[Octets], level: int = 1) -> bytes:
    """One frame that states its content size, of the concatenation of `pieces`.

    Safe to call from many threads at once; releases the GIL.
    """
    frame = _compressor(level).compressobj(size=sum(len(piece) for piece in pieces))
    encoded = [frame.compress(piece) for piece in pieces]
    encoded.append(frame.flush())
    return b"".join(encoded)


def decode_into(codec: int, stored: Octets, out: memoryview) -> None:
    """Fill `out` exactly with the plain bytes of a chunk.

    Needs at most as much memory again as `out` has, whatever `stored` claims. Raises CorruptData
    if `stored` gives other than `len(out)` bytes; `out` is then undefined. Raises Unsupported for
    an unknown codec. Safe to call from many threads at once; releases the GIL.
    """
    if codec == RAW:
        plain = stored
    elif codec == ZSTD:
        plain = _decompressed(stored, len(out))
    else:
        raise Unsupported(f"codec {codec} is not known; use a newer snapcask")
    if len(plain) != len(out):
        raise CorruptData(f"a chunk holds {len(plain)} bytes, expected {len(out)}")
    np.frombuffer(out, "u1")[:] = np.frombuffer(plain, "u1")  # unlike out[:], without the GIL


def _decompressed(frame: Octets, plain_bytes: int) -> bytes:
    import zstandard  # slow to import, and most stores are raw

    try:
        stated_bytes = zstandard.get_frame_parameters(frame).content_size
        if stated_bytes != plain_bytes:
            raise CorruptData(f"a zstd frame states {stated_bytes} bytes, expected {plain_bytes}")
        return _decompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptData(f"a zstd frame can't be decoded: {error}") from None


class _Contexts(threading.local):
    """Contexts of one thread: they are expensive to make, and must not be shared."""

    def __init__(self) -> None:
        self.compressors: dict[int, ZstdCompressor] = {}
        self.decompressor: ZstdDecompressor | None = None


_contexts = _Contexts()


def _compressor(level: int) -> ZstdCompressor:
    if level not in _contexts.compressors:
        from zstandard import ZstdCompressor

        _contexts.compressors[level] = ZstdCompressor(level=level, write_content_size=True)
    return _contexts.compressors[level]


def _decompressor() -> ZstdDecompressor:
    if _contexts.decompressor is None:
        from zstandard import ZstdDecompressor

        _contexts.decompressor = ZstdDecompressor()
    return _contexts.decompressor
