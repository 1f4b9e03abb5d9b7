"""A store in a directory: a local disk, an NFS mount, a PVC (SPEC.md sections 6.1, 8 and 9)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.errors import CorruptData
from imgfmt.reference import ReferenceRecord
from transfer.filesystems import is_remote
from transfer.store import surroundings
from transfer.store.base import ObjectFacts, PackSink, SizeCheck, StoredReference
from transfer.store.files import Files, open_direct, write_full
from transfer.store.generations import References
from transfer.store.unfinished import is_temporary
from transfer.tasks import finished
from transfer.threads import Threads

_N_WRITES = 2


class PosixStore:
    """A `transfer.store.base.Store` below the directory `root`, which need not exist yet."""

    def __init__(self, root: str, *, n_threads: int = 4) -> None:
        self.root = os.path.abspath(root)
        self._files = Files(self.root, Threads("store", n_threads))
        self._references = References(self._files)
        self._map = not (os.path.isdir(self.root) and is_remote(self.root))

    @property
    def url(self) -> str:
        """The directory's path."""
        return self.root

    @property
    def n_writes(self) -> int:
        """See `Store.n_writes`: a disk is busy with few, and more fill the CPU's cache."""
        return _N_WRITES

    def close(self) -> None:
        """End the store's threads."""
        self._files.threads.close()

    async def get(self, key: str, check: SizeCheck | None = None) -> Octets:
        """See `Store.get`. Large objects on local filesystems are mapped, not read."""
        return await self._files.run(key, lambda: self._files.read(key, check, map_large=self._map))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        found = await self._files.run(key, lambda: self._files.read_into(key, offset, buffer))
        if found != len(buffer):
            end = offset + len(buffer)
            raise CorruptData(f"{self._files.named(key)} is cut short: it ends before byte {end}")

    async def facts(self, key: str) -> ObjectFacts | None:
        """See `Store.facts`."""
        return await self._files.run(key, lambda: self._files.facts(key))

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """See `Store.list_objects`."""
        return await self._files.run(prefix, lambda: self._files.listed(prefix))

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """See `Store.put`."""
        await self._files.run(key, lambda: self._files.put(key, pieces))

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """See `Store.create`."""
        return await self._files.run(key, lambda: self._files.create(key, pieces))

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await self._files.run(key, lambda: self._files.delete(key))

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`: O_DIRECT where the filesystem has it."""
        pack = _PosixPack(self._files, key)
        try:
            await self._files.run(key, pack.open)
        except BaseException:
            await finished(pack.abort())
            raise
        return pack

    async def read_reference(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`."""
        return await self._references.read(name, tag)

    async def reference_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`."""
        return await self._references.read_to_change(name, tag)

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`."""
        await self._references.change(record, seen)

    async def list_references(self) -> list[StoredReference]:
        """See `Store.list_references`."""
        return await self._references.list()

    async def in_the_way(self) -> str | None:
        """See `Placed.in_the_way`."""
        return await self._files.run(layout.STORE_KEY, lambda: surroundings.in_the_way(self.root))

    async def enclosing_store(self) -> str | None:
        """See `Placed.enclosing_store`."""
        return await self._files.run(
            layout.STORE_KEY, lambda: surroundings.enclosing_store(self.root)
        )

    async def unfinished_since_ns(self) -> list[int]:
        """See `Sweepable.unfinished_since_ns`."""
        return [facts.written_ns for facts in await self._temporaries()]

    async def remove_unfinished(self, before_ns: int) -> int:
        """See `Sweepable.remove_unfinished`."""
        old = [facts for facts in await self._temporaries() if facts.written_ns < before_ns]
        for facts in old:
            await self.delete(facts.key)
        return len(old)

    async def _temporaries(self) -> list[ObjectFacts]:
        found = await self.list_objects(layout.TMP)
        return [facts for facts in found if facts.is_object and is_temporary(facts.key)]


class _PosixPack:
    """A pack under `tmp/`. See `transfer.store.base.PackSink`."""

    def __init__(self, files: Files, key: str) -> None:
        self._files = files
        self._key = key
        self._path = ""
        self._descriptor: int | None = None

    def open(self) -> None:
        """Begin the file. Runs on a thread, which goes on where its caller is cancelled."""
        self._path = self._files.temporary()
        self._descriptor = open_direct(self._path)

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        descriptor = self._descriptor
        assert descriptor is not None
        await self._files.run(self._key, lambda: write_full(descriptor, list(pieces), offset))

    async def commit(self) -> None:
        def publish() -> None:
            assert self._descriptor is not None
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            self._files.publish(self._path, self._key)

        await self._files.run(self._key, publish)

    async def abort(self) -> None:
        def drop() -> None:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

        await self._files.run(self._key, drop)
