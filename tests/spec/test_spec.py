"""SPEC.md's examples are what the code makes, and what the code reads."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from imgfmt import index, placement
from imgfmt.digest import Digest
from imgfmt.image import decode_image
from imgfmt.pack import check_header, decode_table, parse_footer
from imgfmt.reference import ReferenceRecord
from imgfmt.tree import Tree

SPEC = Path(__file__).parents[2] / "SPEC.md"
BLOCKS = {
    lines[0]: lines[1:]
    for found in re.findall(r"```vector\n(.*?)\n```", SPEC.read_text("utf-8"), re.DOTALL)
    if (lines := found.split("\n"))
}


def load_vectors() -> ModuleType:
    path = Path(__file__).with_name("vectors.py")
    spec = importlib.util.spec_from_file_location("spec_vectors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["spec_vectors"] = module
    spec.loader.exec_module(module)
    return module


vectors = load_vectors()


def raw_of(name: str) -> bytes:
    return bytes.fromhex("".join(line for line in BLOCKS[name] if not line.startswith("digest")))


def digest_of_block(name: str) -> Digest:
    return Digest.parse(BLOCKS[name][-1].removeprefix("digest "))


def test_spec_has_every_vector_and_no_other() -> None:
    assert sorted(BLOCKS) == sorted(vectors.VECTORS)


@pytest.mark.parametrize("name", sorted(vectors.VECTORS))
def test_a_vector_of_spec_is_what_the_code_makes(name: str) -> None:
    assert BLOCKS[name] == vectors.VECTORS[name]()


def test_the_tree_of_spec_reads_as_described() -> None:
    tree = Tree(raw_of("tree"), "the example")
    assert [tree.path(i) for i in range(tree.n_entries)] == [b"", b"a", b"b"]
    assert tree.entry(2).target == b"a"
    assert tree.chunk_bytes.tolist() == [5]
    assert tree.logical_bytes == 5


def test_the_image_of_spec_names_the_tree_of_spec() -> None:
    (member,) = decode_image(raw_of("image"), "the example").members
    assert member.tree == digest_of_block("tree")


def test_the_pack_of_spec_holds_the_chunk_where_it_says() -> None:
    name = vectors.PACK_NAME
    check_header(raw_of("pack-header") + bytes(4096 - 32), name, 4096, "the example")
    offset, length, digest = parse_footer(raw_of("pack-footer"), 12288, "the example")
    table = decode_table(raw_of("pack-table")[:length], name, digest, 4096, offset, "the example")
    assert table.offsets.tolist() == [4096]
    assert table.names.tobytes() in raw_of("tree")


def test_the_placement_and_index_of_spec_point_into_the_pack_of_spec() -> None:
    placed = placement.decode(raw_of("placement"), "the example")
    assert placed.tree == digest_of_block("tree")
    assert placed.packs[0].tobytes() == vectors.PACK_NAME
    assert placed.run_offset.tolist() == [4096]
    segment = index.decode(raw_of("index"), "the example")
    assert segment.packs[0].tobytes() == vectors.PACK_NAME
    assert segment.entry_row.tolist() == [0]


def test_the_reference_of_spec_points_to_the_image_of_spec() -> None:
    record = ReferenceRecord.decode(raw_of("reference"), "the example")
    assert (record.name, record.tag) == ("demo", "v1")
    assert record.target == digest_of_block("image")
