"""Facts of this machine, under the names that facts of snapshots have. None of them names it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from imgfmt.cpu_features import features_of_flags
from imgfmt.facts import canonical, joined
from restore.gpu_facts import has_driver, nvml_facts, proc_facts
from transfer.pushing.provenance import host_facts

_MAX_FILE_BYTES = 64 << 10
_CRIU_TIMEOUT_S = 5.0
_CRIU_VERSION = re.compile(r"Version: ([0-9A-Za-z][^\s]{0,63})")
_BINARIES = ("usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin")
_PLUGINS = ("usr/lib/criu", "usr/local/lib/criu", "usr/lib64/criu", "usr/libexec/criu")

_BASE = ("cpu.arch", "kernel.release", "os")
_CPU = (
    "cpu.family", "cpu.features", "cpu.model", "cpu.model_name", "cpu.stepping", "cpu.vendor",
)  # fmt: skip
_GPU = (
    "gpu.compute_capability", "gpu.count", "gpu.cuda_version", "gpu.driver_version",
    "gpu.memory_gib", "gpu.mig_profiles", "gpu.products",
)  # fmt: skip
_OF_PROC = frozenset({"gpu.count", "gpu.driver_version", "gpu.products"})


class MachineFacts(Mapping[str, str]):
    """Facts of this machine; each is looked up when it is first asked for, which may take seconds.

    `given` go before what is found. `root` is where /proc, /sys and /usr are. Without `use_nvml`
    no GPU is opened, and only what /proc tells of them is known. Without `own_container` the limits
    of this process's container are not taken for those of whoever will use an image. May be used
    from several threads.
    """

    def __init__(
        self,
        given: Mapping[str, str] | None = None,
        *,
        root: Path = Path("/"),
        use_nvml: bool = True,
        own_container: bool = True,
        nvml: Callable[[], dict[str, str]] = nvml_facts,
    ) -> None:
        self._given = dict(given or {})
        self._root = root
        self._nvml = nvml
        self._lock = threading.RLock()
        self._found: dict[Callable[[], dict[str, str]], dict[str, str]] = {}
        self._groups: dict[str, Callable[[], dict[str, str]]] = {
            **dict.fromkeys(_BASE, self._base),
            **dict.fromkeys(_CPU, self._cpu),
            **dict.fromkeys(_GPU, self._proc_gpus),
            "criu.version": self._criu_version,
            "criu.plugins": self._criu_plugins,
        }
        self._use_nvml = use_nvml
        if own_container:
            self._groups["container.cpu_limit"] = self._limits
            self._groups["container.memory_limit"] = self._limits

    def __getitem__(self, fact: str) -> str:
        if fact in self._given:
            return self._given[fact]
        return self._looked_up(fact)[fact]

    def _looked_up(self, fact: str) -> dict[str, str]:
        group = self._groups.get(fact)
        found = {} if group is None else self._once(group)
        if fact in found or fact not in _GPU:
            return found
        if not self._use_nvml or not has_driver(self._root):
            return {}
        return self._once(self._nvml)

    def _once(self, group: Callable[[], dict[str, str]]) -> dict[str, str]:
        with self._lock:
            if group not in self._found:
                self._found[group] = group()
            return self._found[group]

    def __iter__(self) -> Iterator[str]:
        for fact in sorted({*self._given, *self._groups}):
            if fact in self._given or fact in self._looked_up(fact):
                yield fact

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def recordable(self) -> dict[str, str]:
        """What `push --record-host` records: the machine, not tools or limits. Blocks.

        GPUs are those that NVML shows to this process, where it does; /proc may show more.
        """
        facts = {fact: self.get(fact, "") for fact in (*_BASE, *_CPU, *_GPU)}
        if self._use_nvml and has_driver(self._root):
            facts |= self._once(self._nvml)
        return {fact: value for fact, value in facts.items() if value}

    def _base(self) -> dict[str, str]:
        release = self._text("proc/sys/kernel/osrelease").strip()
        return host_facts() | ({"kernel.release": release} if release else {})

    def _cpu(self) -> dict[str, str]:
        """What /proc/cpuinfo has of the first CPU."""
        block = self._text("proc/cpuinfo").partition("\n\n")[0]
        lines = (line.partition(":") for line in block.splitlines())
        has = {name.strip(): value.strip() for name, _, value in lines}
        facts = {
            "cpu.family": has.get("cpu family", ""),
            "cpu.model": has.get("model", ""),
            "cpu.model_name": has.get("model name", ""),
            "cpu.stepping": has.get("stepping", ""),
            "cpu.vendor": canonical("cpu.vendor", has.get("vendor_id", "")) or "",
        }
        if "flags" in has:
            facts["cpu.features"] = features_of_flags(has["flags"].split())
        elif "Features" in has:
            facts["cpu.features"] = joined(has["Features"].split())
        return {fact: value for fact, value in facts.items() if value}

    def _proc_gpus(self) -> dict[str, str]:
        found = proc_facts(self._root)
        return {fact: found[fact] for fact in _OF_PROC & found.keys()}

    def _limits(self) -> dict[str, str]:
        """Those of the container that this runs in; the root of all control groups has none."""
        facts = {}
        memory = self._text("sys/fs/cgroup/memory.max").strip()
        quota, _, period = self._text("sys/fs/cgroup/cpu.max").strip().partition(" ")
        if memory.isdecimal() or memory == "max":
            facts["container.memory_limit"] = memory
        if quota == "max":
            facts["container.cpu_limit"] = quota
        elif quota.isdecimal() and period.isdecimal() and int(period):
            facts["container.cpu_limit"] = f"{int(quota) * 1000 // int(period)}m"
        return facts

    def _criu_version(self) -> dict[str, str]:
        for folder in _BINARIES:
            binary = self._root / folder / "criu"
            if not os.access(binary, os.X_OK):
                continue
            try:
                done = subprocess.run(
                    [binary, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                    timeout=_CRIU_TIMEOUT_S, check=False,
                )  # fmt: skip
            except (OSError, subprocess.SubprocessError):
                return {}
            found = _CRIU_VERSION.search(done.stdout[:4096].decode(errors="replace"))
            return {} if found is None else {"criu.version": found[1]}
        return {}

    def _criu_plugins(self) -> dict[str, str]:
        """The plugins where CRIU looks for them by itself; nothing if there is no such folder."""
        folders = [self._root / folder for folder in _PLUGINS]
        there = [folder for folder in folders if folder.is_dir()]
        names = {path.stem for folder in there for path in folder.glob("*.so")}
        return {"criu.plugins": joined(names)} if there else {}

    def _text(self, path: str) -> str:
        """The beginning of a file; nothing if it can't be read."""
        try:
            with open(self._root / path, "rb") as file:
                return file.read(_MAX_FILE_BYTES).decode(errors="replace")
        except OSError:
            return ""
