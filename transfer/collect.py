"""Garbage collection by SPEC.md 11.2: beside any number of readers and writers, and safe from them.

It takes at least as long as a lease may last (`lease_ttl_s` of the store, an hour unless it says
otherwise), because a push that has looked at what it may use again must be given time to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from imgfmt import layout
from imgfmt.errors import Conflict, ImageError, StoreUnavailable
from imgfmt.lease import Decision, Doomed, ObjectKind, Verdict
from transfer.catalog import Catalog
from transfer.execute import each
from transfer.garbage import PREFIXES, Garbage, Named, Needed, mark, object_key, unneeded
from transfer.leases import WriterLease, boot_s, live_leases
from transfer.leftovers import remove_leftovers
from transfer.progress import Progress, Silent
from transfer.pushing.indexing import forget_packs
from transfer.references import whoami
from transfer.tasks import beside, finished

PURPOSE = "collect"
N_DELETES = 16

TTL_S = 600
"""How long a collector that was killed keeps others away, at most."""

_SECOND_NS = 1_000_000_000
_LOOK_EVERY_S = 10.0


class Step(StrEnum):
    """What a collector has done just now, or does: it waits."""

    LEFT_FOUND = "left epoch found"
    LEFT_ENDED = "left epoch ended"
    LEASES_NOTED = "leases noted"
    MARKED = "marked"
    DOOMED = "doomed"
    WAITING = "waiting"
    WAITED = "waited"
    MARKED_AGAIN = "marked again"
    CANCELLED = "cancelled"
    DECIDED = "decided"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What a collection deleted, or would delete: packs, other objects, and their bytes.

    `needed_bytes` stay because references or their history need them, `young_bytes` because they
    are not older than the leases of writers at work.
    """

    packs: int
    objects: int
    freed_bytes: int
    needed_bytes: int
    young_bytes: int
    seconds: float


async def plan_collection(
    catalog: Catalog, history_s: int | None = None, *, now_s: Callable[[], float] = time.time
) -> CollectReport:
    """What `collect` would delete now. Writes nothing, not even a lease; raises as `collect`."""
    now_ns = int(now_s() * _SECOND_NS)
    live = await live_leases(catalog, now_ns)
    begun = [one.begun_ns for one in live if one.lease.purpose != PURPOSE]
    garbage = await unneeded(
        catalog, await mark(catalog, now_ns, _history_s(catalog, history_s)), min([now_ns, *begun])
    )
    return _report(garbage, len(garbage.packs), len(garbage.objects), garbage.size_bytes, 0.0)


async def collect(
    catalog: Catalog, history_s: int | None = None, *, progress: Progress | None = None
) -> CollectReport:
    """Delete what neither references nor their history need, nor a writer at work.

    `history_s` is for how long replaced and deleted targets are kept, in seconds; else it is as
    long as the store's record says. Waits for writers if there is anything to delete.
    Raises Conflict where another collector is at work, what `mark` raises where it can't be known
    what is needed (nothing is deleted then), StoreUnavailable where its own lease was over. Where
    it is cancelled before it decided, nothing is deleted; else the next collector ends its work.
    """
    catalog.record.check_deletable()
    begun_s = time.monotonic()
    collector = Collector(catalog, history_s)
    try:
        await beside(_run(collector, progress or Silent()), collector.lease.keep())
    finally:
        await finished(collector.give_up())
    return collector.report(time.monotonic() - begun_s)


async def end_left_epochs(catalog: Catalog, now_s: Callable[[], float] = boot_s) -> None:
    """End what collectors that were killed had decided. Raises Conflict where one is at work."""
    collector = Collector(catalog, now_s=now_s)
    try:
        await beside(collector.end_left(), collector.lease.keep())
    finally:
        await finished(collector.give_up())


async def _run(collector: Collector, progress: Progress) -> None:
    shown = None
    async for step in collector.steps():
        if step is not shown:
            progress.phase(collector.describe(step), 0)
        shown = step
        if step is Step.WAITING:
            await asyncio.sleep(min(_LOOK_EVERY_S, collector.wait_s / 20))


