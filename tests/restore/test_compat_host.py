"""Facts of this machine: from files of other machines, and from NVML in a real child process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from restore import gpu_facts, nvml_probe
from restore.gpu_facts import nvml_facts, proc_facts
from restore.host_facts import MachineFacts
from tests.restore.machines import FLAGS, fake_nvml, gpu_root, write

GIB = 1 << 30
H200 = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "capability": [9, 0]}
B200 = {"name": "NVIDIA B200", "memory_bytes": 192_265_846_784, "capability": [10, 0]}
KINDS: dict[str, list[dict[str, Any]]] = {
    "one": [{**H200, "mig": None}],
    "two kinds": [B200, {**H200, "bytes": True}],
    "not mine": [{**H200, "denied": True}, H200],
    "divided": [
        {
            **H200,
            "mig": [
                {"name": "NVIDIA H200 MIG 1g.18gb", "memory_bytes": 16 * GIB},
                {"name": "NVIDIA H200 MIG 2g.35gb", "memory_bytes": 32 * GIB},
            ],
        },
        {**H200, "mig": None},
    ],
    "none": [],
}


def never() -> dict[str, str]:
    raise AssertionError("NVML is started")


def machine(root: Path, **options: Any) -> MachineFacts:
    return MachineFacts(root=root, **{"nvml": never, **options})


def test_this_machine_has_facts_and_no_name() -> None:
    facts = MachineFacts()
    assert facts["cpu.arch"] == platform.machine()
    assert facts["kernel.release"] == platform.release()
    assert platform.node() not in dict(facts).values()
    assert len(facts) == len(dict(facts))
    assert "nothing.of.that.name" not in facts


def test_facts_that_are_given_go_before_what_is_found(tmp_path: Path) -> None:
    facts = machine(tmp_path, given={"cpu.arch": "other", "pool": "fast"})
    assert (facts["cpu.arch"], facts["pool"]) == ("other", "fast")


def test_a_cpu_is_described_by_its_first_block(tmp_path: Path) -> None:
    first = (
        "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143\n"
        f"model name\t: Some Processor\nstepping\t: 8\nflags\t\t: {FLAGS}\n"
    )
    write(tmp_path, {"proc/cpuinfo": f"{first}\n{first.replace('143', '1')}"})
    facts = machine(tmp_path)
    assert facts["cpu.features"] == "avx,avx2,avx512f,sse,sse2,sse4_1,sse4_2,ssse3"
    assert (facts["cpu.vendor"], facts["cpu.family"], facts["cpu.model"]) == ("intel", "6", "143")
    assert facts["cpu.model_name"] == "Some Processor"
    arm = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"
    write(tmp_path, {"proc/cpuinfo": arm})
    assert machine(tmp_path)["cpu.features"] == "asimd,fp,sve"


def test_where_files_are_missing_nothing_is_known(tmp_path: Path) -> None:
    assert set(machine(tmp_path)) == {"cpu.arch", "kernel.release", "os"}


@pytest.mark.parametrize(
    ("memory", "cpu", "expected"),
    [
        ("137438953472\n", "1600000 100000\n", ["137438953472", "16000m"]),
        ("max\n", "max 100000\n", ["max", "max"]),
        ("", "", []),
        ("nonsense", "1 0", []),
    ],
)
def test_limits_are_those_of_the_own_container(
    tmp_path: Path, memory: str, cpu: str, expected: list[str]
) -> None:
    write(tmp_path, {"sys/fs/cgroup/memory.max": memory, "sys/fs/cgroup/cpu.max": cpu})
    names = ("container.memory_limit", "container.cpu_limit")
    found = machine(tmp_path)
    assert [found[name] for name in names if name in found] == expected
    other = machine(tmp_path, own_container=False)
    assert not any(name in other for name in names)


def test_criu_is_asked_for_its_version_and_its_folder_for_plugins(tmp_path: Path) -> None:
    write(tmp_path, {"usr/sbin/criu": "#!/bin/sh\necho Version: 4.2\necho GitID: v4.2\n"})
    write(tmp_path, {"usr/lib/criu/cuda_plugin.so": "", "usr/lib/criu/README": ""})
    assert "criu.version" not in machine(tmp_path)
    os.chmod(tmp_path / "usr/sbin/criu", 0o755)
    facts = machine(tmp_path)
    assert (facts["criu.version"], facts["criu.plugins"]) == ("4.2", "cuda_plugin")
    write(tmp_path, {"usr/sbin/criu": "#!/bin/sh\nexit 3\n"})
    assert "criu.version" not in machine(tmp_path)


def test_proc_tells_the_driver_and_the_gpus_without_nvml(tmp_path: Path) -> None:
    gpu_root(tmp_path, ["NVIDIA H200", "NVIDIA B200"])
    facts = machine(tmp_path)
    assert facts["gpu.driver_version"] == "580.65.06"
    assert facts["gpu.products"] == "NVIDIA B200,NVIDIA H200"
    assert facts["gpu.count"] == "2"


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51.03  Release",
            "575.51.03",
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  560.35.03  Fri", "560.35.03"),
        ("NVRM version: unheard of", None),
        ("\0" * 100_000, None),
    ],
)
def test_the_driver_s_banner_has_two_forms(
    tmp_path: Path, banner: str, version: str | None
) -> None:
    write(tmp_path, {"proc/driver/nvidia/version": banner})
    assert proc_facts(tmp_path).get("gpu.driver_version") == version


def test_a_gpu_that_proc_can_not_name_leaves_products_to_nvml(tmp_path: Path) -> None:
    gpu_root(tmp_path, ["NVIDIA H200", "Unknown"])
    assert proc_facts(tmp_path).keys() == {"gpu.driver_version", "gpu.count"}
    found = machine(tmp_path, nvml=lambda: {"gpu.products": "NVIDIA H200,NVIDIA H200"})
    assert found["gpu.products"] == "NVIDIA H200,NVIDIA H200"
    assert "gpu.products" not in machine(tmp_path, use_nvml=False)


def test_divided_gpus_are_left_to_nvml(tmp_path: Path) -> None:
    gpu_root(tmp_path, ["NVIDIA H200"])
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi7").mkdir(parents=True)
    assert proc_facts(tmp_path) == {"gpu.driver_version": "580.65.06"}


def test_nvml_is_asked_once_and_only_where_there_is_a_driver(tmp_path: Path) -> None:
    calls: list[int] = []

    def nvml() -> dict[str, str]:
        calls.append(1)
        return {"gpu.compute_capability": "9.0", "gpu.cuda_version": "13.0"}

    assert "gpu.cuda_version" not in machine(tmp_path)
    gpu_root(tmp_path, ["NVIDIA H200"])
    facts = machine(tmp_path, nvml=nvml)
    assert (facts["gpu.count"], calls) == ("1", [])
    assert (facts["gpu.compute_capability"], facts["gpu.cuda_version"]) == ("9.0", "13.0")
    assert "gpu.memory_gib" not in facts
    assert calls == [1]
    assert "gpu.cuda_version" not in machine(tmp_path, use_nvml=False)


def test_what_is_recorded_of_a_machine_is_the_machine(tmp_path: Path) -> None:
    gpu_root(tmp_path, ["NVIDIA H200"])
    write(tmp_path, {"sys/fs/cgroup/memory.max": "1", "usr/lib/criu/a.so": ""})
    write(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0-45-generic\n"})
    facts = machine(tmp_path, nvml=lambda: {"gpu.mig_profiles": "", "gpu.memory_gib": "140"})
    found = facts.recordable()
    assert found.keys() - {"os"} == {
        "cpu.arch", "kernel.release", "gpu.count", "gpu.driver_version", "gpu.memory_gib",
        "gpu.products",
    }  # fmt: skip
    assert found["kernel.release"] == "6.8.0-45-generic"
    seen = machine(tmp_path, nvml=lambda: {"gpu.count": "3", "gpu.mig_profiles": ""})
    assert (seen["gpu.count"], seen.recordable()["gpu.count"]) == ("1", "3")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            "one",
            {"gpu.count": "1", "gpu.products": "NVIDIA H200", "gpu.mig_profiles": "",
             "gpu.compute_capability": "9.0", "gpu.memory_gib": "140"},
        ),
        (
            "two kinds",
            {"gpu.count": "2", "gpu.products": "NVIDIA B200,NVIDIA H200", "gpu.mig_profiles": "",
             "gpu.compute_capability": "10.0,9.0", "gpu.memory_gib": "140"},
        ),
        (
            "not mine",
            {"gpu.count": "1", "gpu.products": "NVIDIA H200", "gpu.mig_profiles": "",
             "gpu.compute_capability": "9.0", "gpu.memory_gib": "140"},
        ),
        (
            "divided",
            {"gpu.count": "3", "gpu.products": "NVIDIA H200,NVIDIA H200,NVIDIA H200",
             "gpu.mig_profiles": "1g.18gb,2g.35gb", "gpu.compute_capability": "9.0",
             "gpu.memory_gib": "16"},
        ),
        ("none", {"gpu.count": "0", "gpu.products": "", "gpu.mig_profiles": ""}),
    ],
)  # fmt: skip
def test_nvml_is_read_in_a_child_process(
    tmp_path: Path, kind: str, expected: dict[str, str]
) -> None:
    env = fake_nvml(tmp_path, json.dumps(KINDS[kind]))
    found = nvml_facts(env=env)
    assert found == {"gpu.driver_version": "580.65.06", "gpu.cuda_version": "13.0", **expected}
    assert (tmp_path / "ended").exists()
    assert "pynvml" not in sys.modules


@pytest.mark.parametrize(
    "init",
    [
        'raise NVMLError("Driver/library version mismatch")',
        "os._exit(11)",
        "os.kill(os.getpid(), 9)",
        'print("x" * 3_000_000)',
        'print("{}"); os._exit(0)',
        'print(\'{"devices": [1], "driver_version": "1", "cuda_version": "1"}\'); os._exit(0)',
        'print(\'{"devices": [], "driver_version": "a\\\\nb", "cuda_version": "1"}\'); os._exit(0)',
        'print("[" * 100_000); os._exit(0)',
    ],
)
def test_whatever_becomes_of_the_child_is_unknown(tmp_path: Path, init: str) -> None:
    assert nvml_facts(env=fake_nvml(tmp_path, "[]", init=init)) == {}
    assert (tmp_path / "begun").exists()


def test_a_child_that_hangs_is_ended(tmp_path: Path) -> None:
    env = fake_nvml(
        tmp_path, "[]", init="(HERE / 'pid').write_text(str(os.getpid())); time.sleep(99)"
    )
    assert nvml_facts(env=env, timeout_s=1.5) == {}
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_without_pynvml_or_python_nothing_is_known(tmp_path: Path) -> None:
    write(tmp_path, {"pynvml.py": "raise ImportError('not here')"})
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert nvml_facts(env=env) == {}
    assert nvml_facts(python=str(tmp_path / "no-python")) == {}
    assert nvml_facts(python="") == {}


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU here")
def test_where_there_is_no_gpu_the_real_child_says_so() -> None:
    assert nvml_facts() == {}
    line = [sys.executable, "-P", nvml_probe.__file__]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout).keys() == {"error"}


def test_modules_beside_the_probe_do_not_stand_in_for_others(tmp_path: Path) -> None:
    assert (Path(gpu_facts.__file__).parent / "driver.py").exists()
    init = "import sys; (HERE / 'path').write_text(' '.join(sys.path))"
    nvml_facts(env=fake_nvml(tmp_path, "[]", init=init))
    assert str(Path(gpu_facts.__file__).parent) not in (tmp_path / "path").read_text().split()
