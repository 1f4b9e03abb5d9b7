"""Folders that look like /proc, /sys and /usr of other machines, and a pynvml of other GPUs."""

from __future__ import annotations

import os
from pathlib import Path

FLAGS = "fpu vme sse sse2 ssse3 sse4_1 sse4_2 avx avx2 hle rtm avx512f"

_NVML = """
import json, os, pathlib, time
NVML_DEVICE_MIG_ENABLE = 1
GPUS = json.loads({gpus!r})
HERE = pathlib.Path(__file__).parent

class NVMLError(Exception):
    pass

class _Memory:
    def __init__(self, total):
        self.total = total

def nvmlInit():
    with open(HERE / "begun", "a") as file:
        file.write("x")
    {init}

def nvmlShutdown():
    (HERE / "ended").touch()

def nvmlSystemGetDriverVersion():
    return {driver!r}

def nvmlSystemGetCudaDriverVersion():
    return 13000

def nvmlDeviceGetCount():
    return len(GPUS)

def nvmlDeviceGetHandleByIndex(number):
    if GPUS[number].get("denied"):
        raise NVMLError("no permission")
    return GPUS[number]

def nvmlDeviceGetName(gpu):
    return gpu["name"].encode() if gpu.get("bytes") else gpu["name"]

def nvmlDeviceGetMemoryInfo(gpu):
    return _Memory(gpu["memory_bytes"])

def nvmlDeviceGetCudaComputeCapability(gpu):
    return tuple(gpu["capability"])

def nvmlDeviceGetMigMode(gpu):
    if "mig" not in gpu:
        raise NVMLError("not supported")
    return (1 if gpu["mig"] is not None else 0), 0

def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7

def nvmlDeviceGetMigDeviceHandleByIndex(gpu, number):
    if number >= len(gpu["mig"]):
        raise NVMLError("not found")
    return gpu["mig"][number]
"""


def write(root: Path, files: dict[str, str]) -> Path:
    """These files below `root`, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def gpu_root(root: Path, products: list[str], driver: str = "580.65.06") -> Path:
    """A /proc of NVIDIA's driver with one GPU for each product."""
    banner = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sun Jul 27 07:00:00 UTC\n"
    write(root, {"proc/driver/nvidia/version": f"{banner}GCC version:  gcc version 13.3.0\n"})
    (root / "proc/driver/nvidia/gpus").mkdir(exist_ok=True)
    for number, product in enumerate(products):
        text = f"Model: \t\t {product}\nIRQ:   \t\t 25\nGPU UUID: \t GPU-{number}\n"
        write(root, {f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information": text})
    return root


def fake_nvml(
    folder: Path, gpus: str, *, init: str = "pass", driver: str = "580.65.06"
) -> dict[str, str]:
    """The environment of a child process whose pynvml, in `folder`, knows these GPUs (JSON).

    `init` is run by nvmlInit.
    """
    write(folder, {"pynvml.py": _NVML.format(gpus=gpus, init=init, driver=driver)})
    return {**os.environ, "PYTHONPATH": str(folder)}
