"""What the driver writes down of each publication: small JSON files in the cache's folder `csi`.

The mount table says what is mounted. These say what it was asked for, so that the same call is told
from another one, and what else belongs to it. Losing them loses no mount. All of it blocks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from csi.config import MountMode
from imgfmt.digest import digest_of
from imgfmt.errors import CorruptData
from transfer.cache.durable import read_file, remove_file, remove_half_written, replace_file

VERSION = 1

_READABLE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,79}")
_HASHED = "x-"


def mount_name(volume_id: str, target: str) -> str:
    """What names a publication in the mount table, in its record and in pins.

    The volume's id, where that is plain, and what tells its targets apart.
    """
    place = digest_of(b"snapcask target 1\0", target.encode()).hex[:16]
    if _READABLE_ID.fullmatch(volume_id) and not volume_id.startswith(_HASHED):
        return f"{volume_id}.{place}"
    hashed = digest_of(b"snapcask volume 1\0", volume_id.encode()).hex[:40]
    return f"{_HASHED}{hashed}.{place}"


@dataclass(frozen=True, slots=True)
class MountRecord:
    """One mount of a publication: at `below` in the target, of a tree (64 digits, or `none`)."""

    name: str
    below: str
    tree: str


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """A publication. `mounts` are in the order in which they are made.

    `domain` is the folder of the cache's security domain; `size_bytes` is what the files of its
    trees have, holes too.
    """

    volume_id: str
    target: str
    name: str
    fingerprint: str
    mode: MountMode
    image: str
    domain: str
    mounts: tuple[MountRecord, ...]
    size_bytes: int
    namespace: str | None = None
    pod: str | None = None

    def directory(self, mount: MountRecord) -> str:
        """Where a mount is."""
        return os.path.join(self.target, mount.below) if mount.below else self.target

    def encode(self) -> bytes:
        """The text of the file."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        said["mounts"] = [{"name": m.name, "below": m.below, "tree": m.tree} for m in self.mounts]
        return json.dumps({"version": VERSION, **said}, sort_keys=True).encode()

    @classmethod
    def decode(cls, raw: bytes, what: str) -> PublicationRecord:
        """Raises CorruptData for anything that `encode` does not write."""
        try:
            found = json.loads(raw)
            if found.pop("version") != VERSION:
                raise ValueError("another version")
            mounts = tuple(MountRecord(**mount) for mount in found.pop("mounts"))
            return cls(mounts=mounts, mode=MountMode(found.pop("mode")), **found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptData(f"{what} is damaged ({error}); it is not used") from None


class Records:
    """The records below one folder, and folders that belong to publications."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        for name in ("", "volumes", "parts", "known"):
            os.makedirs(os.path.join(folder, name), mode=0o700, exist_ok=True)

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, "volumes", f"{name}.json")

    def parts(self, name: str) -> str:
        """The folder of what a publication needs beside its trees; made by who needs it."""
        return os.path.join(self.folder, "parts", name)

    def read(self, name: str) -> PublicationRecord | None:
        """The record of a publication, or None. Raises CorruptData."""
        raw = read_file(self._path(name))
        if raw is None:
            return None
        return PublicationRecord.decode(raw, f"record of volume {name}")

    def write(self, record: PublicationRecord) -> None:
        """Write one, whole; not synced, since mounts don't outlive a power cut either."""
        replace_file(self._path(record.name), [record.encode()], fsync=False)

    def remove(self, name: str) -> None:
        """Remove one if it is there."""
        remove_file(self._path(name))

    def names(self) -> Iterator[str]:
        """Names of all publications that have a record."""
        for found in sorted(os.listdir(os.path.join(self.folder, "volumes"))):
            if found.endswith(".json") and not found.startswith("."):
                yield found.removesuffix(".json")

    def sweep(self) -> None:
        """Remove what writers that were killed left half written. Nobody may be writing."""
        for name in ("volumes", "known"):
            remove_half_written(os.path.join(self.folder, name))

    def part_names(self) -> list[str]:
        """Names of the publications that have a folder of parts."""
        return sorted(os.listdir(os.path.join(self.folder, "parts")))

    def _known_path(self, domain: str, reference: str) -> str:
        name = digest_of(domain.encode(), b"\0", reference.encode()).hex[:40]
        return os.path.join(self.folder, "known", name)

    def remember(self, domain: str, reference: str, digest: str) -> None:
        """Note what a reference was seen to mean in a security domain."""
        path = self._known_path(domain, reference)
        text = json.dumps({"domain": domain, "reference": reference, "digest": digest})
        if read_file(path) != text.encode():
            replace_file(path, [text.encode()], fsync=True)

    def known(self, domain: str, reference: str) -> str | None:
        """What a reference was last seen to mean, if that was noted."""
        raw = read_file(self._known_path(domain, reference))
        try:
            found = json.loads(raw or b"{}")
            if (found["domain"], found["reference"]) == (domain, reference):
                return str(found["digest"])
        except (ValueError, TypeError, KeyError):
            pass
        return None
