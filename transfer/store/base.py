"""What the engine asks of a store. Each backend is one implementation of `Store`.

Keys are those of `imgfmt.layout`. Errors are those of `imgfmt.errors`: NotFound only when the store
said that the object is absent, AccessDenied when it would not say, StoreUnavailable when a retry
may help, OutOfResources when it is full.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from imgfmt.digest import Octets
from imgfmt.reference import ReferenceRecord

UNCHECKED_BYTES = 1024 * 1024
"""Objects of up to this size are read whole without a question."""

SizeCheck = Callable[[int, Octets], None]
"""Told an object's size and its first `UNCHECKED_BYTES`; raises if it can't be right."""


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    """An object as a listing shows it. `written_ns` is by the store's clock.

    `is_object` is False in a listing where something else is in an object's place, such as a
    symbolic link; to read it raises CorruptData.
    """

    key: str
    size_bytes: int
    written_ns: int
    is_object: bool = True


@dataclass(frozen=True, slots=True)
class StoredReference:
    """A reference as read, with what a later change must find unchanged.

    `version` is opaque to callers: a generation number in a file store, more in a bucket.
    `problem` says why the newest state can't be read: then `record` is one of a deleted reference
    in its place, with the history of what could be read before it.
    """

    record: ReferenceRecord
    version: Any  # of each store's own type, with equality
    problem: str | None = None


class PackSink(Protocol):
    """One pack being written. It has its key only after `commit`; `abort` leaves nothing.

    Buffers handed to `write` begin and end on page boundaries (page-aligned memory, whole pages)
    and must stay unchanged until it returns.
    """

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        """Write `pieces` one after the other at byte `offset`. Calls may overlap, in any order."""

    async def commit(self) -> None:
        """Make the pack durable and visible whole. No write may be under way."""

    async def abort(self) -> None:
        """Forget the pack. Safe after any failure; does nothing after `commit`."""


class Store(Protocol):
    """Objects under keys, exclusive creation, references. Safe to use from many tasks."""

    @property
    def url(self) -> str:
        """How a user names the store; for messages."""

    @property
    def n_writes(self) -> int:
        """Writes under way at once from which on one more gains nothing."""

    async def get(self, key: str, check: SizeCheck | None = None) -> Octets:
        """The whole object. A view that stays valid though the object is deleted.

        `check` is asked before memory is taken for an object of more than `UNCHECKED_BYTES`.
        """

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`. A short object raises CorruptData."""

    async def facts(self, key: str) -> ObjectFacts | None:
        """What a listing would show of the object, or None if it is absent.

        Raises CorruptData where something else is in its place.
        """

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """All objects whose key begins with `prefix`, which ends with `/`; ascending by key."""

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """Write the object whole and durably, in place of any that is there."""

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """As `put`, but only if the key is absent: True if this call wrote the object."""

    async def delete(self, key: str) -> None:
        """Remove the object if it is there."""

    async def open_pack(self, key: str) -> PackSink:
        """Begin a new pack."""

    async def read_reference(self, name: str, tag: str) -> StoredReference | None:
        """The newest state of a reference (which may say that it is deleted), or None.

        Raises CorruptData or InvalidImage if it is damaged, whatever older states there are.
        """

    async def reference_to_change(self, name: str, tag: str) -> StoredReference | None:
        """As `read_reference`, for a writer: a damaged state is one with a `problem`.

        `change_reference` from it puts a new state in the place of this damaged one.
        """

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """Make `record` the state of its reference if it still is as `seen`; else Conflict.

        An answer that was lost is recognised by the record's write id and is no conflict.
        """

    async def list_references(self) -> list[StoredReference]:
        """Newest states of all references, deleted ones too, ascending by name and tag.

        Those that can't be read have a `problem`.
        """


class ClosableStore(Store, Protocol):
    """A store that holds threads or connections."""

    def close(self) -> None:
        """Let go of them. No call may be under way or follow."""


@runtime_checkable
class Sweepable(Protocol):
    """A store where a writer that is killed leaves something that no listing of objects shows."""

    async def unfinished_since_ns(self) -> list[int]:
        """When each unfinished object was last written or begun, by the store's clock."""

    async def remove_unfinished(self, before_ns: int) -> int:
        """Remove those from before this time; returns how many. Whoever is still at one fails."""


@runtime_checkable
class Placed(Protocol):
    """A store that can tell what lies at its place, for `init` to ask before it is a store."""

    async def in_the_way(self) -> str | None:
        """Something at the store's place that a new store does not begin with, or None."""

    async def enclosing_store(self) -> str | None:
        """The URL of a store that this one would lie in, or None."""


@runtime_checkable
class Probed(Protocol):
    """A store whose server may not keep the promises of SPEC.md section 9; `init` asks it to."""

    async def probe(self) -> dict[str, str]:
        """Try exclusive creation, conditional changes, ranged reads and listings.

        Returns what was found, by what was tried. Raises InvalidInput, naming what the server does
        not honour. Leaves nothing behind.
        """
