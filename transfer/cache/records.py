"""The small state files of a cache. All are records of SPEC.md section 4, read strictly.

Their meaning is in docs/node-cache.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from imgfmt.digest import DIGEST_BYTES, Digest, Octets
from imgfmt.store_record import UUID_BYTES
from imgfmt.wire import (
    Array,
    Column,
    Fields,
    Layout,
    Value,
    decode_record,
    decode_table,
    encode_record,
    encode_table,
)
from transfer.session import SESSION_BYTES

ID_BYTES = 16
MAX_DISKS = 64
MAX_DAMAGED = 16_384

FLIGHT = Layout(
    "cache-flight",
    (Column("digest", DIGEST_BYTES), Column("tree", 4), Column("chunk", 4)),
)


def disk_ids(fields: Fields) -> tuple[bytes, ...]:
    """The ids of disks in the field `disks`. Raises InvalidImage."""
    found = fields.array("disks", MAX_DISKS)
    ids = tuple(item for item in found if isinstance(item, bytes) and len(item) == ID_BYTES)
    if len(ids) != len(found) or len(set(ids)) != len(ids):
        fields.fail("'disks' holds something that is no disk")
    return ids


@dataclass(frozen=True, slots=True)
class CacheRecord:
    """Says that a directory is a cache."""

    id: bytes

    def encode(self) -> bytes:
        """The canonical bytes."""
        return encode_record("cache", {"id": self.id})

    @classmethod
    def decode(cls, raw: Octets, what: str) -> CacheRecord:
        """Raises InvalidImage, or Unsupported for a cache of another version."""
        fields = decode_record(raw, "cache", what)
        record = cls(fields.raw("id", ID_BYTES))
        fields.done()
        return record


@dataclass(frozen=True, slots=True)
class DomainRecord:
    """A store, and the scope of the credentials it was read with. `url` is where it was last."""

    store_uuid: bytes
    scope: str
    url: str

    def encode(self) -> bytes:
        """The canonical bytes."""
        url = self.url.encode(errors="surrogateescape")
        fields = {"store_uuid": self.store_uuid, "scope": self.scope, "url": url}
        return encode_record("cache-domain", fields)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> DomainRecord:
        """Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "cache-domain", what)
        url = fields.values.get("url")
        record = cls(
            fields.raw("store_uuid", UUID_BYTES),
            fields.text("scope"),
            fields.raw("url", len(url) if isinstance(url, bytes) else 0).decode(
                errors="surrogateescape"
            ),
        )
        fields.done()
        return record


