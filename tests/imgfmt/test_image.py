"""Images and variants: canonical records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import image as images
from imgfmt.digest import Digest
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.image import Image, Member, Variant, Variants, pairs
from imgfmt.rules import Op, Rule
from imgfmt.wire import encode_record
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, peak_bytes

TREE = Digest(bytes(range(32)))
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
TEXT = st.text(max_size=4)
PAIRS = st.dictionaries(TEXT, TEXT, max_size=3).map(pairs)
RULES = st.builds(
    Rule, st.text(min_size=1, max_size=3), st.sampled_from([Op.EQUAL, Op.SUBSET]), TEXT
)
MEMBERS = st.builds(
    Member,
    name=st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?", fullmatch=True),
    tree=DIGESTS,
    role=TEXT,
    mount_path=st.sampled_from(["", "/", "/data/é"]),
    provenance=PAIRS,
)
IMAGES = st.builds(
    Image,
    members=st.lists(MEMBERS, min_size=1, max_size=3, unique_by=lambda m: m.name).map(
        lambda found: tuple(sorted(found, key=lambda m: m.name))
    ),
    compat=st.lists(RULES, max_size=3, unique=True).map(lambda rules: tuple(sorted(rules))),
    annotations=PAIRS,
)
VARIANTS = st.builds(
    Variants,
    st.lists(
        st.builds(Variant, DIGESTS, st.lists(RULES, max_size=2).map(tuple)), min_size=1, max_size=3
    ).map(tuple),
)


@given(IMAGES)
def test_an_image_is_read_back(image: Image) -> None:
    raw = image.encode()
    assert images.decode_image(raw, "image 00") == image
    assert images.decode_image_or_variants(raw, "image 00") == image
    with pytest.raises(InvalidImage, match="record of kind 'image'"):
        images.decode_variants(raw, "image 00")


@given(VARIANTS)
def test_variants_are_read_back(variants: Variants) -> None:
    raw = variants.encode()
    assert images.decode_variants(raw, "image 00") == variants
    assert images.decode_image_or_variants(raw, "image 00") == variants
    with pytest.raises(InvalidImage, match="record of kind 'variants'"):
        images.decode_image(raw, "image 00")


def test_equal_images_have_one_hash_and_equal_bytes() -> None:
    def make(facts: dict[str, str]) -> Image:
        return Image((Member("a", TREE, provenance=pairs(facts)),), annotations=pairs(facts))

    one, other = make({"b": "1", "a": "2"}), make({"a": "2", "b": "1"})
    assert hash(one) == hash(other)
    assert one.encode() == other.encode()
    assert dict(one.annotations) == {"a": "2", "b": "1"}


def test_damage_is_refused_or_is_canonical() -> None:
    member = Member("a", TREE, "rank", "/data", pairs({"criu": "4.1"}))
    image = Image((member,), (Rule.parse("driver>=550.54"),), pairs({"note": "x"}))
    check_damage(image.encode(), lambda raw: images.decode_image(raw, "image"), Image.encode)
    variants = Variants((Variant(TREE, image.compat), Variant(TREE)))
    check_damage(variants.encode(), lambda raw: images.decode_variants(raw, "v"), Variants.encode)


def fields_of(**change: Any) -> dict[str, Any]:
    member = {"name": "a", "role": "", "mount_path": "", "tree": bytes(32), "provenance": {}}
    member |= change.pop("member", {})
    return {"members": [member], "compat": [], "annotations": {}} | change


MEMBER = fields_of()["members"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"members": []}, "1 to 1024 members, not 0"),
        ({"members": [MEMBER, MEMBER]}, "members of an image do not ascend"),
        ({"members": [MEMBER | {"name": "b"}, MEMBER]}, "members of an image do not ascend"),
        ({"members": [MEMBER] * 1025}, "at most 1024"),
        ({"members": [1]}, "not an array of maps"),
        ({"member": {"name": "_volumes/x"}}, "is not a name"),
        ({"member": {"tree": b"short"}}, "not a binary string of 32"),
        ({"member": {"role": 1}}, "not a string"),
        ({"member": {"mount_path": "data"}}, "not an absolute path"),
        ({"member": {"mount_path": "/a\0"}}, "not an absolute path"),
        ({"member": {"mount_path": "/" + "é" * 2048}}, "not an absolute path"),
        ({"member": {"provenance": {"a": 1}}}, "not a string"),
        ({"member": {"provenance": {str(n): "" for n in range(257)}}}, "at most 256"),
        ({"member": {"more": 1}}, "unknown key 'more'"),
        ({"compat": [["b", "equal", ""], ["a", "equal", ""]]}, "rules of an image do not ascend"),
        ({"compat": [["a", "equal", ""]] * 2}, "rules of an image do not ascend"),
        ({"compat": [5]}, "not three strings"),
        ({"compat": ["abc"]}, "not three strings"),
        ({"compat": [["a", "equal"]]}, "not three strings"),
        ({"compat": [["a", "equal", 1]]}, "not three strings"),
        ({"compat": [["a", "below", ""]]}, "compares by 'below'"),
        ({"compat": [["", "equal", ""]]}, "names no fact"),
        ({"compat": [["a", "at-least", "new"]]}, "not dotted numbers"),
        ({"compat": [["a", "equal", ""]] * 257}, "at most 256"),
        ({"annotations": {"a": 1}}, "not a string"),
        ({"annotations": {str(n): "" for n in range(257)}}, "at most 256"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_an_image_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    raw = encode_record("image", fields_of(**change))
    with pytest.raises(InvalidImage, match=f"^image 00: .*{message}"):
        images.decode_image(raw, "image 00")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "1 to 256 images, not 0"),
        ([{"digest": bytes(32), "when": []}] * 257, "at most 256"),
        ([{"digest": b"short", "when": []}], "not a binary string of 32"),
        ([{"digest": bytes(32), "when": [["a", "equal", ""]] * 257}], "at most 256"),
        ([{"digest": bytes(32), "when": [], "more": 1}], "unknown key 'more'"),
        ([{"digest": bytes(32)}], "'when' is missing"),
    ],
)
def test_variants_that_break_a_rule_are_refused(found: list[Any], message: str) -> None:
    with pytest.raises(InvalidImage, match=f"^image 00: .*{message}"):
        images.decode_variants(encode_record("variants", {"images": found}), "image 00")


def test_counts_up_to_their_limits_are_accepted() -> None:
    facts = pairs({f"{n:03}": "" for n in range(256)})
    rules = tuple(Rule(fact, Op.EQUAL, "") for fact, _ in facts)
    image = Image((Member("a", TREE, mount_path="/" + "a" * 4094),), rules, facts)
    assert images.decode_image(image.encode(), "image") == image
    variants = Variants((Variant(TREE, rules), *(Variant(TREE) for _ in range(255))))
    assert images.decode_variants(variants.encode(), "image") == variants
    many = Image(tuple(Member(f"{n:04}", TREE) for n in range(1024)))
    assert images.decode_image(many.encode(), "image") == many


def test_variants_with_unknown_keys_are_refused() -> None:
    fields = {"images": [{"digest": bytes(32), "when": []}], "more": 1}
    with pytest.raises(InvalidImage, match="unknown key 'more'"):
        images.decode_variants(encode_record("variants", fields), "image 00")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Image(()),
        lambda: Image((Member("b", TREE), Member("a", TREE))),
        lambda: Member("a", TREE, provenance=(("b", ""), ("a", ""))),
        lambda: Member("a", TREE, provenance=pairs({str(n): "" for n in range(257)})),
        lambda: Member("a", TREE, mount_path="\udc80"),
        lambda: Member("a", TREE, mount_path="/\udc80"),
        lambda: Member("a", TREE, role="\udc80"),
        lambda: Member("a", TREE, role=3),  # type: ignore[arg-type]
        lambda: Member("a", TREE, provenance=(("a", 3),)),  # type: ignore[arg-type]
        lambda: Image((Member("a", TREE),), annotations=(("a", b"3"),)),  # type: ignore[arg-type]
        lambda: Image((Member("a", TREE),), annotations=(("b", ""), ("a", ""))),
        lambda: Image((Member("a", TREE),), annotations=(("a", ""), ("a", ""))),
        lambda: Image(
            (Member("a", TREE),), tuple(Rule(f"{n:03}", Op.EQUAL, "") for n in range(257))
        ),
        lambda: Variant(TREE, (Rule("a", Op.EQUAL, ""),) * 257),
        lambda: Variants(()),
        lambda: Variants((Variant(TREE),) * 257),
    ],
)
def test_what_no_store_may_hold_is_not_made(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput):
        make()


def test_an_image_full_of_small_text_costs_little_memory() -> None:
    provenance = {f"{n:02x}": "" for n in range(190)}
    members = [
        {"name": f"{n:03}", "role": "", "mount_path": "", "tree": bytes(32)}
        | {"provenance": provenance}
        for n in range(220)
    ]
    raw = encode_record("image", {"members": members, "compat": [], "annotations": {}})
    assert len(raw) > 170_000
    peak = peak_bytes(lambda: images.decode_image(raw, "image"))
    assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES
