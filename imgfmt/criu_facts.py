"""What a CRIU dump tells of the machine that it was taken on: provenance, fact to value."""

from __future__ import annotations

from collections.abc import Mapping

from imgfmt.cpu_features import features_of_words
from imgfmt.criu import CPUINFO_FILE, CriuSummary, Magic, first, inventory_in, reading, records
from imgfmt.digest import Octets
from imgfmt.protowire import Message

_CPU_VENDORS = {0: "unknown", 1: "intel", 2: "amd"}
_ARCHITECTURES = {
    1: "x86_64", 2: "arm", 3: "aarch64", 4: "ppc64le", 5: "s390x", 6: "mips64",
    7: "loongarch64", 8: "riscv64",
}  # fmt: skip
"""By `mtype` of `core-*.img`, named as the kernel names a machine."""


def core_file(summary: CriuSummary) -> str | None:
    """The file that tells the architecture: that of the first process."""
    return f"core-{summary.processes[0].pid}.img" if summary.processes else None


def facts_of(summary: CriuSummary, small_files: Mapping[str, Octets]) -> dict[str, str]:
    """Facts of the dump that `criu.summarise` made `summary` of; `core_file` may be there too.

    What its files don't tell is left out. Raises InvalidImage as `summarise` does.
    """
    inventory = inventory_in(small_files)
    facts = {"criu.image_version": str(inventory.image_version)}
    if inventory.plugins:
        facts["criu.plugins"] = ",".join(inventory.plugins)
    if summary.criu_version is not None:
        facts["criu.version"] = summary.criu_version
    core = core_file(summary)
    if core is not None and core in small_files:
        facts |= _core_facts(small_files[core], core)
    if CPUINFO_FILE in small_files:
        facts |= _cpu_facts(small_files[CPUINFO_FILE])
    return facts


def _core_facts(raw: Octets, what: str) -> dict[str, str]:
    with reading(what):
        architecture = _ARCHITECTURES.get(first(records(raw, Magic.COMMON, Magic.CORE)).integer(1))
    return {} if architecture is None else {"cpu.arch": architecture}


def _cpu_facts(raw: Octets) -> dict[str, str]:
    with reading(CPUINFO_FILE):
        machine = first(records(raw, Magic.COMMON, Magic.CPUINFO))
        if not machine.values.get(1):
            return {}  # not x86: only feature bits, which name no CPU
        cpu = Message.parse(machine.octets(1))
        facts = {
            "cpu.vendor": _CPU_VENDORS.get(cpu.integer(1), "unknown"),
            "cpu.family": str(cpu.integer(2)),
            "cpu.model": str(cpu.integer(3)),
            "cpu.stepping": str(cpu.integer(4)),
        }
        if cpu.text(7):
            facts["cpu.model_name"] = cpu.text(7)
        if features := features_of_words(cpu.integer(5, 0), cpu.integers(6)):
            facts["cpu.features"] = features
        return facts
