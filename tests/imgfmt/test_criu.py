"""CRIU's image files and NVIDIA's manifest: real dumps, round trips, traps and hostile bytes."""

from __future__ import annotations

import io
import os
import struct
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import criu, criu_facts
from imgfmt.criu import Inventory, Magic, PageFlags, Pagemap, PagemapEntry, Process
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.nvidia import facts_of_manifest

DATA_VARIABLE = "SNAPCASK_CRIU_REPLICAS"
DATA_FILE = Path(__file__).parents[3] / "shared" / "data" / "criu-replicas.tar.zst"
PAGE = criu.PAGE_BYTES
INVENTORY = criu.encode_inventory(Inventory())
PSTREE = criu.encode_pstree([Process(7, 0, 7, 7, (7,))])


def varint(value: int) -> bytes:
    head = b""
    while value > 127:
        head += bytes([value & 127 | 128])
        value >>= 7
    return head + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def octets(field: int, value: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(value)) + value


def image(*messages: bytes, magics: tuple[Magic, ...]) -> bytes:
    records = [struct.pack("<I", len(message)) + message for message in messages]
    return b"".join([*(struct.pack("<I", magic) for magic in magics), *records])


def pagemap_image(*entries: bytes, pages_id: int = 1) -> bytes:
    return image(number(1, pages_id), *entries, magics=(Magic.COMMON, Magic.PAGEMAP))


def only_entry(*fields: bytes) -> PagemapEntry:
    (entry,) = criu.decode_pagemap(pagemap_image(b"".join(fields)), "pagemap-1.img").entries
    return entry


def summary_of(
    pagemap: bytes = pagemap_image(number(1, 0) + number(5, 2)),
    *,
    more: Mapping[str, bytes] | None = None,
    sizes: Mapping[str, int] | None = None,
    has_parent_link: bool = False,
) -> criu.CriuSummary:
    small = {"inventory.img": INVENTORY, "pstree.img": PSTREE, "pagemap-7.img": pagemap}
    return criu.summarise(
        small | dict(more or {}),
        pages_file_bytes={"pages-1.img": 2 * PAGE} if sizes is None else sizes,
        has_parent_link=has_parent_link,
    )


@pytest.fixture(scope="module")
def real_dumps() -> dict[str, tuple[dict[str, bytes], dict[str, int]]]:
    """Of each real dump: its small files, and the sizes of its pages files."""
    archive = Path(os.environ.get(DATA_VARIABLE, DATA_FILE))
    if not archive.exists():
        pytest.skip(f"no real dumps: {DATA_VARIABLE} names no file")
    plain = zstandard.ZstdDecompressor().stream_reader(archive.read_bytes()).read()
    dumps: dict[str, tuple[dict[str, bytes], dict[str, int]]] = {}
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is not None:
                path = Path(member.name)
                small, sizes = dumps.setdefault(path.parent.name, ({}, {}))
                if criu.is_pages_file(path.name):
                    sizes[path.name] = member.size
                else:
                    small[path.name] = content.read()
    return dumps


def test_real_dumps_are_written_again_byte_for_byte(
    real_dumps: dict[str, tuple[dict[str, bytes], dict[str, int]]],
) -> None:
    assert len(real_dumps) == 3
    for small, _ in real_dumps.values():
        (name,) = [name for name in small if name.startswith("pagemap-")]
        assert criu.encode_pagemap(criu.decode_pagemap(small[name], name)) == small[name]
        pstree = criu.decode_pstree(small["pstree.img"])
        assert criu.encode_pstree(pstree) == small["pstree.img"]


def test_real_dumps_are_summed_up_without_warnings(
    real_dumps: dict[str, tuple[dict[str, bytes], dict[str, int]]],
) -> None:
    for small, sizes in real_dumps.values():
        summary = criu.summarise(small, pages_file_bytes=sizes, has_parent_link=False)
        (process,) = summary.processes
        assert criu.is_criu_directory(small)
        assert f"core-{process.threads[-1]}.img" in small
        assert summary.present_pages * PAGE == summary.pages_bytes == sizes["pages-1.img"]
        assert summary.pagemap_entries > 100
        assert not summary.compressed
        assert not summary.parent_chain
        assert summary.warnings == ()
        facts = criu_facts.facts_of(summary, small)
        assert facts == {"criu.image_version": "2", "cpu.arch": "x86_64"}


