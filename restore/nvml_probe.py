"""Asks NVML what GPUs this machine has, and prints it as JSON: a script, to be run and to end.

NVML opens the devices. A process that must hold none of them open runs this one instead of loading
NVML itself. Whatever goes wrong is printed as {"error": ...}; needs nothing of snapcask.
"""

from __future__ import annotations

import json
from typing import Any

MAX_GPUS = 1024


def probe() -> dict[str, Any]:
    """What NVML tells, by plain names. Raises whatever NVML raises."""
    import pynvml as nvml

    nvml.nvmlInit()
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        found: dict[str, Any] = {
            "driver_version": _text(nvml.nvmlSystemGetDriverVersion()),
            "cuda_version": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "devices": [],
        }
        for number in range(min(int(nvml.nvmlDeviceGetCount()), MAX_GPUS)):
            try:
                gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            except nvml.NVMLError:
                continue  # not for this process
            found["devices"] += _devices(nvml, gpu)
        return found
    finally:
        nvml.nvmlShutdown()


def _devices(nvml: Any, gpu: Any) -> list[dict[str, Any]]:
    """What programs can use of one GPU: itself, or its MIG devices."""
    capability = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(gpu)))
    product = _text(nvml.nvmlDeviceGetName(gpu))
    parts = _mig_devices(nvml, gpu)
    return [
        {
            "product": product,
            "compute_capability": capability,
            "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(device).total),
            "mig_profile": "" if parts is None else _profile(_text(nvml.nvmlDeviceGetName(device))),
        }
        for device in ([gpu] if parts is None else parts)
    ]


def _mig_devices(nvml: Any, gpu: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None if it is not divided."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError:
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for number in range(int(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu))):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
        except nvml.NVMLError:
            continue
    return found


def _profile(name: str) -> str:
    """`1g.10gb` of `NVIDIA H100 80GB HBM3 MIG 1g.10gb`."""
    return name.partition(" MIG ")[2].strip()


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def main() -> None:
    """Print what is found, or why nothing is."""
    try:
        found = probe()
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
