"""Images of a store against this machine: reports, the choice, and what follows from it."""

from __future__ import annotations

import asyncio
import os
import tarfile
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zstandard

import snapcask
from imgfmt import criu
from imgfmt.compat import Use, Verdict
from imgfmt.criu import Inventory, Pagemap, PagemapEntry, Process
from imgfmt.errors import DoesNotFit, InvalidInput, NotFound
from imgfmt.reference import parse_reference
from restore.compat import CompatReport, OnMismatch, check, enforce, pick_image
from restore.host_facts import MachineFacts
from tests.imgfmt.test_criu import DATA_FILE, DATA_VARIABLE, cpuinfo
from transfer.catalog import Catalog, open_catalog
from transfer.store.url import open_store

T = TypeVar("T")
Work = Callable[[Catalog], Coroutine[Any, Any, T]]

MANIFEST = """\
host: {kernelVersion: 6.8.0-45-generic, cpuArch: amd64}
k8s: {imageId: 'r/llm@sha256:%s', cpuLimit: 16, memoryLimit: 128Gi}
cudaRestore:
  sourceDriverVersion: '580.65.06'
  sourceGpus: [{uuid: GPU-1, productName: NVIDIA H200}]
""" % ("00" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    snapcask.init_store(root)
    return root


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A small dump of an x86 process that used AVX2 and a GPU."""
    root = tmp_path / "dump"
    root.mkdir()
    words = [0] * 19
    words[4], words[9] = 1 << 28, 1 << 5
    files = {
        "inventory.img": criu.encode_inventory(Inventory(plugins=("cuda_plugin",))),
        "pstree.img": criu.encode_pstree([Process(7, 0, 7, 7, (7,))]),
        "pagemap-7.img": criu.encode_pagemap(Pagemap(1, (PagemapEntry(0x10000, 3),))),
        "pages-1.img": bytes(3 * criu.PAGE_BYTES),
        "cpuinfo.img": cpuinfo(2, words),
        "manifest.yaml": MANIFEST.encode(),
    }
    for name, raw in files.items():
        (root / name).write_bytes(raw)
    return root


@pytest.fixture
def real_dump(tmp_path: Path) -> Path:
    """A real dump of one process."""
    archive = Path(os.environ.get(DATA_VARIABLE, DATA_FILE))
    if not archive.exists():
        pytest.skip(f"no real dumps: {DATA_VARIABLE} names no file")
    root = tmp_path / "real"
    root.mkdir()
    with (
        archive.open("rb") as file,
        zstandard.ZstdDecompressor().stream_reader(file) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        for member in tar:
            path = Path(member.name)
            content = tar.extractfile(member)
            if content is not None and path.parent.name == "x-replica-0":
                (root / path.name).write_bytes(content.read())
    return root


def on(store: Path, work: Work[T]) -> T:
    async def run() -> T:
        backend = open_store(str(store))
        try:
            return await work(await open_catalog(backend))
        finally:
            backend.close()

    return asyncio.run(run())


def checked(store: Path, reference: str, facts: Mapping[str, str], **options: Any) -> CompatReport:
    async def work(catalog: Catalog) -> CompatReport:
        digest = await catalog.resolve(parse_reference(reference))
        return await check(catalog, digest, facts, **options)

    return on(store, work)


def test_a_real_dump_is_held_against_this_machine(real_dump: Path, store: Path) -> None:
    snapcask.push(real_dump, "a:1", store=store)
    report = snapcask.check("a:1", store=store)
    (arch,) = report.checks
    assert (arch.rule, arch.source) == ("cpu.arch", "x86_64")
    assert report.fits is (MachineFacts()["cpu.arch"] == "x86_64")
    other = snapcask.check("a:1", store=store, facts={"cpu.arch": "arm64"})
    assert [c.rule for c in other.refusing] == ["cpu.arch"]
    assert snapcask.check(
        "a:1", store=store, facts={"cpu.arch": "arm64"}, override=["cpu.arch"]
    ).fits


def test_rules_come_from_cpuinfo_inventory_and_manifest(dump: Path, store: Path) -> None:
    snapcask.push(dump, "a:1", store=store)
    report = checked(store, "a:1", {})
    assert {c.rule: c.source for c in report.checks} == {
        "container.cpu_limit": "16",
        "container.image_id": f"r/llm@sha256:{'00' * 32}",
        "container.memory_limit": "128Gi",
        "cpu.arch": "amd64",
        "cpu.features": "avx,avx2",
        "criu.plugins": "cuda_plugin",
        "gpu.count": "1",
        "gpu.driver_version": "580.65.06",
        "gpu.products": "NVIDIA H200",
        "kernel.release": "6.8.0-45-generic",
    }
    assert {c.verdict for c in report.checks} == {Verdict.UNKNOWN}
    assert report.fits
    older = {"cpu.features": "avx,sse2", "criu.plugins": "", "gpu.driver_version": "580.65.05"}
    assert [c.rule for c in checked(store, "a:1", older).refusing] == list(older)


def test_the_same_directory_has_the_same_digest_unless_the_host_is_recorded(
    dump: Path, store: Path, tmp_path: Path
) -> None:
    snapcask.init_store(tmp_path / "other")
    flags = {"engine": "vllm:0.20.1", "model": "llama", "engine_flags": "--b 1 --a"}
    one = snapcask.push(dump, "a:1", store=store, **flags)  # type: ignore[arg-type]
    flags["engine_flags"] = "--a   --b=1"
    other = snapcask.push(dump, "b:1", store=tmp_path / "other", **flags)  # type: ignore[arg-type]
    assert one.digest == other.digest
    recorded = snapcask.push(dump, "a:2", store=store, record_host=True)
    report = snapcask.check("a:2", store=store)
    assert recorded.digest != one.digest
    kernel = next(c for c in report.checks if c.rule == "kernel.release")
    assert kernel.source == "6.8.0-45-generic"  # the snapshot's own, not the host's


def test_a_recorded_host_fits_itself(tmp_path: Path, store: Path) -> None:
    (tmp_path / "plain").mkdir()
    snapcask.push(tmp_path / "plain", "a:1", store=store, record_host=True)
    report = snapcask.check("a:1", store=store)
    assert {c.rule for c in report.checks} >= {"cpu.arch", "kernel.release"}
    assert {c.verdict for c in report.checks} == {Verdict.FITS}


@pytest.fixture
def variants(tmp_path: Path, store: Path) -> list[str]:
    """Digests of the images of `v:1`: for B200, for H200 on two drivers."""
    digests = []
    machines = [("NVIDIA B200", "590.1"), ("NVIDIA H200", "590.1"), ("NVIDIA H200", "580.65.06")]
    for number, (product, driver) in enumerate(machines):
        root = tmp_path / f"v{number}"
        root.mkdir()
        (root / "file").write_text(product)
        facts = {"gpu.products": product, "gpu.driver_version": driver}
        report = snapcask.push(root, f"i:{number}", store=store, facts=facts)
        digests.append(str(report.digest))
    from snapcask.__main__ import main

    assert main(["variants", "v:1", *digests, "--store", str(store), "-q"]) == 0
    return digests


def test_the_first_of_variants_that_fits_is_chosen_and_the_others_are_told(
    variants: list[str], store: Path
) -> None:
    here = {"gpu.products": "NVIDIA-H200", "gpu.driver_version": "580.65.6"}
    report = checked(store, "v:1", here)
    assert (str(report.digest), report.variant, report.n_variants) == (variants[2], 3, 3)
    assert report.fits
    assert [str(one.digest) for one in report.rejected] == variants[:2]
    assert [[c.rule for c in one.checks] for one in report.rejected] == [
        ["gpu.driver_version", "gpu.products"], ["gpu.driver_version"],
    ]  # fmt: skip
    overridden = checked(store, "v:1", here, override=["gpu.driver_version"])
    assert str(overridden.digest) == variants[1]
    assert str(checked(store, "v:1", {}).digest) == variants[0]
    assert [c.refuses for c in overridden.checks] == [False, False]


def test_a_pull_takes_the_variant_that_a_check_names(
    variants: list[str], store: Path, tmp_path: Path
) -> None:
    here = {"gpu.products": "NVIDIA H200", "gpu.driver_version": "590.1"}
    named = checked(store, "v:1", here).digest
    pulled = snapcask.pull("v:1", tmp_path / "out", store=store, facts=here)
    assert pulled.digest == named
    assert str(named) == variants[1]


def test_where_no_variant_fits_the_preferred_one_is_shown(
    variants: list[str], store: Path, tmp_path: Path
) -> None:
    here = {"gpu.products": "NVIDIA A100-SXM4-80GB", "gpu.driver_version": "580.65.06"}
    report = checked(store, "v:1", here)
    assert not report.fits
    assert (str(report.digest), report.variant) == (variants[0], 1)
    assert len(report.rejected) == 3
    with pytest.raises(DoesNotFit, match="none of the variants fits"):
        snapcask.pull("v:1", tmp_path / "out", store=store, facts=here)


def test_a_slip_in_an_override_is_refused(dump: Path, store: Path) -> None:
    snapcask.push(dump, "a:1", store=store, require=["pool=fast"])
    assert checked(store, "a:1", {"pool": "slow"}, override=["pool"]).fits
    with pytest.raises(InvalidInput, match=r"no rule 'kernel\.relaese'"):
        checked(store, "a:1", {}, override=["kernel.relaese"])


def test_a_member_is_checked_alone(tmp_path: Path, store: Path) -> None:
    (tmp_path / "d").mkdir()
    source = snapcask.MemberSource
    members = {
        "a": source(tmp_path / "d", facts={"cpu.arch": "x86_64"}),
        "b": source(tmp_path / "d", facts={"cpu.arch": "aarch64"}),
    }
    snapcask.push(None, "m:1", store=store, members=members)
    here = {"cpu.arch": "x86_64"}
    assert not checked(store, "m:1", here).fits
    assert checked(store, "m:1", here, member="a").fits
    with pytest.raises(NotFound, match="it has a, b"):
        checked(store, "m:1", here, member="c")


def picked(store: Path, reference: str, facts: Mapping[str, str], **options: Any) -> str:
    async def work(catalog: Catalog) -> str:
        digest = await catalog.resolve(parse_reference(reference))
        return str((await pick_image(catalog, digest, facts, **options)).digest)

    return on(store, work)


def test_what_fits_for_tensors_will_do_where_nothing_fits_for_a_restore(
    variants: list[str], store: Path
) -> None:
    here = {"gpu.products": "NVIDIA A100-SXM4-80GB"}
    with pytest.raises(DoesNotFit, match=r"none of the variants .*--override RULE.*--on-mismatch"):
        picked(store, "v:1", here)
    assert picked(store, "v:1", here, use=Use.TENSORS) == variants[0]
    assert picked(store, "v:1", here, on_mismatch=OnMismatch.WARN) == variants[0]
    fits = {"gpu.products": "NVIDIA H200"}
    assert picked(store, "v:1", fits, use=Use.TENSORS) == variants[1]


def test_a_mismatch_names_each_check_both_values_and_the_way_around_it(
    dump: Path, store: Path
) -> None:
    snapcask.push(dump, "a:1", store=store)

    async def image_of(catalog: Catalog) -> Any:
        return await catalog.image(await catalog.resolve(parse_reference("a:1")))

    image = on(store, image_of)
    here = {"gpu.driver_version": "570.1", "cpu.arch": "aarch64"}
    with pytest.raises(DoesNotFit) as caught:
        enforce(image, here, what="a:1")
    for part in (
        "image a:1", "gpu.driver_version", "'580.65.06'", "'570.1'", "cpu.arch", "'aarch64'",
        "--override cpu.arch --override gpu.driver_version", "--on-mismatch warn",
    ):  # fmt: skip
        assert part in str(caught.value)
    (warning,) = enforce(image, here, what="a:1", on_mismatch=OnMismatch.WARN)
    assert "gpu.driver_version" in warning
    assert enforce(image, here, what="a:1", override=list(here)) == ()
    assert enforce(image, {}, what="a:1") == ()


def test_what_is_ignored_is_not_looked_at(dump: Path, store: Path) -> None:
    class Untouchable(dict[str, str]):
        def get(self, *_: Any) -> Any:
            raise AssertionError("a fact is asked for")

    snapcask.push(dump, "a:1", store=store)

    async def image_of(catalog: Catalog) -> Any:
        return await catalog.image(await catalog.resolve(parse_reference("a:1")))

    image = on(store, image_of)
    assert enforce(image, Untouchable(), what="a:1", on_mismatch=OnMismatch.IGNORE) == ()
    with pytest.raises(AssertionError):
        enforce(image, Untouchable(), what="a:1")


def test_on_mismatch_is_one_of_three() -> None:
    assert [OnMismatch.parse(text) for text in ("fail", "warn", "ignore")] == list(OnMismatch)
    with pytest.raises(InvalidInput, match="'maybe' is not one of fail, warn, ignore"):
        OnMismatch.parse("maybe")
