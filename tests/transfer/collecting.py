"""The collector step by step, in a store whose clock a test moves."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from imgfmt.digest import Octets
from imgfmt.errors import Conflict, NotFound, StoreUnavailable
from transfer import collect
from transfer.catalog import Catalog
from transfer.store.base import ObjectFacts, PackSink, Store
from transfer.testing.interpose import InterposedStore

SECOND_NS = 1_000_000_000


@dataclass
class Clock:
    """The one clock of a store and of all who use it. Begins later than anyone's real clock."""

    now_s: float = field(default_factory=lambda: time.time() + 10_000)

    def __call__(self) -> float:
        return self.now_s

    @property
    def now_ns(self) -> int:
        """The same in nanoseconds."""
        return int(self.now_s * SECOND_NS)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


class ClockedStore(InterposedStore):
    """A store that says of every object that it was written when `clock` says. One a store.

    What was there before was written long ago.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        super().__init__(store, nothing)
        self._clock = clock
        self._written_ns: dict[str, int] = {}

    def _dated(self, facts: ObjectFacts) -> ObjectFacts:
        return replace(facts, written_ns=self._written_ns.get(facts.key, 0))

    def note(self, key: str) -> None:
        """The object was written now."""
        self._written_ns[key] = self._clock.now_ns

    async def facts(self, key: str) -> ObjectFacts | None:
        found = await super().facts(key)
        return self._dated(found) if found else None

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        return [self._dated(facts) for facts in await super().list_objects(prefix)]

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        await super().put(key, pieces)
        self.note(key)

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        created = await super().create(key, pieces)
        if created:
            self.note(key)
        return created

    async def open_pack(self, key: str) -> PackSink:
        return _ClockedPack(await super().open_pack(key), self, key)


class _ClockedPack:
    def __init__(self, sink: PackSink, store: ClockedStore, key: str) -> None:
        self._sink = sink
        self._store = store
        self._key = key
        self.write = sink.write
        self.abort = sink.abort

    async def commit(self) -> None:
        await self._sink.commit()
        self._store.note(self._key)


async def nothing(operation: str, key: str) -> None:
    """For `InterposedStore`: no more than the operation itself."""


class Collector:
    """The collector of `transfer.collect`, one step at a time and one deletion a step.

    It ends without a word where it must stop: someone else collects, its own lease was over, or
    what a reference needs is absent for a while (SPEC.md 11.4, note).
    """

    def __init__(self, store: Store, catalog: Catalog, clock: Clock) -> None:
        self._catalog = Catalog(store, catalog.record)
        self._clock = clock
        self._real = self._new()
        self.deleted: list[str] = []

    def _new(self) -> collect.Collector:
        return collect.Collector(self._catalog, now_s=self._clock, n_deletes=1)

    async def steps(self) -> AsyncGenerator[str, None]:
        """The name of each step when it is done; "waiting" as often as one asks."""
        self._real = self._new()
        try:
            async for step in self._real.steps():
                self.deleted = self._real.deleted
                is_deleted = step is collect.Step.DELETED
                yield f"deleted {self.deleted[-1]}" if is_deleted else step.value
        except (Conflict, NotFound, StoreUnavailable):
            await self._real.give_up()

    async def renew(self) -> None:
        """Write the collector's own lease."""
        await self._real.lease.renew()


async def advance(steps: AsyncIterator[str], until: str = "waiting") -> str:
    """Let a collector go on until it has to wait, is done or has done the step `until`.

    Returns the last step, "" where it is done.
    """
    while True:
        try:
            step = await anext(steps)
        except StopAsyncIteration:
            return ""
        if step in (until, "waiting"):
            return step


async def collect_all(steps: AsyncIterator[str], clock: Clock, ttl_s: float) -> None:
    """Let a collector go on to its end; whoever else has a lease and does not renew it loses it."""
    while await advance(steps):
        clock.advance(ttl_s / 4)
