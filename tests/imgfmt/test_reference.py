"""References: their grammar, what users write, and the record of one generation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import reference
from imgfmt.digest import Digest
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.reference import (
    MAX_HISTORY,
    ImageRef,
    PastTarget,
    ReferenceRecord,
    TargetKind,
    check_name,
    check_tag,
    parse_reference,
)
from imgfmt.wire import encode_record
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, peak_bytes

HEX = "0123456789abcdef" * 4
DIGEST = Digest(bytes.fromhex(HEX))
DAY_NS = 86_400 * 1_000_000_000
NAMES = st.from_regex(r"[a-z0-9]{1,3}([._-]{1,2}[a-z0-9]{1,3}){0,2}", fullmatch=True)
TAGS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,6}", fullmatch=True)
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
TARGETS = st.one_of(
    st.tuples(st.sampled_from([TargetKind.IMAGE, TargetKind.VARIANTS]), DIGESTS),
    st.just((TargetKind.NONE, None)),
)
TIMES = st.integers(0, reference.MAX_TIME_NS)
HISTORY = st.lists(st.builds(lambda t, ns: PastTarget(t[0], t[1], ns), TARGETS, TIMES), max_size=4)
RECORDS = st.builds(
    lambda name, tag, target, write_id, time_ns, who, history: ReferenceRecord(
        name, tag, target[0], target[1], write_id, time_ns, who, tuple(history)
    ),
    NAMES,
    TAGS,
    TARGETS,
    st.binary(min_size=16, max_size=16),
    TIMES,
    st.text(max_size=9),
    HISTORY,
)


def make_record(n: int, *, history: tuple[PastTarget, ...] = ()) -> ReferenceRecord:
    return ReferenceRecord(
        "team/llama", "v3", TargetKind.IMAGE, digest(n), bytes([n] * 16), n * DAY_NS, "me", history
    )


def digest(n: int) -> Digest:
    return Digest(bytes([n] * 32))


@pytest.mark.parametrize(
    "name", ["a", "a0", "a.b", "a__b", "a--b", "team/llama-3.1_70b", "a" * 200]
)
def test_names_of_the_grammar_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "/", "a/", "/a", "a//b", "A", "a.", ".a", "-a", "a+b", "é", "..", "a/../b", "_a"),
        *("a\n", "a b", "a" * 201, "_volumes/x"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name)


def test_reserved_names_pass_only_where_they_are_asked_for() -> None:
    check_name("_volumes/pvc-12", reserved=True)
    for name in ("_", "__a", "a/_b", "_volumes/_x", "_" + "a" * 200):
        with pytest.raises(InvalidInput):
            check_name(name, reserved=True)


def test_tags_follow_their_grammar() -> None:
    for tag in ("v1", "_", "A.b-c", "1" * 128):
        check_tag(tag)
    for tag in ("", ".a", "-a", "a/b", "a b", "a\n", "1" * 129):
        with pytest.raises(InvalidInput):
            check_tag(tag)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llama", ImageRef(name="llama")),
        ("team/llama:v3", ImageRef(name="team/llama", tag="v3")),
        ("_volumes/x:latest", ImageRef(name="_volumes/x", tag="latest")),
        (f"llama@blake3:{HEX}", ImageRef(name="llama", digest=DIGEST)),
        (f"blake3:{HEX}", ImageRef(digest=DIGEST)),
        (f"@blake3:{HEX}", ImageRef(digest=DIGEST)),
        ("@blake3:01234567", ImageRef(digest_prefix="01234567")),
        ("blake3:012345678", ImageRef(digest_prefix="012345678")),
        ("llama@blake3:01234567", ImageRef(name="llama", digest_prefix="01234567")),
    ],
)
def test_what_users_write_is_understood(text: str, expected: ImageRef) -> None:
    assert parse_reference(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "llama:", ":v1", "@", "llama@", "llama@v1", "llama:v1@blake3:01234567", "a:b:c"),
        *("blake3", "blake3:", "blake3:v1", "blake3:0123456", "@blake3:0123456", "@01234567"),
        *(f"blake3:{HEX}0", f"blake3:{HEX.upper()}", "blake3:01234567\n", "a@blake3:01234567@b"),
        "@blake3:blake3:01234567",
    ],
)
def test_what_can_not_be_meant_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_reference(text)


@given(
    st.one_of(
        st.builds(ImageRef, name=NAMES, tag=st.none() | TAGS),
        st.builds(ImageRef, name=st.none() | NAMES, digest=DIGESTS),
        st.builds(
            ImageRef,
            name=st.none() | NAMES,
            digest_prefix=st.from_regex(r"[0-9a-f]{8,63}", fullmatch=True),
        ),
    )
)
def test_a_reference_is_read_back_as_it_is_shown(ref: ImageRef) -> None:
    assert parse_reference(str(ref)) == ref
    assert ref.by_digest == ("blake3:" in str(ref))


@given(st.text(max_size=30))
def test_no_text_fails_in_another_way(text: str) -> None:
    try:
        ref = parse_reference(text)
    except InvalidInput:
        return
    assert parse_reference(str(ref)) == ref


def test_the_tag_left_out_is_latest() -> None:
    assert ImageRef(name="a").effective_tag == "latest"
    assert ImageRef(name="a", tag="b").effective_tag == "b"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tag": "v1"},
        {"name": "a", "tag": "v1", "digest": DIGEST},
        {"name": "a", "digest_prefix": "01234567", "digest": DIGEST},
        {"digest_prefix": "0123456"},
        {"digest_prefix": HEX},
    ],
)
def test_a_reference_names_one_thing(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ImageRef(**fields)


@given(RECORDS)
def test_a_record_is_read_back(record: ReferenceRecord) -> None:
    raw = record.encode()
    assert ReferenceRecord.decode(raw, "reference a:b") == record


def test_damage_to_a_record_is_refused_or_is_canonical() -> None:
    record = make_record(2).replaced_by(TargetKind.NONE, None, bytes(16), 5, "you")
    check_damage(
        record.encode(), lambda raw: ReferenceRecord.decode(raw, "ref"), ReferenceRecord.encode
    )


def test_what_is_replaced_moves_to_the_head_of_the_history() -> None:
    first = make_record(1)
    second = first.replaced_by(TargetKind.VARIANTS, digest(2), bytes(16), 7, "you")
    third = second.replaced_by(TargetKind.NONE, None, bytes(16), 9, "you")
    assert (third.name, third.tag) == ("team/llama", "v3")
    assert (third.target_kind, third.target, third.time_ns) == (TargetKind.NONE, None, 9)
    assert third.history == (
        PastTarget(TargetKind.VARIANTS, digest(2), 9),
        PastTarget(TargetKind.IMAGE, digest(1), 7),
    )


def test_the_history_forgets_the_oldest_beyond_64() -> None:
    record = make_record(0)
    for n in range(1, MAX_HISTORY + 3):
        record = record.replaced_by(TargetKind.IMAGE, digest(n), bytes(16), n, "me")
    assert len(record.history) == MAX_HISTORY
    assert record.history[0].target == digest(MAX_HISTORY + 1)
    assert record.history[-1].target == digest(2)
    assert ReferenceRecord.decode(record.encode(), "ref") == record


def test_roots_are_the_target_and_what_was_replaced_lately() -> None:
    history = (
        PastTarget(TargetKind.NONE, None, 99 * DAY_NS),
        PastTarget(TargetKind.IMAGE, digest(1), 70 * DAY_NS + 1),
        PastTarget(TargetKind.VARIANTS, digest(2), 70 * DAY_NS),
    )
    record = make_record(3, history=history)
    assert record.roots(100 * DAY_NS, 30 * 86_400) == {digest(3), digest(1)}
    deleted = record.replaced_by(TargetKind.NONE, None, bytes(16), 100 * DAY_NS, "me")
    assert deleted.roots(100 * DAY_NS, 30 * 86_400) == {digest(3), digest(1)}


def fields_of(**change: Any) -> dict[str, Any]:
    return {
        "name": "a",
        "tag": "b",
        "target_kind": "image",
        "target": bytes(32),
        "write_id": bytes(16),
        "time_ns": 1,
        "who": "me",
        "history": [],
    } | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "A"}, "is not a name"),
        ({"tag": ""}, "is not a tag"),
        ({"target_kind": "tree"}, "'tree' is not a kind of target"),
        ({"target_kind": "none"}, "kind none needs no digest"),
        ({"target": None}, "kind image needs a digest"),
        ({"target": b"short"}, "not a binary string of 32"),
        ({"write_id": b"short"}, "not a binary string of 16"),
        ({"time_ns": 2**63}, "not an integer from 0"),
        ({"who": 1}, "not a string"),
        ({"history": [["image", bytes(32)]]}, "not kind, target and time"),
        ({"history": ["abc"]}, "not kind, target and time"),
        ({"history": [5]}, "not kind, target and time"),
        ({"history": [["image", bytes(32), "1"]]}, "time that is not an integer"),
        ({"history": [["image", bytes(31), 1]]}, "a digest has 32 bytes"),
        ({"history": [["image", "x", 1]]}, "target of the wrong type"),
        ({"history": [[1, bytes(32), 1]]}, "target of the wrong type"),
        ({"history": [["image", bytes(32), True]]}, "time that is not an integer"),
        ({"history": [["image", bytes(32), -1]]}, "time -1 ns"),
        ({"history": [["image", bytes(32), 2**63]]}, "time 9223372036854775808 ns"),
        ({"history": [["image", None, 1]]}, "kind image needs a digest"),
        ({"history": [["none", None, 1]] * 65}, "at most 64 elements"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    raw = encode_record("reference", fields_of(**change))
    with pytest.raises(InvalidImage, match=f"^ref a:b: .*{message}"):
        ReferenceRecord.decode(raw, "ref a:b")


def test_a_record_that_can_not_be_is_not_made() -> None:
    past = PastTarget(TargetKind.NONE, None, 1)
    with pytest.raises(InvalidInput, match="at most 64"):
        make_record(1, history=(past,) * 65)
    with pytest.raises(InvalidInput, match="write id"):
        ReferenceRecord("a", "b", TargetKind.NONE, None, b"", 1, "me")


def test_text_that_is_no_unicode_can_not_be_stored() -> None:
    record = ReferenceRecord("a", "b", TargetKind.NONE, None, bytes(16), 1, "\udc80")
    with pytest.raises(InvalidInput, match="reference can't be stored"):
        record.encode()


@pytest.mark.slow
def test_a_record_full_of_nonsense_costs_little_memory() -> None:
    raw = encode_record("reference", fields_of(history=[[[]] * 60_000] * 3))
    peak = peak_bytes(lambda: ReferenceRecord.decode(raw, "ref"))
    assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES
