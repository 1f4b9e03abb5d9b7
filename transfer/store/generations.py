"""References of a store in a directory: one file a generation, made by `link(2)` (SPEC.md 6.1)."""

from __future__ import annotations

import contextlib
import os

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.errors import Conflict, CorruptData, InvalidImage, Unsupported
from imgfmt.reference import ReferenceRecord, standing_in
from imgfmt.sizes import check_size
from transfer.store.base import StoredReference
from transfer.store.files import Files

KEPT_GENERATIONS = 32
_N_READS = 8


class References:
    """All references of the store in `files`. The version of one is its generation."""

    def __init__(self, files: Files) -> None:
        self._files = files

    async def read(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`."""
        for _ in range(_N_READS):
            generations = await self._generations(name, tag)
            if not generations:
                return None
            newest = await self._read_generation(name, tag, generations[-1])
            if newest is not None:
                return newest
        raise Conflict(
            f"{name}:{tag} in store {self._files.root} changes too fast to be read; try again"
        )

    async def read_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`. The newest generation that can be read gives history."""
        try:
            return await self.read(name, tag)
        except (CorruptData, InvalidImage) as error:
            problem = str(error)
        generations = await self._generations(name, tag)
        if not generations:
            return None
        newest, before = generations[-1], None
        for generation in reversed(generations):
            try:
                before = await self._read_generation(name, tag, generation)
            except (CorruptData, InvalidImage):
                continue
            if before is not None:
                break
        if before is not None and before.version == newest:
            return before  # it was mended meanwhile
        return await self._stand_in(name, tag, newest, before, problem)

    async def change(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`."""
        name, tag = record.name, record.tag
        generation = seen.version + 1 if seen else 1
        key, pieces = layout.generation_key(name, tag, generation), [record.encode()]
        if not await self._files.run(key, lambda: self._files.create(key, pieces)):
            there = await self._read_generation(name, tag, generation)
            if there is None or there.record.write_id != record.write_id:
                raise self._changed(name, tag)
        newest = await self.read(name, tag)
        if newest is None or not _holds(newest, record, generation):
            raise self._changed(name, tag)
        prefix, last = layout.reference_prefix(name, tag), newest.version
        folder = self._files.path(prefix)
        await self._files.run(prefix, lambda: _remove_old_generations(folder, last))

    def _changed(self, name: str, tag: str) -> Conflict:
        return Conflict(
            f"{name}:{tag} in store {self._files.root} was changed by someone else meanwhile"
        )

    def _names(self) -> set[tuple[str, str]]:
        """Names and tags of all references. Raises CorruptData. Blocks."""
        found = set()
        for facts in self._files.listed(layout.REFS):
            if facts.is_object or layout.is_object_key(facts.key):
                parsed = layout.parse_generation_key(facts.key)
            else:
                parsed = layout.parse_generation_key(f"{facts.key}/{0:016d}")
                if parsed is None:  # references may lie behind it
                    self._files.check_place(facts.key)
            if parsed is not None:
                found.add(parsed[:2])
        return found

    async def _listed(self, name: str, tag: str) -> StoredReference | None:
        try:
            return await self.read_to_change(name, tag)
        except (CorruptData, InvalidImage, Unsupported) as error:
            return await self._stand_in(name, tag, 0, None, str(error))

    async def _stand_in(
        self, name: str, tag: str, newest: int, before: StoredReference | None, problem: str
    ) -> StoredReference:
        """What stands for generations up to `newest` that can't be read."""
        path = self._files.path(layout.generation_key(name, tag, newest))

        def written_ns() -> int:
            try:
                return os.stat(path, follow_symlinks=False).st_mtime_ns
            except FileNotFoundError:
                return 0

        record = standing_in(
            name,
            tag,
            before.record if before else None,
            newest - before.version if before else 1,
            await self._files.run(layout.REFS, written_ns),
        )
        return StoredReference(record, newest, problem)

    async def _generations(self, name: str, tag: str) -> list[int]:
        prefix = layout.reference_prefix(name, tag)

        def look() -> list[int]:
            self._files.check_folder(prefix)
            return _generations(self._files.path(prefix))

        return await self._files.run(prefix, look)

    async def _read_generation(
        self, name: str, tag: str, generation: int
    ) -> StoredReference | None:
        key = layout.generation_key(name, tag, generation)
        what = self._files.named(key)

        def check(size_bytes: int, beginning: Octets) -> None:
            check_size(key, size_bytes, beginning, what)

        def read() -> Octets | None:
            try:
                return self._files.read(key, check, map_large=False)
            except FileNotFoundError:
                return None

        raw = await self._files.run(key, read)
        if raw is None:
            return None
        record = ReferenceRecord.decode(raw, what)
        if (record.name, record.tag) != (name, tag):
            raise InvalidImage(f"{what} is a record of {record.name}:{record.tag}")
        return StoredReference(record, generation)

    async def list(self) -> list[StoredReference]:
        """See `Store.list_references`."""
        found = await self._files.run(layout.REFS, self._names)
        states = [await self._listed(name, tag) for name, tag in sorted(found)]
        return [state for state in states if state is not None]


def _holds(newest: StoredReference, change: ReferenceRecord, generation: int) -> bool:
    """Whether `change` is the newest state, or was that `generation` by the newest one's history.

    It is neither if it was written where an old generation had been removed.
    """
    if newest.version <= generation:
        return newest.record.write_id == change.write_id
    past = newest.record.history[newest.version - generation - 1 :][:1]
    return bool(past) and past[0].target == change.target


def _generations(folder: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if len(name) == 16 and name.isdecimal())


def _remove_old_generations(folder: str, newest: int) -> None:
    for generation in _generations(folder):
        if generation <= newest - KEPT_GENERATIONS:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, f"{generation:016d}"))
