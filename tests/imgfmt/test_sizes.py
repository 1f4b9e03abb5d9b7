"""Sizes of objects are told from their kind and their beginning."""

from __future__ import annotations

import msgpack
import pytest

from imgfmt import layout
from imgfmt.digest import digest_of
from imgfmt.errors import InvalidImage
from imgfmt.lease import Doomed
from imgfmt.sizes import check_size
from imgfmt.wire import MAX_RECORD_BYTES

TREE = layout.tree_key(digest_of(b""))
DOOMED = layout.doomed_key(bytes(16))
IMAGE = layout.image_key(digest_of(b""))


def test_a_table_is_as_long_as_its_head_claims() -> None:
    packs = frozenset(number.to_bytes(16, "big") for number in range(1001))
    raw = b"".join(Doomed(bytes(16), packs, frozenset()).encode())
    check_size(DOOMED, len(raw), raw[:1000], "it")
    for size_bytes in (len(raw) - 1, len(raw) + 1, 1 << 40):
        with pytest.raises(InvalidImage, match=f"it has {size_bytes} bytes, its head claims"):
            check_size(DOOMED, size_bytes, raw[:1000], "it")


@pytest.mark.parametrize("key", [IMAGE, layout.STORE_KEY, layout.verdict_key(bytes(16))])
def test_a_record_has_a_limit(key: str) -> None:
    check_size(key, MAX_RECORD_BYTES, b"", "it")
    with pytest.raises(InvalidImage, match=f"at most {MAX_RECORD_BYTES}"):
        check_size(key, MAX_RECORD_BYTES + 1, b"", "it")


@pytest.mark.parametrize(
    "head",
    [None, 1, [], {}, {"columns": 1}, {"columns": [1]}, {"columns": [["a", 1, float("inf")]]},
     {"columns": [["a", "b", "c"]]}, {1: 2}],
)  # fmt: skip
def test_a_head_that_is_none_is_invalid(head: object) -> None:
    packed = msgpack.packb(head)
    raw = b"SNAPTBL1" + len(packed).to_bytes(4, "little") + bytes(4) + packed
    for beginning in (raw, raw[:-1], b"", bytes(1000)):
        with pytest.raises(InvalidImage, match="it "):
            check_size(TREE, 1 << 40, beginning, "it")
