"""The probe record: read back as written, with whatever later versions try."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.errors import InvalidImage
from imgfmt.probe_record import ProbeRecord
from imgfmt.wire import encode_record


@given(st.integers(0, 2**63 - 1), st.dictionaries(st.text(max_size=20), st.text(max_size=20)))
def test_a_record_reads_back(time_ns: int, found: dict[str, str]) -> None:
    record = ProbeRecord(time_ns, found)
    assert ProbeRecord.decode(record.encode(), "probe") == record


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_ns": -1}, "'time_ns' is not an integer"),
        ({"found": ["ranges"]}, "'found' is not a map"),
        ({"found": {"ranges": True}}, "'found' holds something that is not a string"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_what_breaks_the_spec_is_refused(change: dict[str, object], said: str) -> None:
    raw = encode_record("probe", {"time_ns": 1, "found": {}} | change)
    with pytest.raises(InvalidImage, match=said):
        ProbeRecord.decode(raw, "probe")
