"""Facts of this machine's GPUs: from /proc/driver/nvidia, which opens no device, or from NVML.

NVML runs in a child process that ends, so that nobody keeps a device open. Both say nothing, and
raise nothing, where there is no GPU, no driver or no permission.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from imgfmt.facts import joined
from restore import nvml_probe

PROBE_TIMEOUT_S = 30.0
"""Without the persistence daemon the driver first starts each GPU, which takes seconds."""

_MAX_OUTPUT_BYTES = 1 << 20
_MAX_FILE_BYTES = 64 << 10
_DRIVER = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+([0-9]{1,9}(?:\.[0-9]{1,9})+)")
_MODEL = re.compile(r"^Model:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_NAMED = re.compile(r"[^\x00-\x1f,]{1,200}")

_log = logging.getLogger(__name__)


def has_driver(root: Path) -> bool:
    """Whether NVIDIA's driver is loaded, or Windows' in its place."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/dxg").exists()


def proc_facts(root: Path) -> dict[str, str]:
    """What /proc tells. Of GPUs that are divided (MIG) only NVML tells how many there are."""
    folder = root / "proc/driver/nvidia"
    facts = {}
    if found := _DRIVER.search(_text(folder / "version")):
        facts["gpu.driver_version"] = found[1]
    try:
        gpus = sorted((folder / "gpus").iterdir())
        divided = any((folder / "capabilities").glob("gpu*/mig/gi*"))
    except OSError:
        return facts
    if divided:
        return facts
    facts["gpu.count"] = str(len(gpus))
    models = [_MODEL.search(_text(gpu / "information")) for gpu in gpus]
    products = [model[1] for model in models if model is not None and _NAMED.fullmatch(model[1])]
    if len(products) == len(gpus) and "Unknown" not in products:
        facts["gpu.products"] = joined(products)
    return facts


def nvml_facts(
    *, python: str = sys.executable, env: Mapping[str, str] | None = None,
    timeout_s: float = PROBE_TIMEOUT_S,
) -> dict[str, str]:  # fmt: skip
    """What NVML tells a child process; nothing if that fails, hangs or makes no sense. Blocks."""
    try:
        # -P: names in this package's folder must not stand in for modules of the library.
        done = subprocess.run(
            [python, "-P", nvml_probe.__file__],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.debug("the GPUs are not known: %s", error)
        return {}
    try:
        return _facts_of(json.loads(done.stdout[:_MAX_OUTPUT_BYTES]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        _log.debug("the GPUs are not known: exit code %d, %r", done.returncode, error)
        return {}


def _facts_of(found: Any) -> dict[str, str]:
    """Facts of what the probe printed. Raises ValueError, TypeError, KeyError for anything else."""
    if "error" in found:
        raise ValueError(found["error"])
    devices: Sequence[Any] = found["devices"]
    facts = {
        "gpu.driver_version": _name(found["driver_version"]),
        "gpu.cuda_version": _name(found["cuda_version"]),
        "gpu.count": str(len(devices)),
        "gpu.products": joined(_name(device["product"]) for device in devices),
        "gpu.mig_profiles": joined(
            _name(device["mig_profile"]) for device in devices if device["mig_profile"]
        ),
    }
    if devices:
        facts["gpu.compute_capability"] = joined(
            {_name(device["compute_capability"]) for device in devices}
        )
        smallest_bytes = min(int(device["memory_bytes"]) for device in devices)
        facts["gpu.memory_gib"] = str(round(smallest_bytes / (1 << 30)))
    return facts


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAMED.fullmatch(value):
        raise ValueError(f"{value!r} is no name")
    return value


def _text(path: Path) -> str:
    """The beginning of a small file; nothing if it can't be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""