def test_pagemap_prefers_field_5_over_field_2() -> None:
    assert only_entry(number(1, PAGE), number(2, 3), number(5, 9)).n_pages == 9
    assert only_entry(number(1, PAGE), number(2, 0), number(5, 9)).n_pages == 9


def test_pagemap_takes_field_2_where_there_is_no_field_5() -> None:
    assert only_entry(number(1, PAGE), number(2, 3)).n_pages == 3


def test_pagemap_entry_without_flags_is_present() -> None:
    assert only_entry(number(1, PAGE), number(5, 1)).flags == PageFlags.PRESENT


def test_pagemap_entry_with_lazy_flag_alone_has_no_pages_here() -> None:
    entry = only_entry(number(1, PAGE), number(5, 1), number(4, PageFlags.LAZY))
    assert not entry.present
    assert Pagemap(1, (entry,)).present_pages == 0


def test_pagemap_entry_marked_in_parent_is_not_present() -> None:
    entry = only_entry(number(1, PAGE), number(5, 1), number(3, 1))
    assert entry.in_parent
    assert not entry.present


def test_pagemap_keeps_flags_it_does_not_know() -> None:
    assert only_entry(number(1, PAGE), number(5, 1), number(4, 4 | 1 << 20)).flags == 4 | 1 << 20


def test_pagemap_skips_fields_it_does_not_know() -> None:
    unknown = [number(90, 5), octets(91, b"x"), varint(92 << 3 | 1) + bytes(8)]
    entry = only_entry(*unknown, varint(93 << 3 | 5) + bytes(4), number(1, PAGE), number(5, 2))
    assert entry == PagemapEntry(PAGE, 2)


@st.composite
def pagemaps(draw: st.DrawFn) -> Pagemap:
    flags = st.sampled_from([4, 6, 1, 2, 12]).map(PageFlags)
    runs = draw(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 36), flags)))
    entries, vaddr = [], 0
    for gap_pages, n_pages, flag in runs:
        vaddr += gap_pages * PAGE
        if vaddr + n_pages * PAGE <= 1 << 64:
            entries.append(PagemapEntry(vaddr, n_pages, flag))
            vaddr = entries[-1].end
    return Pagemap(draw(st.integers(0, (1 << 32) - 1)), tuple(entries))


@given(pagemaps())
def test_pagemap_survives_a_round_trip(pagemap: Pagemap) -> None:
    assert criu.decode_pagemap(criu.encode_pagemap(pagemap), "pagemap-1.img") == pagemap


pids = st.integers(0, (1 << 32) - 1)
processes = st.builds(Process, pids, pids, pids, pids, st.lists(pids).map(tuple))


@given(st.lists(processes).map(tuple))
def test_pstree_survives_a_round_trip(tree: tuple[Process, ...]) -> None:
    assert criu.decode_pstree(criu.encode_pstree(tree)) == tree


@given(st.builds(Inventory, st.just(2), st.text("0123456789abcdef-", max_size=256)))
def test_inventory_survives_a_round_trip(inventory: Inventory) -> None:
    assert criu.decode_inventory(criu.encode_inventory(inventory)) == inventory


def test_packed_threads_are_read_like_separate_ones() -> None:
    ids = b"".join(number(field, 300) for field in (1, 2, 3, 4))
    packed = octets(5, varint(300) + varint(2)) + number(5, 9)
    raw = image(ids + packed, magics=(Magic.COMMON, Magic.PSTREE))
    assert criu.decode_pstree(raw) == (Process(300, 300, 300, 300, (300, 2, 9)),)


def decode_all(raw: bytes) -> None:
    for magics, decode in DECODERS:
        opening = b"".join(struct.pack("<I", magic) for magic in magics)
        for content in (raw, opening + raw, image(raw, magics=magics)):
            with suppress(InvalidImage):
                decode(content)


