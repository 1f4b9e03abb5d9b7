"""BLAKE3 on a GPU: one thread block hashes one piece and compares it with its digest.

The kernel is compiled for the device by NVRTC when it is first wanted. Pieces are at most 1 MiB,
which is what a chunk may be.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from imgfmt.digest import digest_of
from restore.driver import DeviceFailed, Driver, Stream
from restore.hash_trial import proven_rate

try:
    from cuda.bindings import driver as cuda
    from cuda.bindings import nvrtc
except ImportError:
    cuda = nvrtc = None

PIECE_LIMIT_BYTES = 1 << 20
"""The longest piece that the kernel takes: 1024 leaves, whose values fit into shared memory."""

THREADS = 256

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

struct Row { u32 offset; u32 n_bytes; u32 digest[8]; };

#define LEAF_BYTES 1024u
#define MAX_LEAVES 1024u
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

__device__ __forceinline__ u32 rotr(u32 w, u32 c) { return __funnelshift_r(w, w, c); }

#define G(a, b, c, d, x, y) \
    a = a + b + x; d = rotr(d ^ a, 16); c = c + d; b = rotr(b ^ c, 12); \
    a = a + b + y; d = rotr(d ^ a, 8);  c = c + d; b = rotr(b ^ c, 7);

#define ROUND(m0,m1,m2,m3,m4,m5,m6,m7,m8,m9,m10,m11,m12,m13,m14,m15) \
    G(v0, v4, v8,  v12, m0, m1)  G(v1, v5, v9,  v13, m2, m3) \
    G(v2, v6, v10, v14, m4, m5)  G(v3, v7, v11, v15, m6, m7) \
    G(v0, v5, v10, v15, m8, m9)  G(v1, v6, v11, v12, m10, m11) \
    G(v2, v7, v8,  v13, m12, m13) G(v3, v4, v9, v14, m14, m15)

/* cv becomes the chaining value of the block m. */
__device__ __forceinline__ void compress(u32 cv[8], const u32 m[16], u32 counter, u32 len,
                                         u32 flags) {
    u32 v0 = cv[0], v1 = cv[1], v2 = cv[2], v3 = cv[3];
    u32 v4 = cv[4], v5 = cv[5], v6 = cv[6], v7 = cv[7];
    u32 v8 = 0x6A09E667u, v9 = 0xBB67AE85u, v10 = 0x3C6EF372u, v11 = 0xA54FF53Au;
    u32 v12 = counter, v13 = 0, v14 = len, v15 = flags;
    ROUND(m[0],m[1],m[2],m[3],m[4],m[5],m[6],m[7],m[8],m[9],m[10],m[11],m[12],m[13],m[14],m[15])
    ROUND(m[2],m[6],m[3],m[10],m[7],m[0],m[4],m[13],m[1],m[11],m[12],m[5],m[9],m[14],m[15],m[8])
    ROUND(m[3],m[4],m[10],m[12],m[13],m[2],m[7],m[14],m[6],m[5],m[9],m[0],m[11],m[15],m[8],m[1])
    ROUND(m[10],m[7],m[12],m[9],m[14],m[3],m[13],m[15],m[4],m[0],m[11],m[2],m[5],m[8],m[1],m[6])
    ROUND(m[12],m[13],m[9],m[11],m[15],m[10],m[14],m[8],m[7],m[2],m[5],m[3],m[0],m[1],m[6],m[4])
    ROUND(m[9],m[14],m[11],m[5],m[8],m[12],m[15],m[1],m[13],m[3],m[0],m[10],m[2],m[6],m[4],m[7])
    ROUND(m[11],m[15],m[5],m[0],m[1],m[9],m[8],m[6],m[14],m[10],m[2],m[12],m[3],m[4],m[7],m[13])
    cv[0] = v0 ^ v8;  cv[1] = v1 ^ v9;  cv[2] = v2 ^ v10; cv[3] = v3 ^ v11;
    cv[4] = v4 ^ v12; cv[5] = v5 ^ v13; cv[6] = v6 ^ v14; cv[7] = v7 ^ v15;
}

__device__ __forceinline__ void start(u32 cv[8]) {
    cv[0] = 0x6A09E667u; cv[1] = 0xBB67AE85u; cv[2] = 0x3C6EF372u; cv[3] = 0xA54FF53Au;
    cv[4] = 0x510E527Fu; cv[5] = 0x9B05688Cu; cv[6] = 0x1F83D9ABu; cv[7] = 0x5BE0CD19u;
}

/* 64 bytes at p, which is aligned to 16; behind the first `len` bytes, zeros. */
__device__ __forceinline__ void block(u32 m[16], const unsigned char *p, u32 len) {
    if (len == 64) {
        const uint4 *q = (const uint4 *)p;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 w = q[i];
            m[4 * i] = w.x; m[4 * i + 1] = w.y; m[4 * i + 2] = w.z; m[4 * i + 3] = w.w;
        }
        return;
    }
    #pragma unroll
    for (int i = 0; i < 16; i++) {
        u32 w = 0;
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (4 * i + j < len) w |= (u32)p[4 * i + j] << (8 * j);
        m[i] = w;
    }
}

__device__ void leaf(u32 cv[8], const unsigned char *p, u32 number, u32 n_bytes, u32 root) {
    u32 m[16];
    start(cv);
    u32 flags = CHUNK_START, at = 0;
    while (n_bytes - at > 64) {
        block(m, p + at, 64);
        compress(cv, m, number, 64, flags);
        flags = 0;
        at += 64;
    }
    block(m, p + at, n_bytes - at);
    compress(cv, m, number, n_bytes - at, flags | CHUNK_END | root);
}

extern "C" __global__ void __launch_bounds__(256)
check(const unsigned char *staged, const Row *rows, u32 first, u32 *status) {
    __shared__ u32 values[MAX_LEAVES * 8];
    const Row *row = rows + blockIdx.x;
    const unsigned char *p = staged + row->offset;
    u32 n_bytes = row->n_bytes;
    u32 n = n_bytes ? (n_bytes + LEAF_BYTES - 1) / LEAF_BYTES : 1;
    u32 cv[8], m[16];
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        u32 begin = i * LEAF_BYTES;
        leaf(cv, p + begin, i, min(n_bytes - begin, LEAF_BYTES), n == 1 ? ROOT : 0);
        #pragma unroll
        for (int k = 0; k < 8; k++) values[i * 8 + k] = cv[k];
    }
    __syncthreads();
    /* Each level joins neighbours; one that is left over goes up as it is. */
    while (n > 1) {
        u32 pairs = n / 2, above = pairs + (n & 1);
        u32 root = n == 2 ? ROOT : 0;
        u32 mine[2][8];
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 i = threadIdx.x + r * blockDim.x;
            if (i < pairs) {
                #pragma unroll
                for (int k = 0; k < 16; k++) m[k] = values[i * 16 + k];
                start(cv);
                compress(cv, m, 0, 64, PARENT | root);
                #pragma unroll
                for (int k = 0; k < 8; k++) mine[r][k] = cv[k];
            } else if (i == pairs && (n & 1)) {
                #pragma unroll
                for (int k = 0; k < 8; k++) mine[r][k] = values[i * 16 + k];
            }
        }
        __syncthreads();
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 i = threadIdx.x + r * blockDim.x;
            if (i < above) {
                #pragma unroll
                for (int k = 0; k < 8; k++) values[i * 8 + k] = mine[r][k];
            }
        }
        __syncthreads();
        n = above;
    }
    if (threadIdx.x == 0) {
        u32 differs = 0;
        for (int k = 0; k < 8; k++) differs |= values[k] ^ row->digest[k];
        if (differs) atomicMin(status, first + blockIdx.x);
    }
}
"""


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("staged", ctypes.c_uint64),
        ("rows", ctypes.c_uint64),
        ("first", ctypes.c_uint32),
        ("status", ctypes.c_uint64),
    ]


