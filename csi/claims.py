"""The references that the driver makes: how they are called, and what it writes into them.

They are `_volumes/<32 digits>` for volumes and `_volumes/snap-<32 digits>` for snapshots.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

from imgfmt.errors import Conflict
from imgfmt.reference import ReferenceRecord
from transfer.catalog import Catalog
from transfer.references import next_record

VOLUME_ID = re.compile(r"vol-([a-z0-9][a-z0-9-]*)-([0-9a-f]{32})")
VOLUMES = "_volumes/"
SNAPSHOTS = f"{VOLUMES}snap-"
RENEW_S = 3600.0
"""A reference of this age is written anew when it is asked for again; see `csi.unused`."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What the driver writes into `who` of its references, to know its own calls again.

    `request` tells requests for one name apart, `image` is the image's name for the policy, and
    `source` the id of the volume that a snapshot was made of.
    """

    request: str
    image: str
    source: str = ""

    def text(self, driver: str) -> str:
        """As one line."""
        found = {"request": self.request, "image": self.image, "source": self.source}
        return f"{driver} {json.dumps(found, sort_keys=True)}"

    @classmethod
    def of(cls, record: ReferenceRecord) -> Claim:
        """What a record says; nothing for those of others."""
        try:
            found = json.loads(record.who.partition(" ")[2])
            return cls(str(found["request"]), str(found["image"]), str(found["source"]))
        except (ValueError, KeyError, TypeError):
            return cls("", "")


async def renew(catalog: Catalog, record: ReferenceRecord) -> None:
    """Write a reference anew if it is old, so that nobody takes it for unused meanwhile.

    Raises Conflict if someone else changed it; the call is to come again then.
    """
    if time.time_ns() - record.time_ns < RENEW_S * 1e9:
        return
    seen = await catalog.store.read_reference(record.name, record.tag)
    if seen is None or seen.record.write_id != record.write_id:
        raise Conflict(f"{catalog.named(f'{record.name}:{record.tag}')} was changed meanwhile")
    kind, target, who = record.target_kind, record.target, record.who
    await catalog.store.change_reference(
        next_record(record.name, record.tag, seen, kind, target, who), seen
    )
