"""Whose a mount is: telling the driver's own from others in the mount table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from csi.config import MountMode
from csi.records import PublicationRecord
from transfer.mounts import SOURCE, MountEntry

NO_TREE = "none"
"""Stands in the mount table for a folder of our own: one of members, or an empty volume."""


def below_target(target: str, table: Iterable[MountEntry]) -> Iterable[MountEntry]:
    """Mounts at or below a target, in the order of the mount table."""
    inside = target + "/"
    return (e for e in table if e.directory == target or e.directory.startswith(inside))


def is_overlay(entry: MountEntry, name: str) -> bool:
    """Whether a mount's source says that it belongs to the publication `name`."""
    parts = entry.source.split(":")
    if entry.filesystem != "overlay" or len(parts) != 4 or ":".join(parts[:2]) != SOURCE:
        return False
    return parts[2] == name or parts[2].startswith(f"{name}.m")


def is_bind(entry: MountEntry, record: PublicationRecord | None) -> bool:
    """Whether a mount is one of the bind mounts of a record."""
    if record is None or record.mode is not MountMode.BIND or entry.filesystem == "overlay":
        return False
    for mount in record.mounts:
        if record.directory(mount) == entry.directory:
            part = f"/trees/{mount.tree}" if mount.tree != NO_TREE else f"/parts/{record.name}/"
            return part in entry.root
    return False


def is_left_bind(entry: MountEntry, name: str, pins: Iterable[tuple[str, str]]) -> bool:
    """Whether a mount is a bind mount of a publication that has lost its record.

    `pins` are its mount names and trees, as its pins in the cache tell.
    """
    parts = [f"/parts/{name}/", *(f"/trees/{tree}" for _, tree in pins)]
    return entry.filesystem != "overlay" and any(part in f"{entry.root}/" for part in parts)


def is_ours(
    name: str, record: PublicationRecord | None, target: str, entries: Sequence[MountEntry]
) -> bool:
    """Whether the uppermost mount at the target itself is this publication's."""
    upper = [entry for entry in entries if entry.directory == target][-1:]
    return any(is_overlay(entry, name) or is_bind(entry, record) for entry in upper)


def is_complete(record: PublicationRecord, entries: Sequence[MountEntry]) -> bool:
    """Whether all mounts of a publication are there."""
    there = {e.directory for e in entries if is_overlay(e, record.name) or is_bind(e, record)}
    return all(record.directory(mount) in there for mount in record.mounts)