class CudaHasher:
    """See `restore.driver.Hasher`."""

    def __init__(self, module: Any, function: Any) -> None:
        self._module = module  # holds the function
        self._function = function
        self._mine = threading.local()
        self.bytes_per_s = 0.0

    def check(
        self, stream: Stream, staged: int, rows: int, n_rows: int, first: int, status: int
    ) -> None:
        """See `Hasher.check`."""
        if not n_rows:
            return
        mine = self._mine
        if not hasattr(mine, "address"):
            mine.values = _Arguments()
            base = ctypes.addressof(mine.values)
            places = [
                base + getattr(_Arguments, name).offset
                for name in ("staged", "rows", "first", "status")
            ]
            mine.places = (ctypes.c_void_p * len(places))(*places)
            mine.address = ctypes.addressof(mine.places)
        values = mine.values  # copied by the call
        values.staged, values.rows, values.first, values.status = staged, rows, first, status
        (code,) = cuda.cuLaunchKernel(
            self._function, n_rows, 1, 1, THREADS, 1, 1, 0, stream, mine.address, 0
        )
        if code:
            raise DeviceFailed(f"the hash kernel can't be launched: {cuda.CUresult(code).name}")


def load(driver: Driver, device: int, handle: Any) -> CudaHasher:
    """A hasher that works. The device's context is current. Raises DeviceFailed, RuntimeError.

    What was compiled before is taken from the user's cache, if it still tells right from wrong.
    """
    architecture = _architecture(handle)
    cached = _cache_path(architecture)
    image = _read(cached)
    if image is not None:
        with suppress(DeviceFailed):
            return _tried(driver, device, image)
    image = _compiled(architecture)
    hasher = _tried(driver, device, image)
    _keep(cached, image)
    return hasher


