"""Codecs: what is encoded is decoded, and nothing else fills a buffer or takes memory."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.codec import RAW, ZSTD, decode_into, encode_zstd
from imgfmt.errors import CorruptData, Unsupported
from tests.imgfmt.hostile import damaged, peak_bytes

PLAIN = b"a page of zeros and so on " * 40


def decoded(codec: int, stored: bytes, plain_bytes: int) -> bytes:
    out = bytearray(plain_bytes)
    decode_into(codec, stored, memoryview(out))
    return bytes(out)


@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from([1, 3, 19]))
def test_what_is_encoded_in_pieces_is_decoded_whole(pieces: list[bytes], level: int) -> None:
    frame = encode_zstd([memoryview(piece) for piece in pieces], level)
    plain = b"".join(pieces)
    assert zstandard.get_frame_parameters(frame).content_size == len(plain)
    assert decoded(ZSTD, frame, len(plain)) == plain


def test_raw_bytes_are_copied() -> None:
    assert decoded(RAW, PLAIN, len(PLAIN)) == PLAIN
    assert decoded(RAW, b"", 0) == b""


@pytest.mark.parametrize("codec", [RAW, ZSTD])
@pytest.mark.parametrize("difference", [-1, 1])
def test_other_than_the_expected_length_is_corrupt(codec: int, difference: int) -> None:
    stored = PLAIN if codec == RAW else encode_zstd([PLAIN])
    with pytest.raises(CorruptData, match=f"expected {len(PLAIN) + difference}"):
        decoded(codec, stored, len(PLAIN) + difference)


def test_an_unknown_codec_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="codec 2 is not known"):
        decoded(2, PLAIN, len(PLAIN))


def test_damage_to_a_frame_is_corrupt_or_fills_the_buffer() -> None:
    for copy in damaged(encode_zstd([PLAIN])):
        try:
            decoded(ZSTD, copy, len(PLAIN))
        except CorruptData:
            continue


def test_a_frame_that_is_cut_short_is_corrupt() -> None:
    frame = encode_zstd([PLAIN])
    for end in range(len(frame)):
        with pytest.raises(CorruptData):
            decoded(ZSTD, frame[:end], len(PLAIN))


def test_bytes_after_the_frame_are_corrupt() -> None:
    frame = encode_zstd([PLAIN])
    for extra in (b"\0", frame, b"\x50\x2a\x4d\x18\x01\0\0\0x"):
        with pytest.raises(CorruptData):
            decoded(ZSTD, frame + extra, len(PLAIN))


def test_a_frame_that_does_not_state_its_size_is_corrupt() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(PLAIN)
    with pytest.raises(CorruptData):
        decoded(ZSTD, frame, len(PLAIN))


def test_a_frame_that_states_a_huge_size_costs_no_memory() -> None:
    bomb = encode_zstd([bytes(64 << 20)])
    with pytest.raises(CorruptData, match="states 67108864 bytes, expected 4096"):
        decoded(ZSTD, bomb, 4096)
    assert peak_bytes(lambda: decoded(ZSTD, bomb, 4096)) < 1 << 20


def test_a_frame_that_holds_more_than_it_states_is_corrupt() -> None:
    bomb = bytearray(encode_zstd([bytes(64 << 20)]))
    place = bomb.index((64 << 20).to_bytes(4, "little"))
    bomb[place : place + 4] = (1 << 20).to_bytes(4, "little")
    with pytest.raises(CorruptData):
        decoded(ZSTD, bytes(bomb), 1 << 20)
    assert peak_bytes(lambda: decoded(ZSTD, bytes(bomb), 1 << 20)) < 4 << 20


def test_many_threads_encode_and_decode_at_once() -> None:
    rng = np.random.default_rng(1)
    plains = [rng.integers(0, 4, 50_000 + n, "u1").tobytes() for n in range(40)]

    def there_and_back(plain: bytes) -> bool:
        return decoded(ZSTD, encode_zstd([plain[:1000], plain[1000:]]), len(plain)) == plain

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, plains * 5))


def test_raw_chunks_do_not_import_the_library() -> None:
    code = (
        "import sys, imgfmt.codec as c;"
        "c.decode_into(c.RAW, b'a', memoryview(bytearray(1)));"
        "sys.exit('zstandard' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