class Collector:
    """One collection. `steps` does it, and stops after each step of the protocol.

    `deleted` are the keys of what it has deleted.
    """

    def __init__(
        self,
        catalog: Catalog,
        history_s: int | None = None,
        *,
        now_s: Callable[[], float] = boot_s,
        n_deletes: int = N_DELETES,
    ) -> None:
        self._catalog = catalog
        self._store = catalog.store
        self._history_s = _history_s(catalog, history_s)
        self.wait_s = catalog.record.lease_ttl_s
        self.lease = WriterLease(catalog, PURPOSE, whoami(), min(TTL_S, self.wait_s), now_s)
        self._n_deletes = n_deletes
        self._undecided: list[Doomed] = []
        self._garbage = Garbage({}, {}, 0, 0)
        self._sizes: dict[str, int] = {}
        self._freed_bytes = 0
        self.deleted: list[str] = []

    def report(self, seconds: float) -> CollectReport:
        """What was done until now."""
        packs = sum(key.startswith(layout.PACKS) for key in self.deleted)
        n_objects = len(self.deleted) - packs
        return _report(self._garbage, packs, n_objects, self._freed_bytes, seconds)

    def describe(self, step: Step) -> str:
        """The step for people."""
        if step is not Step.WAITING:
            return step.value
        until = time.strftime("%H:%M", time.localtime(time.time() + self.wait_s))
        n_packs = len(self._garbage.packs)
        return f"waiting until {until} or longer for pushes that may need any of {n_packs} packs"

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Collect; each step when it is done, WAITING as often as one asks. Raises as `collect`."""
        await self._begin()
        await remove_leftovers(self._catalog, self.lease)
        async for step in self._steps():
            yield step
            self._check_lease()
            if not self.lease.is_fresh:
                await self.lease.renew()
        await self.lease.drop()

    async def end_left(self) -> None:
        """Only the first step of the protocol. Raises as `collect`."""
        await self._begin()
        async for _ in self._end_what_was_left():
            self._check_lease()

    async def give_up(self) -> None:
        """Take back what was not decided. Does nothing after the end. Leaves the rest if it must.

        What is left is ended by the next collector.
        """
        with contextlib.suppress(ImageError):
            await self._cancel_undecided()
        await self.lease.drop()

    async def _begin(self) -> None:
        """Take the lease. Raises Conflict where another collector has one."""
        await self.lease.take()
        now_ns = await self._now_ns()
        for other in await live_leases(self._catalog, now_ns, own=self.lease.key):
            if other.lease.purpose == PURPOSE:
                await self.lease.drop()
                raise Conflict(
                    f"{self._catalog.named('garbage')} is being collected by {other.lease.who}; if"
                    f" that was killed, its lease ends in {(other.end_ns - now_ns) // _SECOND_NS} s"
                )

    def _check_lease(self) -> None:
        if not self.lease.held_since(0):
            raise StoreUnavailable(
                f"{self._catalog.named('the lease of this collection')} was over, so it stopped;"
                " collect again, which ends what it left"
            )

    async def _now_ns(self) -> int:
        """The store's clock: when our lease was written, which it is for that."""
        self._check_lease()
        await self.lease.renew()
        facts = await self._store.facts(self.lease.key)
        if facts is None:
            raise StoreUnavailable(f"{self._catalog.named(self.lease.key)} was removed meanwhile")
        return facts.written_ns

    async def _mark(self, now_ns: int) -> Needed:
        return await mark(self._catalog, now_ns, self._history_s)

    async def _steps(self) -> AsyncGenerator[Step, None]:
        async for step in self._end_what_was_left():
            yield step
        while True:
            begun_ns = await self._now_ns()
            live = await self._live_leases(begun_ns)
            yield Step.LEASES_NOTED
            needed = await self._mark(begun_ns)
            yield Step.MARKED
            self._garbage = await unneeded(self._catalog, needed, min([begun_ns, *live.values()]))
            self._sizes, self._undecided = self._garbage.sizes(), self._garbage.epochs()
            for doomed in self._undecided:
                await self._store.put(layout.doomed_key(doomed.epoch), doomed.encode())
            if not self._undecided:
                return
            yield Step.DOOMED
            async for step in self._wait():
                yield step
            yield Step.WAITED
            spared = await self._mark(await self._now_ns())
            yield Step.MARKED_AGAIN
            n_cancelled = 0
            while self._undecided:
                doomed = self._undecided[0]
                if await self._decide(doomed):
                    yield Step.DECIDED
                    async for step in self._delete(doomed, spared):
                        yield step
                else:
                    n_cancelled += 1
                    yield Step.CANCELLED
            if not n_cancelled:
                return

    async def _wait(self) -> AsyncGenerator[Step, None]:
        """Until all who may use what is doomed have said so, or their leases are over."""
        since_ns = await self._now_ns()
        waited_for = set(await self._live_leases(since_ns))
        now_ns = since_ns
        while waited_for or now_ns < since_ns + self.wait_s * _SECOND_NS:
            yield Step.WAITING
            now_ns = await self._now_ns()
            waited_for &= set(await self._live_leases(now_ns))

    async def _live_leases(self, now_ns: int) -> dict[str, int]:
        """When each live lease was first written at the latest. Removes those that are over."""
        listed = await self._store.list_objects(layout.LEASES)
        live = await live_leases(self._catalog, now_ns, own=self.lease.key, listed=listed)
        begun_ns = {one.key: one.begun_ns for one in live}
        for facts in listed:
            if facts.key not in begun_ns and facts.key != self.lease.key:
                await self._store.delete(facts.key)
        return begun_ns

    async def _decide(self, doomed: Doomed) -> bool:
        """Whether it may be deleted; where a writer has cancelled it, the epoch is removed."""
        verdict = Verdict(doomed.epoch, Decision.DELETE, whoami())
        key = layout.verdict_key(doomed.epoch)
        is_ours = await self._store.create(key, [verdict.encode()])
        self._undecided.remove(doomed)
        if not is_ours:
            await self._remove(doomed.epoch)
        return is_ours

    async def _cancel_undecided(self) -> None:
        while self._undecided:
            epoch = self._undecided.pop().epoch
            verdict = Verdict(epoch, Decision.CANCEL, whoami())
            if await self._store.create(layout.verdict_key(epoch), [verdict.encode()]):
                await self._remove(epoch)

    async def _remove(self, epoch: bytes) -> None:
        await self._store.delete(layout.doomed_key(epoch))
        await self._store.delete(layout.verdict_key(epoch))

    async def _delete(self, doomed: Doomed, spared: Needed) -> AsyncGenerator[Step, None]:
        """Delete what was decided on and is not `spared`, objects before the packs they name."""

        async def delete(key: str) -> None:
            size_bytes = self._sizes.get(key)
            if size_bytes is None:  # of an epoch that another collector left
                facts = await self._store.facts(key)
                size_bytes = 0 if facts is None else facts.size_bytes
            await self._store.delete(key)
            self._freed_bytes += size_bytes
            self.deleted.append(key)

        packs = sorted(doomed.packs - spared.packs)
        for keys in (
            *(_keys(doomed.objects - spared.objects, kind) for kind in PREFIXES.values()),
            [layout.pack_key(name) for name in packs],
        ):
            for at in range(0, len(keys), self._n_deletes):
                await each(iter(keys[at : at + self._n_deletes]), delete, self._n_deletes)
                yield Step.DELETED
        await forget_packs(self._catalog, packs)
        await self._remove(doomed.epoch)

    async def _end_what_was_left(self) -> AsyncGenerator[Step, None]:
        """End the epochs of collectors that were killed."""
        keys = [facts.key for facts in await self._store.list_objects(layout.DOOMED)]
        for key in keys:
            if key.endswith(".verdict"):
                if key.removesuffix(".verdict") not in keys:
                    await self._store.delete(key)
                continue
            doomed = Doomed.decode(await self._catalog.read(key), self._catalog.named(key))
            verdict_key = layout.verdict_key(doomed.epoch)
            verdict = Verdict(doomed.epoch, Decision.CANCEL, whoami())
            if not await self._store.create(verdict_key, [verdict.encode()]):
                raw = await self._catalog.read(verdict_key)
                verdict = Verdict.decode(raw, self._catalog.named(verdict_key))
            yield Step.LEFT_FOUND
            if verdict.verdict is Decision.DELETE:
                spared = await self._mark(await self._now_ns())
                async for step in self._delete(doomed, spared):
                    yield step
            await self._remove(doomed.epoch)
            yield Step.LEFT_ENDED


def _history_s(catalog: Catalog, history_s: int | None) -> int:
    return catalog.record.history_s if history_s is None else history_s


def _keys(objects: Iterable[Named], kind: ObjectKind) -> list[str]:
    """The keys of the objects of one kind, ascending."""
    return sorted(object_key(named) for named in objects if named[0] is kind)


def _report(
    garbage: Garbage, packs: int, objects: int, freed_bytes: int, seconds: float
) -> CollectReport:
    return CollectReport(
        packs, objects, freed_bytes, garbage.needed_bytes, garbage.young_bytes, seconds
    )
