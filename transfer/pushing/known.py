"""Which chunks a store has already, as far as this push may use them.

An index segment only proposes; a chunk counts as known when the table of an existing pack that
nobody has doomed confirms its whole name. Reading that table also proves that the pack exists, so
it happens after the lease was taken (SPEC.md 11.1, step 3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt import index, layout
from imgfmt.errors import CorruptData, ImageError, NotFound
from imgfmt.index import IndexSegment
from imgfmt.pack import PackTable
from transfer.catalog import Catalog
from transfer.execute import each
from transfer.pushing.contents import Place

N_LOOKERS = 16
MERGE_ABOVE_SEGMENTS = 8
LARGE_ENTRIES = 1_000_000
"""Index segments of this many entries are not merged in memory: those of a store are mapped."""

TABLE_CACHE_BYTES = 64 * 1024 * 1024

U8 = npt.NDArray[np.uint8]


class KnownChunks:
    """Looks chunks up by digest, in packs of the store and in those that this push writes."""

    def __init__(self, catalog: Catalog, doomed: frozenset[bytes]) -> None:
        self._catalog = catalog
        self._doomed = set(doomed)
        self._segments: list[IndexSegment] = []
        self._tables: OrderedDict[bytes, PackTable | None] = OrderedDict()
        self._table_bytes = 0
        self._next: tuple[PackTable, int] | None = None
        self._recent: dict[bytes, Place] = {}
        self._numbers: dict[bytes, int] = {}
        self.names: list[bytes] = []
        self.unreadable: set[str] = set()

    async def load(self) -> None:
        """Read all index segments. One that can't be read costs dedup and nothing else."""
        for facts in await self._catalog.store.list_objects(layout.INDEX):
            what = self._catalog.named(facts.key)
            try:
                segment = index.decode(await self._catalog.read(facts.key), what)
            except NotFound:
                continue
            except ImageError as error:
                self.unreadable.add(f"{error}; run `snapcask index rebuild`")
                continue
            self._segments.append(segment)
        self._merge_small()

    def indexed_packs(self) -> set[bytes]:
        """Names of the packs that some segment has."""
        return {pack.tobytes() for segment in self._segments for pack in segment.packs}

    def is_doomed(self, name: bytes) -> bool:
        """Whether the pack may not be used."""
        return name in self._doomed

    def number(self, name: bytes) -> int:
        """The number of a pack, given at first use."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]

    def doom(self, packs: Iterable[bytes]) -> frozenset[int]:
        """Never again use `packs`; returns the numbers of all packs that must not be used."""
        self._doomed |= frozenset(packs)
        self._next = None
        return frozenset(self._numbers[name] for name in self._doomed if name in self._numbers)

    async def check_again(self) -> None:
        """Doom packs that were used and do not exist any more. Own packs must be in the store."""
        gone: list[bytes] = []

        async def look(name: bytes) -> None:
            try:
                there = await self._catalog.store.facts(layout.pack_key(name)) is not None
            except CorruptData:
                there = False
            if not there:
                gone.append(name)

        await each(iter({*self._numbers, *self._tables} - self._doomed), look, N_LOOKERS)
        self.doom(gone)

    def add(self, digest: bytes, place: Place) -> None:
        """A chunk that this push is writing now."""
        self._recent[digest] = place

    def settle(self, segment: IndexSegment, tables: Sequence[PackTable]) -> None:
        """The chunks of these own packs are in the store; `segment` finds them from now on."""
        self._segments.append(segment)
        for table in tables:
            self._keep(table.pack, table)
            for digest in table.names:
                self._recent.pop(digest.tobytes(), None)
        self._merge_small()

    def _merge_small(self) -> None:
        """Leave few segments to look into, and let each merge pay off for many entries."""
        segments = sorted(self._segments, key=len)
        n_small = sum(len(segment) < LARGE_ENTRIES for segment in segments)
        while n_small > MERGE_ABOVE_SEGMENTS:
            merged = index.merge(segments[:MERGE_ABOVE_SEGMENTS])
            segments = sorted([merged, *segments[MERGE_ABOVE_SEGMENTS:]], key=len)
            n_small = sum(len(segment) < LARGE_ENTRIES for segment in segments)
        self._segments = segments

    async def find(self, digests: Sequence[bytes]) -> list[Place | None]:
        """Where each of `digests` lies, or None."""
        found = self._followed(digests) or [self._recent.get(digest) for digest in digests]
        asked = [i for i, place in enumerate(found) if place is None]
        for segment in reversed(self._segments):
            if not asked:
                break
            names = np.frombuffer(b"".join(digests[i] for i in asked), dtype=np.uint8).reshape(
                -1, 32
            )
            await self._find_in(segment, names, asked, found)
            asked = [i for i in asked if found[i] is None]
        return found

    def _followed(self, digests: Sequence[bytes]) -> list[Place | None]:
        """The places of `digests` if they follow in the pack what was found last; else nothing.

        Most of what is known lies as it was pushed, and this costs one comparison a batch.
        """
        if self._next is None:
            return []
        table, row = self._next
        names = table.names[row : row + len(digests)]
        if names.tobytes() != b"".join(digests):
            return []
        found: list[Place | None] = [None] * len(digests)
        order = np.arange(len(digests))
        self._accept(table, order, order + row, order.tolist(), found)
        return found

    async def _find_in(
        self, segment: IndexSegment, names: U8, asked: list[int], found: list[Place | None]
    ) -> None:
        queries, packs, rows = index.find(segment, names)
        for pack in np.unique(packs).tolist():
            name = segment.packs[pack].tobytes()
            table = await self._table(name)
            if table is None:
                continue
            of_pack = packs == pack
            query, row = queries[of_pack], rows[of_pack].astype(np.int64)
            inside = row < len(table)
            query, row = query[inside], row[inside]
            equal = (table.names[row] == names[query]).all(axis=1)
            self._accept(table, query[equal], row[equal], asked, found)

    def _accept(
        self, table: PackTable, query: npt.NDArray[Any], row: npt.NDArray[Any], asked: list[int],
        found: list[Place | None],
    ) -> None:  # fmt: skip
        number = self.number(table.pack) if len(query) else 0
        columns = (query, table.offsets[row], table.stored_bytes[row], table.codecs[row])
        for i, offset, stored, codec in zip(*(c.tolist() for c in columns), strict=True):
            found[asked[i]] = Place(number, offset, stored, codec)
        if len(row):
            self._next = (table, int(row[-1]) + 1)

    async def _table(self, name: bytes) -> PackTable | None:
        """The table of a pack that may be used, else None."""
        if name in self._doomed:
            return None
        if name in self._tables:
            self._tables.move_to_end(name)
            return self._tables[name]
        try:
            table = await self._catalog.pack_table(name)
        except NotFound:
            table = None
        except ImageError as error:
            self.unreadable.add(f"{error}; run `snapcask verify --all`")
            table = None
        self._keep(name, table)
        return table

    def _keep(self, name: bytes, table: PackTable | None) -> None:
        self._tables[name] = table
        self._table_bytes += 60 * len(table) if table is not None else 0
        while self._table_bytes > TABLE_CACHE_BYTES:
            _, dropped = self._tables.popitem(last=False)
            self._table_bytes -= 60 * len(dropped) if dropped is not None else 0