@dataclass(frozen=True, slots=True)
class Mark:
    """A tree is complete. Unless `synced`, only in the session it was written in.

    `data_bytes` are the bytes of its chunks, repeated ones counted each time. `disks` are the ids
    of the further disks that it lies on too; without any the record is as it was before there were.
    """

    tree: Digest
    synced: bool
    session: bytes
    logical_bytes: int
    data_bytes: int
    time_ns: int
    disks: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The canonical bytes."""
        fields = {
            "tree": self.tree.raw,
            "profile": "sanitised",
            "synced": self.synced,
            "session": self.session,
            "logical_bytes": self.logical_bytes,
            "data_bytes": self.data_bytes,
            "time_ns": self.time_ns,
        }
        return encode_record(
            "cache-mark", {**fields, "disks": list(self.disks)} if self.disks else fields
        )

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Mark:
        """Raises InvalidImage, or Unsupported for a tree of a newer version."""
        fields = decode_record(raw, "cache-mark", what)
        if fields.text("profile") != "sanitised":
            fields.fail("its profile is not known")
        mark = cls(
            tree=Digest(fields.raw("tree", DIGEST_BYTES)),
            synced=fields.flag("synced"),
            session=fields.raw("session", SESSION_BYTES),
            logical_bytes=fields.integer("logical_bytes"),
            data_bytes=fields.integer("data_bytes"),
            time_ns=fields.integer("time_ns"),
            disks=disk_ids(fields) if "disks" in fields.values else (),
        )
        fields.done()
        return mark


@dataclass(frozen=True, slots=True)
class Pin:
    """Why a tree must stay. A mount's pin has the boot and the mount namespace it was made in."""

    reason: str
    time_ns: int
    directory: str = ""
    boot: bytes = bytes(ID_BYTES)
    namespace: int = 0

    def encode(self) -> bytes:
        """The canonical bytes."""
        fields = {
            "reason": self.reason,
            "time_ns": self.time_ns,
            "directory": self.directory.encode(errors="surrogateescape").decode("latin-1"),
            "boot": self.boot,
            "namespace": self.namespace,
        }
        return encode_record("cache-pin", fields)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Pin:
        """Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "cache-pin", what)
        pin = cls(
            fields.text("reason"),
            fields.integer("time_ns"),
            fields.text("directory").encode("latin-1").decode(errors="surrogateescape"),
            fields.raw("boot", ID_BYTES),
            fields.integer("namespace"),
        )
        fields.done()
        return pin


@dataclass(frozen=True, slots=True)
class Damage:
    """Chunks of a tree that were found bad, ascending; of more than MAX_DAMAGED, the first."""

    tree: Digest
    chunks: tuple[int, ...]

    def encode(self) -> bytes:
        """The canonical bytes."""
        fields = {"tree": self.tree.raw, "chunks": list(self.chunks[:MAX_DAMAGED])}
        return encode_record("cache-damage", fields)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Damage:
        """Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "cache-damage", what)
        chunks = fields.array("chunks", MAX_DAMAGED)
        if not all(isinstance(number, int) and 0 <= number < 2**32 for number in chunks):
            fields.fail("'chunks' holds something that is no chunk")
        damage = cls(Digest(fields.raw("tree", DIGEST_BYTES)), tuple(chunks))
        fields.done()
        return damage


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """What a live plan fetches: item i is chunk `chunk[i]` of `trees[tree[i]]`.

    `digest` is (n, 32). `reserved_bytes` are those that it will write and nobody else may count on;
    `by_disk` says how many of them on which disk, the empty id being that of the main disk. It is
    empty where all are written there.
    """

    trees: tuple[Digest, ...]
    reserved_bytes: int
    digest: npt.NDArray[np.uint8]
    tree: Array
    chunk: Array
    by_disk: Mapping[bytes, int] = field(default_factory=dict)

    def encode(self) -> list[Octets]:
        """The canonical bytes in pieces."""
        head: dict[str, Value] = {
            "trees": [tree.raw for tree in self.trees],
            "reserved_bytes": self.reserved_bytes,
        }
        if self.by_disk:
            head["by_disk"] = [[disk, n_bytes] for disk, n_bytes in sorted(self.by_disk.items())]
        columns = {"digest": self.digest, "tree": self.tree, "chunk": self.chunk}
        return encode_table(FLIGHT, head, columns)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> Flight:
        """Raises InvalidImage or Unsupported."""
        table = decode_table(raw, FLIGHT, what)
        head, columns = table.head, table.columns
        trees = head.array("trees", 4096)
        if not all(isinstance(tree, bytes) and len(tree) == DIGEST_BYTES for tree in trees):
            head.fail("'trees' holds something that is no digest")
        flight = cls(
            tuple(map(Digest, trees)),
            head.integer("reserved_bytes"),
            columns["digest"],
            columns["tree"],
            columns["chunk"],
            _by_disk(head) if "by_disk" in head.values else {},
        )
        head.done()
        same = len(flight.digest) == len(flight.tree) == len(flight.chunk)
        if not same or (len(flight.tree) and int(flight.tree.max()) >= len(trees)):
            head.fail("its columns don't fit together")
        return flight


def _by_disk(head: Fields) -> dict[bytes, int]:
    found = {}
    for item in head.array("by_disk", MAX_DISKS + 1):
        disk, n_bytes = item if isinstance(item, list) and len(item) == 2 else (None, None)
        if not (isinstance(disk, bytes) and isinstance(n_bytes, int) and n_bytes >= 0):
            head.fail("'by_disk' holds something that is no disk with its bytes")
        found[disk] = n_bytes
    return found
