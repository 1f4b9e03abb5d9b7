"""Facts of a machine with a real GPU, and that nobody keeps it open for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import snapcask
from imgfmt.compat import Verdict
from restore.gpu_facts import nvml_facts, proc_facts
from restore.host_facts import MachineFacts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not os.path.exists("/proc/driver/nvidia/version"), reason="there is no NVIDIA driver here"
    ),
]


def open_devices() -> list[str]:
    """Device files of GPUs that this process has open."""
    folder = Path("/proc/self/fd")
    links = [os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).exists()]
    return [link for link in links if link.startswith("/dev/nvidia")]


def test_nvml_and_proc_agree_and_no_device_stays_open() -> None:
    pytest.importorskip("pynvml")
    before = open_devices()
    by_nvml, by_proc = nvml_facts(), proc_facts(Path("/"))
    assert by_nvml["gpu.driver_version"] == by_proc.get("gpu.driver_version")
    assert int(by_nvml["gpu.count"]) >= 1
    assert by_nvml["gpu.compute_capability"]
    assert open_devices() == before


def test_a_machine_that_is_recorded_fits_itself(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    store = tmp_path / "store"
    snapcask.init_store(store)
    snapcask.push(tmp_path / "d", "a:1", store=store, record_host=True)
    report = snapcask.check("a:1", store=store)
    assert "gpu.driver_version" in {check.rule for check in report.checks}
    assert {check.verdict for check in report.checks} == {Verdict.FITS}
    newer = {**MachineFacts().recordable(), "gpu.driver_version": "1.0"}
    assert not snapcask.check("a:1", store=store, facts=newer).fits
