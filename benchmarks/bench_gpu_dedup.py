"""What is found again among frozen GPU processes: a replica, another order, a fine-tune.

Real processes load synthetic weights to a GPU (by PyTorch where it is installed), are frozen one
after the other by the CUDA driver's checkpoint API, which moves device memory into the memory of
the process, and captured through /proc/PID/mem; no CRIU is needed. The captures are pushed to one
store in this order. New bytes of each stand beside those of fixed sizes and of single pages, the
bound of all that cut at pages. Needs a driver 570 or later, room for the weights in host memory,
and the right to read other processes (root). With `--host-only` weights stay in host memory and
nothing is frozen: the same experiment where there is no GPU. Run: `make bench BENCH=gpu_dedup`.
"""

from __future__ import annotations

import argparse
import mmap
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench_advice import replica
from benchmarks.frame import options_of, reporting
from benchmarks.replica import MB, N_TENSORS, Halves, report_ready, tensor
from benchmarks.report import Report
from imgfmt.errors import ImageError, Unsupported
from restore.capture import capture_process
from restore.driver import DeviceFailed
from transfer.dedup import BOUND, WAYS, Study

GPU_WEIGHTS_MB = 2000
HOST_WEIGHTS_MB = 100
LOCK_TIMEOUT_MS = 60_000
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
LIFE_S = 3600
MODEL_SEED = 11
NEEDLE_BYTES = 64
FIXED = tuple(way for way in WAYS if way.name in ("fixed 64 KiB", "fixed 1 MiB"))


@dataclass(frozen=True, slots=True)
class Server:
    """A process to freeze. `order` is that of loading; of the tensors, some are fine-tuned."""

    name: str
    order: int = 0
    n_changed: int = 0


