"""The store record (SPEC.md sections 6.4, 7): what a store is, and who may use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.chunking import PAGE_BYTES_CHOICES, PAGE_CDC_1
from imgfmt.digest import Octets
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.pack import MAX_PACK_BYTES
from imgfmt.wire import decode_record, encode_record

UUID_BYTES = 16
MAX_SECONDS = 2**32 - 1

READ_FEATURES: frozenset[str] = frozenset()
WRITE_FEATURES = frozenset({"lease-1"})
DELETE_FEATURES = frozenset({"doomed-1"})


class NewChunks(StrEnum):
    """How a writer stores new chunks; `auto` leaves it to the writer, chunk by chunk."""

    RAW = "raw"
    ZSTD = "zstd"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class StoreRecord:
    """What holds for a whole store. Feature sets ascend.

    A writer closes a pack at `pack_bytes`; replaced targets stay roots for `history_s`; no lease is
    longer than `lease_ttl_s`; `concurrent_writers` says that exclusive creation was seen to work.
    """

    uuid: bytes
    concurrent_writers: bool
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = tuple(sorted(WRITE_FEATURES))
    delete: tuple[str, ...] = tuple(sorted(DELETE_FEATURES))
    profile: str = PAGE_CDC_1
    page_bytes: int = 4096
    pack_bytes: int = 128 << 20
    codec: NewChunks = NewChunks.AUTO
    history_s: int = 30 * 86_400
    lease_ttl_s: int = 3600

    def __post_init__(self) -> None:
        if len(self.uuid) != UUID_BYTES:
            raise InvalidInput(f"a store's uuid has {UUID_BYTES} bytes")
        for features in (self.read, self.write, self.delete):
            if list(features) != sorted(set(features)):
                raise InvalidInput("a store's features do not ascend, or one is there twice")
        if self.profile != PAGE_CDC_1:
            raise InvalidInput(f"profile {self.profile[:40]!r} is not {PAGE_CDC_1}")
        if self.page_bytes not in PAGE_BYTES_CHOICES:
            raise InvalidInput(f"page_bytes {self.page_bytes} is not one of {PAGE_BYTES_CHOICES}")
        if not self.page_bytes <= self.pack_bytes <= MAX_PACK_BYTES:
            raise InvalidInput(
                f"pack_bytes {self.pack_bytes} is not from {self.page_bytes} (a page) to"
                f" {MAX_PACK_BYTES}"
            )
        if not (0 <= self.history_s <= MAX_SECONDS and 1 <= self.lease_ttl_s <= MAX_SECONDS):
            raise InvalidInput(f"history_s or lease_ttl_s is not up to {MAX_SECONDS}")

    def check_readable(self) -> None:
        """Raise Unsupported, naming the feature, unless this version may read the store."""
        _check("reading", self.read, READ_FEATURES)

    def check_writable(self) -> None:
        """Raise Unsupported, naming the feature, unless this version may write to the store."""
        self.check_readable()
        _check("writing to", self.write, WRITE_FEATURES)

    def check_deletable(self) -> None:
        """Raise Unsupported, naming the feature, unless this version may delete from the store."""
        self.check_writable()
        _check("deleting from", self.delete, DELETE_FEATURES)

    def encode(self) -> bytes:
        """The canonical bytes of the record."""
        fields = {
            "uuid": self.uuid,
            "write": list(self.write),
            "delete": list(self.delete),
            "profile": self.profile,
            "page_bytes": self.page_bytes,
            "pack_bytes": self.pack_bytes,
            "codec": self.codec.value,
            "history_s": self.history_s,
            "lease_ttl_s": self.lease_ttl_s,
            "concurrent_writers": self.concurrent_writers,
        }
        return encode_record("store", fields, read=self.read)

    @classmethod
    def decode(cls, raw: Octets, what: str) -> StoreRecord:
        """Read a store record. Raises InvalidImage, or Unsupported if the store may not be read."""
        fields = decode_record(raw, "store", what)
        codec, profile = fields.text("codec"), fields.text("profile")
        if codec not in list(NewChunks):
            fields.fail(f"codec {codec[:40]!r} is not one of {', '.join(NewChunks)}")
        if profile != PAGE_CDC_1:
            raise Unsupported(f"{what} cuts by {profile[:40]!r}, not {PAGE_CDC_1}")
        try:
            record = cls(
                uuid=fields.raw("uuid", UUID_BYTES),
                concurrent_writers=fields.flag("concurrent_writers"),
                read=fields.text_array("read"),
                write=fields.text_array("write"),
                delete=fields.text_array("delete"),
                profile=profile,
                page_bytes=fields.integer("page_bytes"),
                pack_bytes=fields.integer("pack_bytes"),
                codec=NewChunks(codec),
                history_s=fields.integer("history_s"),
                lease_ttl_s=fields.integer("lease_ttl_s"),
            )
        except InvalidInput as error:
            raise InvalidImage(f"{what}: {error}") from None
        fields.done()
        return record


def _check(doing: str, needed: Sequence[str], known: frozenset[str]) -> None:
    if unknown := sorted(set(needed) - known):
        raise Unsupported(
            f"{doing} this store needs the feature {unknown[0]!r}; use a newer snapcask"
        )
