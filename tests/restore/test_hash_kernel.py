"""The hash kernel's source gives BLAKE3 digests: compiled here for the CPU, a thread a thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from restore.cuda_hasher import PIECE_LIMIT_BYTES, SOURCE, THREADS
from restore.driver import CHECK_ROW, NO_MISMATCH

SHIM = r"""
#include <atomic>
#include <barrier>
#include <thread>
#include <vector>
#include <algorithm>
using std::min;
struct uint4 { unsigned x, y, z, w; };
struct Dim { unsigned x; };
static Dim blockIdx, blockDim = {THREADS};
static thread_local Dim threadIdx;
static std::barrier<> all(THREADS);
static void __syncthreads() { all.arrive_and_wait(); }
static unsigned __funnelshift_r(unsigned low, unsigned high, unsigned c) {
    return (low >> c) | (high << (32 - c));
}
static void atomicMin(unsigned *where, unsigned value) { if (value < *where) *where = value; }
#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(n)
"""

ENTRY = r"""
extern "C" void run(const unsigned char *staged, const Row *rows, u32 n, u32 first, u32 *status) {
    for (blockIdx.x = 0; blockIdx.x < n; blockIdx.x++) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < THREADS; t++)
            threads.emplace_back([=] { threadIdx.x = t; check(staged, rows, first, status); });
        for (auto &thread : threads) thread.join();
    }
}
"""


def compiled_for_the_cpu(folder: Path) -> Path:
    """A library with the kernel, which `run` runs for some rows. Skips the test without g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(SHIM + SOURCE + ENTRY)
    flags = ["-std=c++20", "-O1", "-pthread", "-w", "-shared", "-fPIC", f"-DTHREADS={THREADS}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled_for_the_cpu(tmp_path_factory.mktemp("kernel"))))


def worst(kernel: ctypes.CDLL, pieces: list[bytes], digests: list[bytes], first: int) -> int:
    """What the kernel makes of the status word."""
    rows = np.zeros(len(pieces), CHECK_ROW)
    staged = bytearray()
    for index, (piece, digest) in enumerate(zip(pieces, digests, strict=True)):
        rows[index] = (len(staged), len(piece), np.frombuffer(digest, np.uint8))
        staged += piece + b"\xdb" * (-len(piece) % 16)
    buffer = np.frombuffer(bytes(staged) + bytes(64), np.uint8)
    status = ctypes.c_uint32(NO_MISMATCH)
    kernel.run(
        ctypes.c_void_p(buffer.ctypes.data),
        ctypes.c_void_p(rows.ctypes.data),
        ctypes.c_uint32(len(pieces)),
        ctypes.c_uint32(first),
        ctypes.byref(status),
    )
    return status.value


SIZES = [0, 1, 3, 63, 64, 65, 127, 128, 1023, 1024, 1025, 2048, 2049, 3072, 5 * 1024 + 7]
SIZES += [31 * 1024, 255 * 1024, 256 * 1024, 257 * 1024 + 1, PIECE_LIMIT_BYTES - 1]
SIZES += [PIECE_LIMIT_BYTES]


def test_every_length_has_its_digest(kernel: ctypes.CDLL) -> None:
    noise = np.random.default_rng(1)
    pieces = [noise.bytes(size) for size in SIZES]
    assert worst(kernel, pieces, [blake3(p).digest() for p in pieces], 0) == NO_MISMATCH


def test_the_first_piece_that_differs_is_told(kernel: ctypes.CDLL) -> None:
    noise = np.random.default_rng(2)
    pieces = [noise.bytes(size) for size in (4096, 5000, 64 * 1024, 9)]
    digests = [blake3(piece).digest() for piece in pieces]
    changed = [pieces[0], pieces[1], pieces[2][:-1] + b"!", b"x" * 9]
    assert worst(kernel, changed, digests, 100) == 102
    for byte in range(0, 32, 5):
        wrong = bytearray(digests[0])
        wrong[byte] ^= 1
        assert worst(kernel, pieces[:1], [bytes(wrong)], 7) == 7
