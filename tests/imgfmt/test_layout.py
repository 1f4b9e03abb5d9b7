"""Keys are those of SPEC.md section 8, and are read back as what they were made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput

NAME = bytes(range(16))
DIGITS = "000102030405060708090a0b0c0d0e0f"
DIGEST = Digest(bytes(range(32)))
PARTS = st.from_regex(r"[a-z0-9]{1,4}([._-]{1,2}[a-z0-9]{1,4}){0,2}", fullmatch=True)
NAMES = st.lists(PARTS, min_size=1, max_size=3).map("/".join)
TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)


def test_keys_are_those_of_the_specification() -> None:
    assert layout.STORE_KEY == "store.msgpack"
    assert layout.pack_key(NAME) == f"packs/00/{DIGITS}"
    assert layout.tree_key(DIGEST) == f"trees/{DIGEST.hex}"
    assert layout.placement_key(DIGEST) == f"placements/{DIGEST.hex}"
    assert layout.image_key(DIGEST) == f"images/{DIGEST.hex}"
    assert layout.segment_key(NAME) == f"index/{DIGITS}"
    assert layout.lease_key(NAME) == f"leases/{DIGITS}"
    assert layout.doomed_key(NAME) == f"doomed/{DIGITS}"
    assert layout.verdict_key(NAME) == f"doomed/{DIGITS}.verdict"


def test_every_key_lies_under_its_prefix() -> None:
    assert layout.pack_key(NAME).startswith(layout.PACKS)
    assert layout.tree_key(DIGEST).startswith(layout.TREES)
    assert layout.placement_key(DIGEST).startswith(layout.PLACEMENTS)
    assert layout.image_key(DIGEST).startswith(layout.IMAGES)
    assert layout.reference_prefix("a", "b").startswith(layout.REFS)
    assert layout.segment_key(NAME).startswith(layout.INDEX)
    assert layout.lease_key(NAME).startswith(layout.LEASES)
    assert layout.verdict_key(NAME).startswith(layout.DOOMED)


def test_a_reference_is_a_folder_of_generations() -> None:
    assert layout.reference_prefix("team/llama", "v3") == "refs/team+llama/v3/"
    assert layout.generation_key("team/llama", "v3", 7) == "refs/team+llama/v3/0000000000000007"
    assert layout.reference_prefix("_volumes/pvc-1", "latest") == "refs/_volumes+pvc-1/latest/"


@given(NAMES, TAGS, st.integers(0, layout.MAX_GENERATION))
def test_a_generation_key_is_read_back(name: str, tag: str, generation: int) -> None:
    key = layout.generation_key(name, tag, generation)
    assert layout.parse_generation_key(key) == (name, tag, generation)


@given(st.binary(min_size=16, max_size=16))
def test_a_pack_key_is_read_back(name: bytes) -> None:
    assert layout.pack_name_of(layout.pack_key(name)) == name


@pytest.mark.parametrize(
    "key",
    [
        f"packs/01/{DIGITS}",
        f"packs/00/{DIGITS.upper()}",
        f"packs/00/{DIGITS}0",
        f"packs/00/{DIGITS}\n",
        f"packs/{DIGITS}",
        f"index/{DIGITS}",
        "",
    ],
)
def test_other_keys_are_of_no_pack(key: str) -> None:
    assert layout.pack_name_of(key) is None


def test_the_digest_of_a_key_is_read_back() -> None:
    for key in (layout.tree_key, layout.placement_key, layout.image_key):
        assert layout.digest_of_key(key(DIGEST)) == DIGEST
    assert layout.digest_of_key(f"trees/{DIGEST.hex[:-1]}") is None
    assert layout.digest_of_key(f"refs/{DIGEST.hex}") is None


@pytest.mark.parametrize(
    "key",
    [
        "refs/a/b/1",
        "refs/a/b/00000000000000001",
        "refs/a/b/000000000000000x",
        "refs/a/b/.0000000000000001.tmp",
        "refs/A/b/0000000000000001",
        "refs/a/.b/0000000000000001",
        "refs/a++b/c/0000000000000001",
        "refs/a/b/c/0000000000000001",
        "refs/a/b/0000000000000001\n",
        "trees/a/b/0000000000000001",
    ],
)
def test_other_keys_are_of_no_generation(key: str) -> None:
    assert layout.parse_generation_key(key) is None


def test_a_key_can_not_leave_its_prefix() -> None:
    for name, tag in (("../x", "v1"), ("a", "../../x"), ("a+b", "v1"), ("a", "..")):
        with pytest.raises(InvalidInput):
            layout.generation_key(name, tag, 1)


def test_names_and_generations_out_of_range_have_no_key() -> None:
    with pytest.raises(InvalidInput, match="16 bytes"):
        layout.pack_key(b"short")
    for generation in (-1, layout.MAX_GENERATION + 1):
        with pytest.raises(InvalidInput, match="generation"):
            layout.generation_key("a", "b", generation)