def _tried(driver: Driver, device: int, image: bytes) -> CudaHasher:
    code, module = cuda.cuModuleLoadData(image)
    if code:
        raise DeviceFailed(f"the hash kernel can't be loaded: {cuda.CUresult(code).name}")
    code, function = cuda.cuModuleGetFunction(module, b"check")
    if code:
        raise DeviceFailed(f"the hash kernel is not in its module: {cuda.CUresult(code).name}")
    hasher = CudaHasher(module, function)
    hasher.bytes_per_s = proven_rate(driver, device, hasher)
    if not hasher.bytes_per_s:
        raise DeviceFailed("the hash kernel gives wrong digests here")
    return hasher


def _cache_path(architecture: str) -> Path:
    """Where the compiled kernel is kept: it depends on the source and the architecture only."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = digest_of(SOURCE.encode(), architecture.encode()).hex[:32]
    return Path(home) / "snapcask" / f"{name}.cubin"


def _read(path: Path) -> bytes | None:
    """A file of this user that nobody else may write, or None."""
    try:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _keep(path: Path, image: bytes) -> None:
    """Write the file whole, or not at all: it is a convenience."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_bytes(image)
        temporary.chmod(0o600)
        temporary.rename(path)


def _architecture(device: Any) -> str:
    attributes = cuda.CUdevice_attribute
    found = []
    for name in ("MAJOR", "MINOR"):
        wanted = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{name}")
        code, value = cuda.cuDeviceGetAttribute(wanted, device)
        if code:
            raise DeviceFailed(f"a GPU's architecture is not known: {cuda.CUresult(code).name}")
        found.append(value)
    return f"sm_{found[0]}{found[1]}"


def _compiled(architecture: str) -> bytes:
    program = _call(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"snapcask.cu", 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if code:
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize(program)))
        nvrtc.nvrtcGetProgramLog(program, log)
        said = " ".join(log.split(b"\0")[0].decode(errors="replace").split())[:500]
        raise DeviceFailed(f"NVRTC does not compile for {architecture}: {said}")
    image = bytes(_call(nvrtc.nvrtcGetCUBINSize(program)))
    _call(nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image


def _call(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise DeviceFailed(f"NVRTC failed: {nvrtc.nvrtcResult(result[0]).name}")
    return result[1] if len(result) == 2 else None