DECODERS: list[tuple[tuple[Magic, ...], Callable[[bytes], object]]] = [
    ((Magic.INVENTORY,), criu.decode_inventory),
    ((Magic.COMMON, Magic.PSTREE), criu.decode_pstree),
    ((Magic.COMMON, Magic.PAGEMAP), lambda raw: criu.decode_pagemap(raw, "pagemap-1.img")),
    (
        (Magic.COMMON, Magic.CPUINFO),
        lambda raw: criu_facts.facts_of(
            summary_of(), {"inventory.img": INVENTORY, "cpuinfo.img": raw}
        ),
    ),
]


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    decode_all(raw)


@given(
    st.lists(
        st.builds(number, st.integers(0, 20), st.integers(0, (1 << 70) - 1))
        | st.builds(octets, st.integers(0, 20), st.binary(max_size=9))
    )
)
def test_any_fields_are_read_or_refused(fields: list[bytes]) -> None:
    decode_all(b"".join(fields))


def test_a_pagemap_cut_anywhere_is_refused_or_has_fewer_entries() -> None:
    whole = Pagemap(1, tuple(PagemapEntry(i << 30, 300) for i in range(5)))
    raw = criu.encode_pagemap(whole)
    read = []
    for end in range(len(raw)):
        with suppress(InvalidImage):
            read.append(criu.decode_pagemap(raw[:end], "pagemap-1.img").entries)
    assert read == [whole.entries[:n] for n in range(5)]


ENTRY_START = number(1, PAGE) + number(5, 1)


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        pytest.param(b"", "does not begin", id="empty"),
        pytest.param(PSTREE, "does not begin", id="another-kind"),
        pytest.param(pagemap_image()[:8], "no records", id="no-head"),
        pytest.param(pagemap_image() + b"\1\0", "inside the length", id="cut-length"),
        pytest.param(pagemap_image() + b"\xff" * 4 + b"x", "more than are left", id="huge-record"),
        pytest.param(pagemap_image(b"\x08" + b"\xff" * 11), "64 bits", id="endless-number"),
        pytest.param(pagemap_image(number(1, 1 << 64)), "64 bits", id="65-bit-number"),
        pytest.param(pagemap_image(b"\x08\x80"), "cut short", id="cut-number"),
        pytest.param(pagemap_image(ENTRY_START + b"\x7b"), "wire type 3", id="group"),
        pytest.param(
            pagemap_image(ENTRY_START + varint(9 << 3 | 2) + varint(1 << 62)),
            "longer than its message",
            id="huge-field",
        ),
        pytest.param(pagemap_image(ENTRY_START + number(0, 1)), "field 0", id="field-0"),
        pytest.param(pagemap_image(number(5, 1)), "field 1 is missing", id="no-address"),
        pytest.param(
            pagemap_image(octets(1, b"\0") + number(5, 1)), "not a number", id="wrong-type"
        ),
        pytest.param(pagemap_image(number(1, PAGE)), "field 2 is missing", id="no-count"),
        pytest.param(pagemap_image(number(1, PAGE) + number(2, 0)), "0 pages", id="no-pages"),
        pytest.param(pagemap_image(number(1, 512) + number(5, 1)), "0x200", id="unaligned"),
        pytest.param(
            pagemap_image(number(1, PAGE) + number(5, 1 << 52)), "last address", id="wrap"
        ),
        pytest.param(pagemap_image(ENTRY_START, ENTRY_START), "overlap", id="twice"),
        pytest.param(pagemap_image(ENTRY_START + number(4, 5)), "both", id="present-and-parent"),
    ],
)
def test_broken_pagemaps_are_refused_with_a_reason(raw: bytes, complaint: str) -> None:
    with pytest.raises(InvalidImage, match=f"pagemap-1.img: .*{complaint}"):
        criu.decode_pagemap(raw, "pagemap-1.img")


def test_a_message_of_very_many_fields_is_refused() -> None:
    fields = number(9, 0) * (1 << 18)
    with pytest.raises(InvalidImage, match="262145th"):
        criu.decode_pagemap(pagemap_image(fields + ENTRY_START), "pagemap-1.img")


