"""What a directory tells of itself: facts of well-formed files, and a warning for the others."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from imgfmt import criu
from imgfmt.criu import Inventory, Pagemap, PagemapEntry, Process
from transfer.pushing import provenance
from transfer.pushing.provenance import describe_directory, host_facts


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A small CRIU dump of one process with three pages."""
    files = {
        "inventory.img": criu.encode_inventory(Inventory()),
        "pstree.img": criu.encode_pstree([Process(7, 0, 7, 7, (7, 8))]),
        "pagemap-7.img": criu.encode_pagemap(Pagemap(1, (PagemapEntry(0x10000, 3),))),
        "pages-1.img": bytes(3 * criu.PAGE_BYTES),
    }
    for name, raw in files.items():
        (tmp_path / name).write_bytes(raw)
    return tmp_path


def test_a_dump_is_summarised(dump: Path) -> None:
    found = describe_directory(str(dump))
    assert found.warnings == []
    assert found.facts["criu.image_version"] == "2"
    assert found.criu is not None
    assert [len(process.threads) for process in found.criu.processes] == [2]
    assert (found.criu.present_pages, found.criu.pages_bytes) == (3, 3 * 4096)


def test_the_version_of_criu_is_in_its_log(dump: Path) -> None:
    (dump / "dump.log").write_bytes(b"(00.000) Version: 4.2 (gitid v4.2)\n" + b"x" * 2_000_000)
    assert describe_directory(str(dump)).facts["criu.version"] == "4.2"


def test_a_parent_dump_gives_a_warning(dump: Path) -> None:
    (dump / "parent").symlink_to("../before")
    found = describe_directory(str(dump))
    assert found.criu is not None
    assert found.criu.parent_chain
    assert any("parent" in warning for warning in found.warnings)


@pytest.mark.parametrize("name", ["inventory.img", "pstree.img", "pagemap-7.img"])
def test_a_malformed_file_gives_a_warning_and_no_facts(dump: Path, name: str) -> None:
    (dump / name).write_bytes(b"nonsense")
    found = describe_directory(str(dump))
    assert (found.facts, found.criu) == ({}, None)
    (warning,) = found.warnings
    assert name in warning
    assert str(dump) in warning


def test_what_is_no_regular_file_is_not_waited_for(dump: Path) -> None:
    (dump / "pstree.img").unlink()
    os.mkfifo(dump / "pstree.img")
    assert "pstree.img is not a regular file" in describe_directory(str(dump)).warnings[0]


def test_a_link_is_not_followed(dump: Path) -> None:
    (dump / "pstree.img").rename(dump / "elsewhere")
    (dump / "pstree.img").symlink_to("elsewhere")
    assert "pstree.img" in describe_directory(str(dump)).warnings[0]


def test_huge_files_are_not_read(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PAGEMAPS_LIMIT_BYTES", 10)
    found = describe_directory(str(dump))
    assert found.criu is not None
    assert found.criu.pagemap_entries == 0
    assert (found.criu.pages_files, found.criu.pages_bytes) == (1, 3 * 4096)
    assert len(found.warnings) == 1
    assert "not looked" in found.warnings[0]
    os.truncate(dump / "pstree.img", provenance.FILE_LIMIT_BYTES + 1)
    assert "pstree.img has more than" in describe_directory(str(dump)).warnings[0]


def test_compressed_pages_give_a_warning(dump: Path) -> None:
    raw = criu.encode_inventory(Inventory(image_version=criu.IMAGE_VERSION + 1))
    (dump / "inventory.img").write_bytes(raw)
    found = describe_directory(str(dump))
    assert found.criu is not None
    assert found.criu.compressed
    assert any("compressed" in warning for warning in found.warnings)


def test_a_manifest_tells_facts_beside_those_of_criu(dump: Path) -> None:
    (dump / "manifest.yaml").write_text(
        "createdAt: 2026-01-02T03:04:05Z\n"
        "host: {kernelVersion: 6.8.0-1, cpuArch: amd64}\n"
        "cudaRestore: {sourceDriverVersion: '580.10', sourceGpus: [{productName: H100}]}\n"
    )
    facts = describe_directory(str(dump)).facts
    assert facts["gpu.products"] == "H100"
    assert facts["gpu.driver_version"] == "580.10"
    assert facts["criu.image_version"] == "2"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "- a\n",
        "host: [1]",
        "[" * 100_000,
        "x" * 300_000,
        "a: !!timestamp 2020-13-99",
        "a: !!python/object:os.system {}",
        "a: !!int 0x" + "f" * 20_000,
        "host: &h {cpuArch: *h}",
        "host: &h [*h]",
        "a: &a {<<: *a}",
        "host: {cpuArch: [amd64]}",
        "k8s: {imageId: {a: b}}",
        "--- {a: b}\n--- {a: b}\n",
        'host: {cpuArch: "a\\nb"}',
        "? [a, b]\n: c\n? {d: e}\n: f\n",
    ],
)
def test_a_malformed_manifest_gives_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.yaml").write_text(text)
    found = describe_directory(str(tmp_path))
    assert found.facts == {}
    (warning,) = found.warnings
    assert "manifest.yaml" in warning
    assert "\n" not in warning


def test_scalars_of_a_manifest_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    (tmp_path / "manifest.yaml").write_text(
        "a: 2020-13-99\nb: 1:2:3:4\n"
        "host: {kernelVersion: 6.10, cpuArch: ~}\n"
        "k8s: {cpuLimit: 0o17, memoryLimit: 1e3, image: null, imageId: ''}\n"
        "cudaRestore: {sourceDriverVersion: 580.10, sourceGpus: null, sourceGpuUuids: [yes]}\n"
    )
    found = describe_directory(str(tmp_path))
    assert found.warnings == []
    assert found.facts == {
        "kernel.release": "6.10",
        "container.cpu_limit": "0o17",
        "container.memory_limit": "1e3",
        "gpu.driver_version": "580.10",
        "gpu.count": "1",
    }


def test_a_manifest_that_stands_for_more_than_it_is_costs_no_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 {k: v}"]
    for level in range(1, 12):
        merged = ",".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{merged}]}}")
    (tmp_path / "manifest.yaml").write_text("\n".join(lines))
    found = describe_directory(str(tmp_path))
    assert found.facts == {}
    assert "alias" in found.warnings[0]


def test_the_architecture_of_a_dump_is_in_its_first_core_file(dump: Path) -> None:
    core = b"\x19CVTG8\x05U" + b"\x02\0\0\0" + b"\x08\x03"
    (dump / "core-7.img").write_bytes(core)
    assert describe_directory(str(dump)).facts["cpu.arch"] == "aarch64"
    (dump / "core-7.img").write_bytes(core[:-1])
    assert "core-7.img" in describe_directory(str(dump)).warnings[0]


def test_any_other_directory_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages-1.img").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "pages-1.img"):
        assert describe_directory(str(path)) == provenance.DirectoryFacts({}, None, [])


def test_facts_of_the_host_do_not_name_it() -> None:
    facts = host_facts()
    assert facts["cpu.arch"] == platform.machine()
    assert facts["kernel.release"] == platform.release()
    assert set(facts) <= {"cpu.arch", "kernel.release", "os"}
