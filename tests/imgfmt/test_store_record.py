"""The store record: who may read, write and delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.store_record import DELETE_FEATURES, WRITE_FEATURES, NewChunks, StoreRecord
from imgfmt.wire import encode_record
from tests.imgfmt.hostile import check_damage

STORE = StoreRecord(uuid=bytes(range(16)), concurrent_writers=True)
FEATURES = st.lists(st.text(max_size=5), max_size=3, unique=True).map(lambda x: tuple(sorted(x)))


def fields_of(**change: Any) -> dict[str, Any]:
    return {
        "uuid": bytes(16),
        "write": ["lease-1"],
        "delete": ["doomed-1"],
        "profile": "page-cdc-1",
        "page_bytes": 4096,
        "pack_bytes": 128 << 20,
        "codec": "auto",
        "history_s": 2_592_000,
        "lease_ttl_s": 3600,
        "concurrent_writers": True,
    } | change


@given(
    st.builds(
        StoreRecord,
        uuid=st.binary(min_size=16, max_size=16),
        concurrent_writers=st.booleans(),
        write=FEATURES,
        delete=FEATURES,
        page_bytes=st.sampled_from([4096, 16384, 65536]),
        pack_bytes=st.integers(65536, 2**32 - 1),
        codec=st.sampled_from(NewChunks),
        history_s=st.integers(0, 2**32 - 1),
        lease_ttl_s=st.integers(1, 2**32 - 1),
    )
)
def test_a_record_is_read_back(record: StoreRecord) -> None:
    assert StoreRecord.decode(record.encode(), "store") == record


def test_a_new_store_needs_what_version_1_knows_and_keeps_history_for_30_days() -> None:
    assert STORE.read == ()
    assert set(STORE.write) == WRITE_FEATURES == {"lease-1"}
    assert set(STORE.delete) == DELETE_FEATURES == {"doomed-1"}
    assert STORE.history_s == 30 * 24 * 3600
    assert STORE.encode() == encode_record("store", fields_of(uuid=STORE.uuid))
    STORE.check_deletable()


def test_settings_up_to_their_limits_are_accepted() -> None:
    longest = replace(STORE, history_s=2**32 - 1, lease_ttl_s=2**32 - 1, pack_bytes=2**32 - 1)
    assert StoreRecord.decode(longest.encode(), "store") == longest
    shortest = replace(STORE, history_s=0, lease_ttl_s=1, pack_bytes=STORE.page_bytes)
    assert StoreRecord.decode(shortest.encode(), "store") == shortest


def test_a_feature_to_be_read_stops_everybody() -> None:
    newer = replace(STORE, read=("cipher-1",))
    with pytest.raises(Unsupported, match="'cipher-1'"):
        StoreRecord.decode(newer.encode(), "store")
    for check in (newer.check_readable, newer.check_writable, newer.check_deletable):
        with pytest.raises(Unsupported, match="reading this store needs the feature 'cipher-1'"):
            check()


def test_a_feature_to_be_written_stops_writers_and_collectors() -> None:
    newer = StoreRecord.decode(replace(STORE, write=("lease-1", "lock-2")).encode(), "store")
    newer.check_readable()
    for check in (newer.check_writable, newer.check_deletable):
        with pytest.raises(Unsupported, match="writing to this store needs the feature 'lock-2'"):
            check()


def test_a_feature_to_delete_stops_collectors_only() -> None:
    newer = StoreRecord.decode(replace(STORE, delete=("doomed-2",)).encode(), "store")
    newer.check_writable()
    with pytest.raises(Unsupported, match="deleting from this store needs the feature 'doomed-2'"):
        newer.check_deletable()


def test_damage_is_refused_or_is_canonical() -> None:
    check_damage(STORE.encode(), lambda raw: StoreRecord.decode(raw, "store"), StoreRecord.encode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uuid": b"short"}, "not a binary string of 16"),
        ({"page_bytes": 8192}, "page_bytes 8192"),
        ({"pack_bytes": 2**32}, "pack_bytes 4294967296"),
        ({"pack_bytes": 4095}, "pack_bytes 4095"),
        ({"codec": "lz4"}, "codec 'lz4'"),
        ({"history_s": 2**32}, "history_s or lease_ttl_s"),
        ({"lease_ttl_s": 0}, "history_s or lease_ttl_s"),
        ({"lease_ttl_s": 2**32}, "history_s or lease_ttl_s"),
        ({"concurrent_writers": 1}, "not a boolean"),
        ({"write": ["b", "a"]}, "do not ascend"),
        ({"delete": ["a", "a"]}, "do not ascend"),
        ({"write": [1]}, "not an array of strings"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_record_that_breaks_a_rule_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidImage, match=f"^store x: .*{message}"):
        StoreRecord.decode(encode_record("store", fields_of(**change)), "store x")


def test_another_profile_is_unsupported() -> None:
    raw = encode_record("store", fields_of(profile="page-cdc-2"))
    with pytest.raises(Unsupported, match="store x cuts by 'page-cdc-2'"):
        StoreRecord.decode(raw, "store x")
    with pytest.raises(InvalidInput, match="profile"):
        replace(STORE, profile="page-cdc-2")
    with pytest.raises(InvalidInput, match="uuid"):
        replace(STORE, uuid=b"")