@pytest.mark.parametrize("text", [b"\xff", b"a\nb", b"a" * 257], ids=["not-utf8", "line", "long"])
def test_an_inventory_with_a_hostile_text_is_refused(text: bytes) -> None:
    raw = image(number(1, 2) + octets(13, text), magics=(Magic.INVENTORY,))
    with pytest.raises(InvalidImage, match=r"inventory\.img: .*field 13"):
        criu.decode_inventory(raw)


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidInput):
        criu.encode_pagemap(Pagemap(1, (PagemapEntry(0, 1, compressed=True),)))
    with pytest.raises(InvalidInput):
        criu.encode_inventory(Inventory(compressed=True))
    with pytest.raises(InvalidInput):
        criu.encode_pstree([Process(-1, 0, 0, 0, ())])


BLOCKS = octets(6, octets(1, varint(100) + varint(0)) + number(2, 100) + number(3, 1))


@pytest.mark.parametrize(
    ("pagemap", "inventory"),
    [
        pytest.param(pagemap_image(number(1, 0) + number(5, 2) + BLOCKS), INVENTORY, id="blocks"),
        pytest.param(
            pagemap_image(number(1, 0) + number(5, 2) + number(6, 100) + number(6, 0)),
            INVENTORY,
            id="sizes-in-the-entry",
        ),
        pytest.param(
            pagemap_image(number(1, 0) + number(5, 2)),
            image(number(1, 3), magics=(Magic.INVENTORY,)),
            id="image-version-3",
        ),
        pytest.param(
            pagemap_image(number(1, 0) + number(5, 2)),
            image(number(1, 2) + number(15, 1), magics=(Magic.INVENTORY,)),
            id="inventory-says-so",
        ),
    ],
)
def test_compressed_pages_are_told_to_lose_deduplication(pagemap: bytes, inventory: bytes) -> None:
    summary = summary_of(pagemap, more={"inventory.img": inventory}, sizes={"pages-1.img": 100})
    assert summary.compressed
    (warning,) = summary.warnings
    assert "deduplication is lost" in warning


def test_a_parent_entry_or_link_is_told_not_to_be_self_contained() -> None:
    parent_entry = pagemap_image(number(1, 0) + number(5, 2) + number(4, 1))
    for summary in (
        summary_of(parent_entry, sizes={"pages-1.img": 0}),
        summary_of(has_parent_link=True),
    ):
        assert summary.parent_chain
        (warning,) = summary.warnings
        assert "not self-contained" in warning
    assert not summary_of().parent_chain


def test_pages_files_that_do_not_fit_their_pagemaps_are_told() -> None:
    assert summary_of().warnings == ()
    assert summary_of(sizes={"pages-1.img": 2 * 65536}).warnings == ()
    (short,) = summary_of(sizes={"pages-1.img": PAGE}).warnings
    assert "pages-1.img has 4096 bytes" in short
    (missing,) = summary_of(sizes={}).warnings
    assert "pages-1.img has 0 bytes" in missing
    (surplus,) = summary_of(sizes={"pages-1.img": 2 * PAGE, "pages-2.img": PAGE}).warnings
    assert "pages-2.img has 4096 bytes" in surplus


def test_pagemaps_of_processes_and_shared_memory_are_added_up() -> None:
    shared = pagemap_image(number(1, 0) + number(5, 3), pages_id=2)
    summary = summary_of(
        more={"pagemap-shmem-99.img": shared},
        sizes={"pages-1.img": 2 * PAGE, "pages-2.img": 3 * PAGE},
    )
    assert (summary.pagemap_entries, summary.present_pages) == (2, 5)
    assert (summary.pages_files, summary.pages_bytes) == (2, 5 * PAGE)
    assert summary.warnings == ()


def test_a_dump_without_pstree_is_told_to_be_unfinished() -> None:
    small = {"inventory.img": INVENTORY}
    summary = criu.summarise(small, pages_file_bytes={}, has_parent_link=False)
    assert summary.processes == ()
    assert "pstree.img" in summary.warnings[0]


def test_a_directory_without_inventory_is_no_dump() -> None:
    with pytest.raises(InvalidImage, match=r"inventory\.img"):
        criu.summarise({"pstree.img": PSTREE}, pages_file_bytes={}, has_parent_link=False)


