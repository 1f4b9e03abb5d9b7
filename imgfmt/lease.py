"""Leases, doomed objects and verdicts (SPEC.md sections 6.2, 6.3): how writers and collectors meet.

Only what the records say; who writes and reads them when is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np

from imgfmt.digest import DIGEST_BYTES, Digest, Octets
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.pack import PACK_NAME_BYTES, within
from imgfmt.wire import (
    Array,
    Column,
    Layout,
    decode_record,
    decode_table,
    encode_record,
    encode_table,
)

ID_BYTES = 16
MAX_SECONDS = 2**32 - 1
MAX_DOOMED = 65_536
"""Packs, and other objects, that one epoch may doom: a reader holds them as Python objects."""

LAYOUT = Layout(
    "doomed",
    (
        Column("pack", PACK_NAME_BYTES),
        Column("object_kind", 1),
        Column("object", DIGEST_BYTES),
    ),
)


@dataclass(frozen=True, slots=True)
class Lease:
    """A writer is at work, until `ttl_s` after the store's time of the last write of this record.

    `renewal` counts up; `id` is that of the key, which is for the caller to see.
    """

    id: bytes
    purpose: str
    who: str
    ttl_s: int
    renewal: int = 0

    def __post_init__(self) -> None:
        _check_id(self.id, "lease")
        if not 1 <= self.ttl_s <= MAX_SECONDS:
            raise InvalidInput(f"a lease of {self.ttl_s} s is not from 1 to {MAX_SECONDS} s")
        if not 0 <= self.renewal < 2**63:
            raise InvalidInput(f"{self.renewal} is not a number of renewals")

    def encode(self) -> bytes:
        """The canonical bytes of the record."""
        return encode_record(
            "lease",
            {
                "id": self.id,
                "purpose": self.purpose,
                "who": self.who,
                "ttl_s": self.ttl_s,
                "renewal": self.renewal,
            },
        )

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Lease:
        """Read a lease. Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "lease", what)
        lease = cls(
            id=fields.raw("id", ID_BYTES),
            purpose=fields.text("purpose"),
            who=fields.text("who"),
            ttl_s=fields.integer("ttl_s", 1, MAX_SECONDS),
            renewal=fields.integer("renewal"),
        )
        fields.done()
        return lease


class ObjectKind(IntEnum):
    """Objects whose key is a digest. An image may be variants."""

    TREE = 0
    PLACEMENT = 1
    IMAGE = 2


@dataclass(frozen=True, slots=True)
class Doomed:
    """What a collector means to delete in an epoch; a placement is named by its tree."""

    epoch: bytes
    packs: frozenset[bytes] = frozenset()
    objects: frozenset[tuple[ObjectKind, Digest]] = frozenset()

    def __post_init__(self) -> None:
        _check_id(self.epoch, "epoch")
        if any(len(pack) != PACK_NAME_BYTES for pack in self.packs):
            raise InvalidInput(f"a pack's name has {PACK_NAME_BYTES} bytes")
        if len(self.packs) > MAX_DOOMED or len(self.objects) > MAX_DOOMED:
            raise InvalidInput(f"an epoch dooms at most {MAX_DOOMED} packs and as many objects")

    def encode(self) -> list[Octets]:
        """The canonical bytes as pieces to be written one after the other."""
        objects = sorted(self.objects)
        columns: dict[str, Array] = {
            "pack": _rows(sorted(self.packs), PACK_NAME_BYTES),
            "object_kind": np.array([kind for kind, _ in objects], "u1"),
            "object": _rows([digest.raw for _, digest in objects], DIGEST_BYTES),
        }
        return encode_table(LAYOUT, {"epoch": self.epoch}, columns)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Doomed:
        """Read what is doomed. Raises InvalidImage or Unsupported."""
        table = decode_table(raw, LAYOUT, what)
        head, columns = table.head, table.columns
        epoch = head.raw("epoch", ID_BYTES)
        head.done()
        packs, kinds, objects = columns["pack"], columns["object_kind"], columns["object"]
        if len(kinds) != len(objects) or not within(kinds, 0, max(ObjectKind)):
            head.fail("its objects have no kind, or one that is not known")
        if len(packs) > MAX_DOOMED or len(objects) > MAX_DOOMED:
            head.fail(f"it dooms more than {MAX_DOOMED} packs or objects")
        return cls(
            epoch,
            frozenset(pack.tobytes() for pack in packs),
            frozenset(
                (ObjectKind(kind), Digest(digest.tobytes()))
                for kind, digest in zip(kinds, objects, strict=True)
            ),
        )


class Decision(StrEnum):
    """What becomes of the objects of an epoch."""

    DELETE = "delete"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The one decision about an epoch, and who gave it."""

    epoch: bytes
    verdict: Decision
    who: str

    def __post_init__(self) -> None:
        _check_id(self.epoch, "epoch")

    def encode(self) -> bytes:
        """The canonical bytes of the record."""
        return encode_record(
            "verdict", {"epoch": self.epoch, "verdict": self.verdict.value, "who": self.who}
        )

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Verdict:
        """Read a verdict. Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "verdict", what)
        decision = fields.text("verdict")
        if decision not in list(Decision):
            raise InvalidImage(f"{what} is neither {' nor '.join(Decision)}")
        verdict = cls(fields.raw("epoch", ID_BYTES), Decision(decision), fields.text("who"))
        fields.done()
        return verdict


def _check_id(raw: bytes, what: str) -> None:
    if len(raw) != ID_BYTES:
        raise InvalidInput(f"the id of a {what} has {ID_BYTES} bytes, this one has {len(raw)}")


def _rows(items: list[bytes], item_bytes: int) -> Array:
    return np.frombuffer(b"".join(items), "u1").reshape(-1, item_bytes)