SERVERS = (
    Server("first"),
    Server("replica"),
    Server("replica, other order", order=1),
    Server(f"fine-tune, {N_TENSORS // 4} of {N_TENSORS} tensors", n_changed=N_TENSORS // 4),
)


# The process that is frozen.


def weights(index: int, server: Server, weights_mb: float) -> Halves:
    """Tensor `index` of what a server has loaded."""
    n_values = max(1, int(weights_mb * MB) // N_TENSORS // np.dtype(np.float16).itemsize)
    return tensor(seeds=[MODEL_SEED, index, int(index < server.n_changed)], n_values=n_values)


def serve(server: Server, weights_mb: float, where: str, ready: Path) -> None:
    """Load the weights, say so, and wait to be killed."""
    order = np.random.default_rng(server.order).permutation(N_TENSORS).tolist()
    held = [LOADERS[where](weights(index, server, weights_mb)) for index in order]
    if where == "torch":
        _use(held[0])
    report_ready(ready)
    threading.Event().wait(LIFE_S)
    del held


def _to_torch(halves: Halves) -> Any:
    import torch

    return torch.from_numpy(halves).to("cuda:0")


def _use(held: Any) -> None:
    """One multiplication, so that the process has what servers have after their first answer."""
    import torch

    side = min(512, int(len(held) ** 0.5))
    square = held[: side * side].view(side, side)
    (square @ square).sum().item()
    torch.cuda.synchronize()


def _to_cuda(halves: Halves) -> int:
    from cuda.bindings import driver as cuda

    from restore.cuda_driver import cuda_driver

    driver = cuda_driver()
    pointer = driver.allocate(0, halves.nbytes)
    driver.activate(0)
    copied = cuda.cuMemcpyHtoD(pointer, halves.ctypes.data, halves.nbytes)
    _must(cuda, copied, "weights can't be copied to the GPU")
    return pointer


LOADERS: Mapping[str, Callable[[Halves], Any]] = {
    "torch": _to_torch,
    "cuda": _to_cuda,
    "host": lambda halves: halves,
}


# The process that freezes it.


def freeze(pid: int, cuda: Any) -> None:
    """Have the driver move the device memory of process `pid` to its host memory.

    `cuda` is `cuda.bindings.driver`. The process then holds no device, until it is restored; after
    an error it runs on. Raises ImageError.
    """
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = LOCK_TIMEOUT_MS
    try:
        _must(cuda, cuda.cuInit(0), "the CUDA driver does not start")
        _must(cuda, cuda.cuCheckpointProcessLock(pid, arguments), f"process {pid} can't be locked")
    except RuntimeError as error:  # the driver has no such function
        raise Unsupported(f"this driver can't freeze processes ({error}); 570 can") from error
    try:
        frozen = cuda.cuCheckpointProcessCheckpoint(pid, None)
        _must(cuda, frozen, f"process {pid} can't be frozen")
    except BaseException:
        cuda.cuCheckpointProcessUnlock(pid, None)
        raise
    state = _must(cuda, cuda.cuCheckpointProcessGetState(pid), f"process {pid} does not answer")
    if state != cuda.CUprocessState.CU_PROCESS_STATE_CHECKPOINTED:
        raise DeviceFailed(f"process {pid} is not frozen but in state {state!r}")


def _must(cuda: Any, result: tuple[Any, ...], what: str) -> Any:
    """The value of a call of the driver, if it has one. Raises ImageError."""
    code, *values = result
    if int(code):
        name = cuda.cuGetErrorName(code)[1] or b"error"
        kind = Unsupported if int(code) == NOT_SUPPORTED else DeviceFailed
        raise kind(f"{what}: {name.decode()} ({int(code)})")
    return values[0] if values else None


@dataclass(frozen=True, slots=True)
class Frozen:
    """A capture on disk, and the seconds until the process was frozen, and then captured."""

    folder: Path
    freeze_s: float
    capture_s: float


def capture(server: Server, folder: Path, weights_mb: float, where: str) -> Frozen:
    """Start a server, freeze it once it is ready, capture it, end it."""
    name = f"server-{SERVERS.index(server)}"
    ready, target = folder / f"{name}.ready", folder / name
    command = [sys.executable, __file__, "--serve", str(SERVERS.index(server)), "--where", where]
    command += ["--weights-mb", str(weights_mb), "--ready-file", str(ready)]
    with replica(command, ready, hash_seed=False) as pid:
        begun_s = time.perf_counter()
        if where != "host":
            from cuda.bindings import driver

            freeze(pid, driver)
        frozen_s = time.perf_counter()
        capture_process(pid, target, shared=True)
        captured_s = time.perf_counter()
    return Frozen(target, frozen_s - begun_s, captured_s - frozen_s)


def holds(folder: Path, halves: Halves) -> bool:
    """Whether a capture has a piece from the middle of these weights."""
    middle = len(halves) // 2
    needle = halves[middle : middle + NEEDLE_BYTES // halves.itemsize].tobytes()
    for path in sorted(folder.glob("pages-*.img")):
        if path.stat().st_size:
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
            ):
                if pages.find(needle) >= 0:
                    return True
    return False


def measure(
    servers: Sequence[Server], folder: Path, weights_mb: float, where: str, report: Report
) -> list[dict[str, float]]:
    """Add what each server adds to one store, in order; returns the figures.

    Raises RuntimeError where a capture has not the weights: it would show nothing.
    """
    import snapcask

    store, study = folder / "store", Study([*FIXED, BOUND])
    snapcask.init_store(store)
    figures = []
    for number, server in enumerate(servers):
        frozen = capture(server, folder, weights_mb, where)
        if not holds(frozen.folder, weights(N_TENSORS - 1, server, weights_mb)):
            raise RuntimeError(
                f"{server.name}: what was captured has not the weights; where does the driver keep"
                " them? /proc/PID/maps of a frozen process tells"
            )
        pushed = snapcask.push(frozen.folder, f"gpu/dedup:{number}", store=store)
        others = study.add(frozen.folder).by_way
        found = {
            "captured_mb": pushed.logical_bytes / 1e6,
            "zero_mb": pushed.zero_bytes / 1e6,
            "new_mb": pushed.counts.new_bytes / 1e6,
            **{f"{_column(way.name)}_mb": others[way.name].new_bytes / 1e6 for way in study.ways},
            "freeze_s": frozen.freeze_s,
            "capture_s": frozen.capture_s,
        }
        report.add(server.name, **found)
        figures.append(found)
        shutil.rmtree(frozen.folder)
    return figures


def _column(way: str) -> str:
    return "bound" if way == BOUND.name else way.replace(" ", "_").lower()


def device_facts() -> str:
    """The GPU and the release of its driver's API. Raises Unsupported where there is none."""
    from restore.cuda_driver import cuda_driver, cuda_is_installed

    if not cuda_is_installed():
        raise Unsupported("cuda-python is needed: install snapcask[gpu]")
    from cuda.bindings import driver as cuda

    driver = cuda_driver()
    if not driver.device_count():
        raise Unsupported("this machine shows no GPU")
    _, version = cuda.cuDriverGetVersion()
    return f"{driver.describe(0).name}, driver's CUDA {version // 1000}.{version % 1000 // 10}"


def framework_of(wanted: str) -> str:
    """What loads the weights: `torch` if it is there and has CUDA, else `cuda`."""
    if wanted != "auto":
        return wanted
    if not find_spec("torch"):
        return "cuda"
    import torch

    return "torch" if torch.version.cuda else "cuda"


def parser() -> argparse.ArgumentParser:
    """The options; those without help are for the processes that are frozen."""
    made = options_of(__doc__)
    made.add_argument(
        "--weights-mb", type=float, default=None,
        help=f"of a server, 10^6 bytes ({GPU_WEIGHTS_MB}; {HOST_WEIGHTS_MB} with --host-only)",
    )  # fmt: skip
    made.add_argument("--host-only", action="store_true", help="weights in host memory, no freeze")
    made.add_argument(
        "--framework", choices=("auto", "torch", "cuda"), default="auto", help="what loads weights"
    )
    made.add_argument("--serve", type=int, default=None, help=argparse.SUPPRESS)
    made.add_argument("--where", default="host", help=argparse.SUPPRESS)
    made.add_argument("--ready-file", type=Path, default=None, help=argparse.SUPPRESS)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report; or be one of the processes that are measured."""
    options = parser().parse_args(arguments)
    host_only = options.host_only
    weights_mb = options.weights_mb or (HOST_WEIGHTS_MB if host_only else GPU_WEIGHTS_MB)
    if options.serve is not None:
        serve(SERVERS[options.serve], weights_mb, options.where, options.ready_file)
        return
    try:
        where = "host" if host_only else framework_of(options.framework)
        facts = "host memory, nothing is frozen" if host_only else device_facts()
        with reporting("bench_gpu_dedup", options.folder) as (folder, report):
            measure(SERVERS, folder, weights_mb, where, report)
            report.add("weights", weights_mb=weights_mb, note=f"{where}: {facts}")
    except ImageError as error:
        raise SystemExit(f"bench_gpu_dedup: {error}; --host-only needs no GPU") from error


if __name__ == "__main__":
    main()