@pytest.mark.parametrize(
    ("names", "is_dump"),
    [
        ({"inventory.img", "pstree.img"}, True),
        ({"inventory.img", "pagemap-shmem-3.img"}, True),
        ({"inventory.img", "pagemap-x.img", "pages-1.img"}, False),
        ({"pstree.img", "pagemap-1.img"}, False),
    ],
)
def test_a_dump_is_known_by_its_names(names: set[str], is_dump: bool) -> None:
    assert criu.is_criu_directory(names) is is_dump


def test_summary_files_are_never_pages_files() -> None:
    names = ["inventory.img", "pagemap-1.img", "pagemap-shmem-1.img", "dump.log", "cpuinfo.img"]
    assert all(criu.is_summary_file(name) and not criu.is_pages_file(name) for name in names)
    assert criu.is_pages_file("pages-12.img")
    assert not criu.is_summary_file("pages-12.img")
    assert not criu.is_summary_file("files.img")


@pytest.mark.parametrize(
    ("log", "version"),
    [
        (b"(00.000000) Version: 4.2 (gitid v4.2-3-g1)\n(00.000001) Running on n", "4.2"),
        (b"(00.000000) Version: 4.2\n(gitid 0)", None),
        (b"(00.000000) Version: " + b"4" * 99 + b" (gitid 0)", None),
        (b"", None),
    ],
)
def test_the_version_of_criu_is_taken_from_the_log(log: bytes, version: str | None) -> None:
    small = {"inventory.img": INVENTORY, "dump.log": log}
    summary = summary_of(more={"dump.log": log})
    assert summary.criu_version == version
    assert criu_facts.facts_of(summary, small).get("criu.version") == version


def test_cpu_facts_come_from_cpuinfo() -> None:
    fields = (number(field, value) for field, value in ((1, 1), (2, 6), (3, 143), (4, 8), (5, 2)))
    cpu = octets(1, b"".join(fields) + octets(7, b"Some Processor"))
    small = {
        "inventory.img": INVENTORY,
        "cpuinfo.img": image(cpu, magics=(Magic.COMMON, Magic.CPUINFO)),
    }
    assert criu_facts.facts_of(summary_of(), small) == {
        "criu.image_version": "2",
        "cpu.vendor": "intel",
        "cpu.family": "6",
        "cpu.model": "143",
        "cpu.stepping": "8",
        "cpu.model_name": "Some Processor",
    }


def cpuinfo(version: int, words: list[int]) -> bytes:
    """`cpuinfo.img` of an x86 CPU with these words of features."""
    fields = [number(field, value) for field, value in ((1, 2), (2, 25), (3, 1), (4, 1))]
    fields += [number(5, version), *(number(6, word) for word in words)]
    return image(octets(1, b"".join(fields)), magics=(Magic.COMMON, Magic.CPUINFO))


@pytest.mark.parametrize(
    ("version", "n_words", "expected"),
    [
        (2, 19, "amx_tile,avx,avx2,avx512f,sse2"),
        (1, 12, "avx,avx2,avx512f,sse2"),
        (2, 12, None),
        (3, 19, None),
    ],
)
def test_instructions_are_named_as_the_kernel_names_them(
    version: int, n_words: int, expected: str | None
) -> None:
    words = [0] * 19
    words[0], words[4] = 1 << 26 | 1 << 9, 1 << 28 | 1 << 5  # and apic and vmx
    words[9], words[18] = 1 << 5 | 1 << 16 | 1 << 4, 1 << 24  # and hle, which kernels hide
    small = {"inventory.img": INVENTORY, "cpuinfo.img": cpuinfo(version, words[:n_words])}
    facts = criu_facts.facts_of(summary_of(), small)
    assert facts["cpu.vendor"] == "amd"
    assert facts.get("cpu.features") == expected


def test_plugins_of_the_dump_are_a_fact() -> None:
    raw = criu.encode_inventory(Inventory(run_id="r", plugins=("amdgpu_plugin", "cuda_plugin")))
    assert criu.decode_inventory(raw).plugins == ("amdgpu_plugin", "cuda_plugin")
    facts = criu_facts.facts_of(summary_of(), {"inventory.img": raw})
    assert facts["criu.plugins"] == "amdgpu_plugin,cuda_plugin"


