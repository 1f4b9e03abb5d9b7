"""The probe record (SPEC.md section 6.5): what `init` saw a store do. For people, not for readers.

A record of its own, because a store record has no room for what later versions may try.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from imgfmt.digest import Octets
from imgfmt.wire import decode_record, encode_record


@dataclass(frozen=True, slots=True)
class ProbeRecord:
    """What was `found`, and when. Names that are not known here say something all the same.

    `time_ns` is by the clock of who tried, since 1970.
    """

    time_ns: int
    found: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The canonical bytes of the record."""
        return encode_record("probe", {"time_ns": self.time_ns, "found": self.found})

    @classmethod
    def decode(cls, raw: Octets, what: str) -> ProbeRecord:
        """Read a probe record. Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "probe", what)
        record = cls(time_ns=fields.integer("time_ns"), found=fields.text_map("found"))
        fields.done()
        return record
