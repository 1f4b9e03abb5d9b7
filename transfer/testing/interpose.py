"""A store that lets a test act before every operation: trace it, fail it, or change the world."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.reference import ReferenceRecord
from transfer.store.base import ObjectFacts, PackSink, SizeCheck, Store, StoredReference

Before = Callable[[str, str], Awaitable[None]]
"""Told the operation and the key. What it raises comes out of the operation, which is not done."""


class InterposedStore:
    """Calls `before(operation, key)`, then does what `store` does.

    Operations are the names of the methods of `Store`, and `write_pack`, `commit_pack` and
    `abort_pack` with the key of the pack. The key of a reference is `name:tag`.
    """

    def __init__(self, store: Store, before: Before) -> None:
        self._store = store
        self._before = before

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._store.url

    @property
    def n_writes(self) -> int:
        """See `Store.n_writes`."""
        return self._store.n_writes

    async def get(self, key: str, check: SizeCheck | None = None) -> Octets:
        """See `Store.get`."""
        await self._before("get", key)
        return await self._store.get(key, check)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        await self._before("read_into", key)
        await self._store.read_into(key, offset, buffer)

    async def facts(self, key: str) -> ObjectFacts | None:
        """See `Store.facts`."""
        await self._before("facts", key)
        return await self._store.facts(key)

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """See `Store.list_objects`."""
        await self._before("list_objects", prefix)
        return await self._store.list_objects(prefix)

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """See `Store.put`."""
        await self._before("put", key)
        await self._store.put(key, pieces)

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """See `Store.create`."""
        await self._before("create", key)
        return await self._store.create(key, pieces)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await self._before("delete", key)
        await self._store.delete(key)

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`."""
        await self._before("open_pack", key)
        return _InterposedPack(await self._store.open_pack(key), self._before, key)

    async def read_reference(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`."""
        await self._before("read_reference", f"{name}:{tag}")
        return await self._store.read_reference(name, tag)

    async def reference_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`."""
        await self._before("read_reference", f"{name}:{tag}")
        return await self._store.reference_to_change(name, tag)

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`."""
        await self._before("change_reference", f"{record.name}:{record.tag}")
        await self._store.change_reference(record, seen)

    async def list_references(self) -> list[StoredReference]:
        """See `Store.list_references`."""
        await self._before("list_references", layout.REFS)
        return await self._store.list_references()


class _InterposedPack:
    def __init__(self, sink: PackSink, before: Before, key: str) -> None:
        self._sink = sink
        self._before = before
        self._key = key

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        await self._before("write_pack", self._key)
        await self._sink.write(offset, pieces)

    async def commit(self) -> None:
        await self._before("commit_pack", self._key)
        await self._sink.commit()

    async def abort(self) -> None:
        await self._before("abort_pack", self._key)
        await self._sink.abort()