@pytest.mark.parametrize(
    ("number_of", "expected"), [(1, "x86_64"), (3, "aarch64"), (0, None), (99, None)]
)
def test_the_architecture_is_that_of_the_first_process(
    number_of: int, expected: str | None
) -> None:
    core = image(number(1, number_of), magics=(Magic.COMMON, Magic.CORE))
    small = {"inventory.img": INVENTORY, "core-7.img": core, "core-8.img": b"not looked at"}
    assert criu_facts.facts_of(summary_of(), small).get("cpu.arch") == expected


def test_cpuinfo_of_another_architecture_gives_no_cpu_facts() -> None:
    raw = image(octets(3, number(2, 5)), magics=(Magic.COMMON, Magic.CPUINFO))
    small = {"inventory.img": INVENTORY, "cpuinfo.img": raw}
    assert criu_facts.facts_of(summary_of(), small) == {"criu.image_version": "2"}


MANIFEST: dict[str, object] = {
    "artifact": {"contentUID": "0b0c", "containerName": "engine"},
    "createdAt": "2026-09-06T00:00:00Z",
    "k8s": {
        "containerId": "c0ffee",
        "sourceNode": "node-7",
        "podName": "llm-0",
        "podIP": "10.0.0.9",
        "image": "registry.example/llm:1",
        "imageId": "registry.example/llm@sha256:00ff",
        "cpuLimit": 16,
        "memoryLimit": "128Gi",
    },
    "cudaRestore": {
        "pids": [31],
        "sourceGpuUuids": ["GPU-1", "GPU-2"],
        "sourceGpus": [
            {"uuid": "GPU-1", "productName": "NVIDIA H200"},
            {"uuid": "GPU-2", "productName": "NVIDIA B200"},
        ],
        "sourceDriverVersion": "580.65.06",
    },
    "host": {"kernelVersion": "6.8.0-45-generic", "cpuArch": "amd64"},
}


def test_manifest_facts_say_what_a_snapshot_needs_and_not_where_it_came_from() -> None:
    assert facts_of_manifest(MANIFEST) == {
        "cpu.arch": "amd64",
        "kernel.release": "6.8.0-45-generic",
        "container.image": "registry.example/llm:1",
        "container.image_id": "registry.example/llm@sha256:00ff",
        "container.cpu_limit": "16",
        "container.memory_limit": "128Gi",
        "gpu.count": "2",
        "gpu.driver_version": "580.65.06",
        "gpu.products": "NVIDIA B200,NVIDIA H200",
    }


def test_a_manifest_that_tells_nothing_gives_no_facts() -> None:
    assert facts_of_manifest({}) == {}
    assert facts_of_manifest({"host": None, "k8s": {"image": ""}, "cudaRestore": {}}) == {}


def test_gpu_products_are_unknown_unless_all_are_known() -> None:
    gpus = [{"uuid": "GPU-1", "productName": "NVIDIA H200"}, {"uuid": "GPU-2"}]
    assert facts_of_manifest({"cudaRestore": {"sourceGpus": gpus}}) == {"gpu.count": "2"}
    uuids = {"sourceGpuUuids": ["GPU-1", "GPU-2", "GPU-3"]}
    assert facts_of_manifest({"cudaRestore": uuids}) == {"gpu.count": "3"}


@pytest.mark.parametrize(
    "manifest",
    [
        {"host": []},
        {"host": {"cpuArch": ["amd64"]}},
        {"host": {"cpuArch": 6.8}},
        {"host": {"cpuArch": True}},
        {"host": {"cpuArch": "a\nb"}},
        {"host": {"cpuArch": "a" * 2000}},
        {"cudaRestore": {"sourceGpus": "GPU-1"}},
        {"cudaRestore": {"sourceGpuUuids": ["GPU-1"] * 1025}},
        {"cudaRestore": {"sourceGpus": [{"productName": "a" * 1000}] * 20}},
        {"k8s": {"cpuLimit": 1 << 20_000}},
    ],
)
def test_a_manifest_of_another_shape_is_refused(manifest: dict[str, object]) -> None:
    with pytest.raises(InvalidImage, match=r"manifest\.yaml"):
        facts_of_manifest(manifest)
