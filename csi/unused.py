"""Volume references of a store that nothing in Kubernetes uses any more, and their removal.

A reference is removed only if its digits are nowhere in what the cluster has, it was old when that
was listed, and it is still as it was seen (compare-and-swap). A volume whose reference was made
long ago and whose PersistentVolume comes only now is safe too: CreateVolume writes an old
reference anew before it answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from csi.claims import RENEW_S, SNAPSHOTS, VOLUMES, Claim
from imgfmt.errors import Conflict, InvalidInput
from imgfmt.reference import TargetKind
from transfer.catalog import Catalog
from transfer.references import next_record
from transfer.store.base import StoredReference

MIN_AGE_S = 2 * RENEW_S
"""The least age of what is removed: a reference of less may not have been written anew."""

_DIGITS = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
_KINDS = ("PersistentVolume", "VolumeSnapshotContent")


class Use(StrEnum):
    """What is known of a volume reference.

    `new` ones have no PersistentVolume yet, or none any more; `other` ones were not made by this
    driver; `damaged` ones are in use, or may be, and keep nothing any more; `unknown` is without a
    list of what the cluster has. `removed` and `changed` (meanwhile, so that it stays) are what
    became of unused ones.
    """

    USED = "used"
    UNUSED = "unused"
    NEW = "new"
    OTHER = "other"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Listed:
    """What a cluster had, at `time_ns` by our clock: the digits that occur in its objects.

    `snapshots` says whether it was asked for snapshots too.
    """

    digits: frozenset[str]
    time_ns: int
    snapshots: bool = False


@dataclass(frozen=True, slots=True)
class VolumeReference:
    """A reference below `_volumes/`. `image` is the image's name when it was made."""

    seen: StoredReference
    use: Use
    image: str

    @property
    def is_snapshot(self) -> bool:
        """Whether CreateSnapshot made it."""
        return self.seen.record.name.startswith(SNAPSHOTS)


def read_objects(raw: bytes, what: str, time_ns: int, *, snapshots: bool) -> Listed:
    """Read what `kubectl get persistentvolumes[,volumesnapshotcontents] -o json` prints.

    Raises InvalidInput for anything else, an empty file or a part of a list too.
    """
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise InvalidInput(f"{what} is not JSON ({error}); write it with kubectl -o json") from None
    items = found.get("items") if isinstance(found, dict) else None
    if not isinstance(items, list) or not str(found.get("kind")).endswith("List"):
        raise InvalidInput(f"{what} is no list of objects; write it with kubectl get ... -o json")
    metadata = found.get("metadata")
    if isinstance(metadata, dict) and metadata.get("continue"):
        raise InvalidInput(f"{what} is the first part of a list only; write all of it")
    listed = str(found["kind"]).removesuffix("List")
    kinds = {_kind(item, listed, what) for item in items}
    if wrong := sorted(kinds - set(_KINDS)):
        raise InvalidInput(
            f"{what} has a {wrong[0][:80]}; only {' and '.join(_KINDS)} belong in it"
        )
    text = json.dumps(items)
    return Listed(frozenset(_DIGITS.findall(text)), time_ns, snapshots)


def _kind(item: Any, listed: str, what: str) -> str:
    if not isinstance(item, dict):
        raise InvalidInput(f"{what} holds something that is no object")
    return str(item.get("kind") or listed)


async def list_volume_references(
    catalog: Catalog, listed: Sequence[Listed], *, driver: str, min_age_s: float
) -> list[VolumeReference]:
    """All references below `_volumes/` by name, and what the lists say of them.

    Without a list nothing is known of any. Raises InvalidInput for a `min_age_s` below MIN_AGE_S.
    """
    if min_age_s < MIN_AGE_S:
        least = f"{MIN_AGE_S / 3600:.0f}h"
        raise InvalidInput(f"an age of {min_age_s:g} s is too little; {least} is the least")
    return [
        VolumeReference(state, _use(state, listed, driver, min_age_s), Claim.of(state.record).image)
        for state in await catalog.store.list_references()
        if state.record.name.startswith(VOLUMES) and (state.record.target or state.problem)
    ]


def _use(state: StoredReference, listed: Sequence[Listed], driver: str, min_age_s: float) -> Use:
    record = state.record
    if not state.problem and not record.who.startswith(f"{driver} "):
        return Use.OTHER
    digits = record.name.removeprefix(SNAPSHOTS).removeprefix(VOLUMES)
    if any(digits in one.digits for one in listed):
        return Use.DAMAGED if state.problem else Use.USED
    asked = listed if not record.name.startswith(SNAPSHOTS) else [o for o in listed if o.snapshots]
    if not asked or len(asked) < len(listed):
        return Use.DAMAGED if state.problem else Use.UNKNOWN
    if state.problem:
        return Use.UNUSED  # it keeps nothing, and its age is not known
    if min(one.time_ns for one in asked) - record.time_ns < min_age_s * 1e9:
        return Use.NEW
    return Use.UNUSED


async def remove_unused(
    catalog: Catalog, references: Sequence[VolumeReference], *, none_in_use: bool
) -> list[VolumeReference]:
    """Remove the unused among these; returns all, with what became of them. Frees no bytes.

    Raises InvalidInput where none is used unless `none_in_use` says that this is so: the list may
    be of another cluster.
    """
    uses = {found.use for found in references}
    if Use.UNUSED in uses and Use.USED not in uses and not none_in_use:
        raise InvalidInput(
            "the lists of objects know none of the volumes of this store; see that they are of the"
            " clusters that use it, or say --none-in-use"
        )
    done = []
    for found in references:
        use = found.use
        if use is Use.UNUSED:
            record = found.seen.record
            gone = next_record(record.name, record.tag, found.seen, TargetKind.NONE, None)
            try:
                await catalog.store.change_reference(gone, found.seen)
                use = Use.REMOVED
            except Conflict:
                use = Use.CHANGED
        done.append(replace(found, use=use))
    return done
