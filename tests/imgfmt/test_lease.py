"""Leases, doomed objects and verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import lease as leases
from imgfmt.digest import Digest
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.lease import Decision, Doomed, Lease, ObjectKind, Verdict
from imgfmt.wire import encode_record, encode_table
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, joined, peak_bytes

IDS = st.binary(min_size=16, max_size=16)
DIGESTS = st.binary(min_size=32, max_size=32).map(Digest)
EPOCH = bytes(range(16))


def encode_doomed(columns: dict[str, Any], **head: Any) -> bytes:
    return joined(encode_table(leases.LAYOUT, {"epoch": EPOCH} | head, columns))


def good_columns() -> dict[str, Any]:
    return {
        "pack": np.array([[1] * 16], "u1"),
        "object_kind": np.array([0, 2], "u1"),
        "object": np.array([[3] * 32, [4] * 32], "u1"),
    }


@given(
    st.builds(
        Lease,
        id=IDS,
        purpose=st.text(max_size=5),
        who=st.text(max_size=5),
        ttl_s=st.integers(1, leases.MAX_SECONDS),
        renewal=st.integers(0, 2**63 - 1),
    )
)
def test_a_lease_is_read_back(lease: Lease) -> None:
    assert Lease.decode(lease.encode(), "lease 00") == lease


def test_the_longest_lease_is_accepted() -> None:
    assert Lease(EPOCH, "", "", leases.MAX_SECONDS, 2**63 - 1).ttl_s == 2**32 - 1


@given(IDS, st.sampled_from(Decision), st.text(max_size=5))
def test_a_verdict_is_read_back(epoch: bytes, decision: Decision, who: str) -> None:
    verdict = Verdict(epoch, decision, who)
    assert Verdict.decode(verdict.encode(), "verdict 00") == verdict


@given(
    IDS,
    st.frozensets(IDS, max_size=5),
    st.frozensets(st.tuples(st.sampled_from(ObjectKind), DIGESTS), max_size=5),
)
def test_what_is_doomed_is_read_back_and_has_one_form(
    epoch: bytes, packs: frozenset[bytes], objects: frozenset[tuple[ObjectKind, Digest]]
) -> None:
    doomed = Doomed(epoch, packs, objects)
    raw = joined(doomed.encode())
    assert Doomed.decode(raw, "doomed 00") == doomed
    again = Doomed(epoch, frozenset(sorted(packs)[::-1]), frozenset(sorted(objects)[::-1]))
    assert joined(again.encode()) == raw


def test_what_is_doomed_is_told_by_kind_and_digest() -> None:
    found = Doomed.decode(encode_doomed(good_columns()), "doomed 00")
    assert found.epoch == EPOCH
    assert found.packs == {bytes([1] * 16)}
    assert found.objects == {
        (ObjectKind.TREE, Digest(bytes([3] * 32))),
        (ObjectKind.IMAGE, Digest(bytes([4] * 32))),
    }


def test_damage_is_refused_or_is_canonical() -> None:
    lease = Lease(EPOCH, "push", "me", 60)
    check_damage(lease.encode(), lambda raw: Lease.decode(raw, "lease"), Lease.encode)
    verdict = Verdict(EPOCH, Decision.CANCEL, "me")
    check_damage(verdict.encode(), lambda raw: Verdict.decode(raw, "verdict"), Verdict.encode)


def test_damage_to_what_is_doomed_is_refused_or_is_read() -> None:
    def decode(raw: bytes) -> bytes:
        Doomed.decode(raw, "doomed")
        return raw

    # Its columns have no order, so what is read may be written in another.
    assert check_damage(encode_doomed(good_columns()), decode, lambda raw: raw) > 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": b"short"}, "not a binary string of 16"),
        ({"purpose": 1}, "not a string"),
        ({"ttl_s": 0}, "'ttl_s' is not an integer from 1"),
        ({"ttl_s": 2**32}, "'ttl_s' is not an integer from 1"),
        ({"renewal": -1}, "'renewal' is not an integer from 0"),
        ({"more": 1}, "unknown key"),
    ],
)
def test_a_lease_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    fields = {"id": EPOCH, "purpose": "", "who": "", "ttl_s": 1, "renewal": 0}
    with pytest.raises(InvalidImage, match=f"^lease 00: .*{message}"):
        Lease.decode(encode_record("lease", fields | change), "lease 00")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": b"short"}, "not a binary string of 16"),
        ({"verdict": "spare"}, "neither delete nor cancel"),
        ({"more": 1}, "unknown key"),
    ],
)
def test_a_verdict_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    fields = {"epoch": EPOCH, "verdict": "delete", "who": ""}
    with pytest.raises(InvalidImage, match=f"^verdict 00.*{message}"):
        Verdict.decode(encode_record("verdict", fields | change), "verdict 00")


@pytest.mark.parametrize(
    ("change", "head", "message"),
    [
        ({"object_kind": np.zeros(1, "u1")}, {}, "have no kind"),
        ({"object_kind": np.array([0, 3], "u1")}, {}, "one that is not known"),
        ({"pack": np.zeros((leases.MAX_DOOMED + 1, 16), "u1")}, {}, "more than 65536"),
        (
            {
                "object_kind": np.zeros(leases.MAX_DOOMED + 1, "u1"),
                "object": np.zeros((leases.MAX_DOOMED + 1, 32), "u1"),
            },
            {},
            "more than 65536",
        ),
        ({}, {"epoch": b"short"}, "not a binary string of 16"),
        ({}, {"more": 1}, "unknown key"),
    ],
)
def test_a_doomed_table_that_breaks_a_rule_is_refused(
    change: dict[str, Any], head: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidImage, match=f"^doomed 00: .*{message}"):
        Doomed.decode(encode_doomed(good_columns() | change, **head), "doomed 00")


@pytest.mark.slow
def test_the_largest_doomed_table_costs_at_most_four_times_its_size() -> None:
    n_rows = leases.MAX_DOOMED
    numbers = np.arange(n_rows, dtype="u8")
    columns = {
        "pack": np.repeat(numbers, 2).view("u1").reshape(-1, 16),
        "object_kind": np.zeros(n_rows, "u1"),
        "object": np.repeat(numbers, 4).view("u1").reshape(-1, 32),
    }
    raw = encode_doomed(columns)
    found = Doomed.decode(raw, "doomed")
    assert len(found.packs) == len(found.objects) == n_rows
    peak = peak_bytes(lambda: Doomed.decode(raw, "doomed"))
    assert peak < 4 * len(raw) + ALLOWED_EXTRA_BYTES


def test_what_can_not_be_is_not_made() -> None:
    too_many = frozenset(n.to_bytes(16) for n in range(leases.MAX_DOOMED + 1))
    trees = frozenset((ObjectKind.TREE, Digest(name * 2)) for name in too_many)
    for make in (
        lambda: Lease(b"", "", "", 1),
        lambda: Lease(EPOCH, "", "", 0),
        lambda: Lease(EPOCH, "", "", leases.MAX_SECONDS + 1),
        lambda: Lease(EPOCH, "", "", 1, renewal=-1),
        lambda: Lease(EPOCH, "", "", 1, renewal=2**63),
        lambda: Verdict(b"", Decision.DELETE, ""),
        lambda: Doomed(b""),
        lambda: Doomed(EPOCH, frozenset({b"short"})),
        lambda: Doomed(EPOCH, too_many),
        lambda: Doomed(EPOCH, objects=trees),
    ):
        with pytest.raises(InvalidInput):
            make()
