"""A collector that follows SPEC.md 11.2 step by step, in a store whose clock a test moves."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from imgfmt import layout
from imgfmt.digest import Digest, Octets
from imgfmt.errors import NotFound
from imgfmt.image import Variants
from imgfmt.lease import Decision, Doomed, Lease, ObjectKind, Verdict
from transfer.catalog import Catalog
from transfer.store.base import ObjectFacts, PackSink, Store
from transfer.testing.interpose import InterposedStore

SECOND_NS = 1_000_000_000

PREFIXES = {
    layout.IMAGES: ObjectKind.IMAGE,
    layout.TREES: ObjectKind.TREE,
    layout.PLACEMENTS: ObjectKind.PLACEMENT,
}
"""In the order of deletion."""


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


@dataclass
class Marked:
    """What references need."""

    packs: set[bytes] = field(default_factory=set)
    objects: set[tuple[ObjectKind, Digest]] = field(default_factory=set)


class Collector:
    """`steps` collects once, and stops after each step of the protocol to say which it was."""

    def __init__(self, store: Store, catalog: Catalog, clock: Clock) -> None:
        self._store = store
        self._catalog = Catalog(store, catalog.record)
        self._clock = clock
        self._ttl_s = catalog.record.lease_ttl_s
        self._lease = Lease(secrets.token_bytes(16), "collect", "test", self._ttl_s)
        self._renewed_s = clock.now_s
        self.deleted: list[str] = []

    async def steps(self) -> AsyncGenerator[str, None]:
        """The name of each step when it is done; "waiting" as often as one asks."""
        await self.renew()
        if not await self._is_alone():
            return
        async for step in self._steps():
            yield step
            if self._clock.now_s - self._renewed_s >= self._ttl_s:
                return
            await self.renew()
        await self._store.delete(layout.lease_key(self._lease.id))

    async def renew(self) -> None:
        """Write the collector's own lease."""
        self._renewed_s = self._clock.now_s
        await self._store.put(layout.lease_key(self._lease.id), [self._lease.encode()])

    async def _steps(self) -> AsyncIterator[str]:
        async for step in self._end_what_was_left():
            yield step
        while True:
            begun_ns = self._clock.now_ns
            leases = await self._live_leases()
            since_ns = min([begun_ns, *leases.values()])
            yield "leases noted"
            marked = await self._mark()
            if marked is None:
                return
            yield "marked"
            doomed = await self._candidates(marked, since_ns)
            if not doomed.packs and not doomed.objects:
                return
            await self._store.put(layout.doomed_key(doomed.epoch), doomed.encode())
            yield "doomed"
            doomed_s = self._clock.now_s
            waited_for = set(await self._live_leases())
            while waited_for or self._clock.now_s < doomed_s + self._ttl_s:
                yield "waiting"
                waited_for &= set(await self._live_leases())
            yield "waited"
            spared = await self._mark()
            yield "marked again"
            if spared is None:
                await self._cancel(doomed.epoch)
                return
            if await self._decide(doomed.epoch):
                yield "decided"
                break
            yield "cancelled"
        async for step in self._delete(doomed, spared):
            yield step

    async def _end_what_was_left(self) -> AsyncIterator[str]:
        keys = [facts.key for facts in await self._store.list_objects(layout.DOOMED)]
        for key in keys:
            if key.endswith(".verdict"):
                if key.removesuffix(".verdict") not in keys:
                    await self._store.delete(key)
                continue
            doomed = Doomed.decode(await self._store.get(key), key)
            verdict_key = layout.verdict_key(doomed.epoch)
            verdict = Verdict(doomed.epoch, Decision.CANCEL, "test")
            if not await self._store.create(verdict_key, [verdict.encode()]):
                verdict = Verdict.decode(await self._store.get(verdict_key), verdict_key)
            yield "left epoch found"
            if verdict.verdict is Decision.DELETE:
                marked = await self._mark()
                assert marked is not None
                async for step in self._delete(doomed, marked):
                    yield step
            await self._remove(doomed.epoch)
            yield "left epoch ended"

    async def _leases(self) -> list[tuple[ObjectFacts, Lease, bool]]:
        """All leases but the collector's own, and whether they are over."""
        found: list[tuple[ObjectFacts, Lease, bool]] = []
        for facts in await self._store.list_objects(layout.LEASES):
            try:
                lease = Lease.decode(await self._store.get(facts.key), facts.key)
            except NotFound:
                continue
            if lease.id != self._lease.id:
                end_ns = facts.written_ns + lease.ttl_s * SECOND_NS
                found.append((facts, lease, end_ns < self._clock.now_ns))
        return found

    async def _is_alone(self) -> bool:
        found = await self._leases()
        return all(is_over or lease.purpose != "collect" for _, lease, is_over in found)

    async def _live_leases(self) -> dict[str, int]:
        """When each live lease was first written at the latest; removes those that are over."""
        live: dict[str, int] = {}
        for facts, lease, is_over in await self._leases():
            if is_over:
                await self._store.delete(facts.key)
            else:
                live[facts.key] = facts.written_ns - lease.renewal * lease.ttl_s * SECOND_NS
        return live

    async def _mark(self) -> Marked | None:
        """None where a reference can't be read, or something is missing that one needs."""
        marked = Marked()
        try:
            for state in await self._store.list_references():
                if state.problem:
                    return None
                roots = state.record.roots(self._clock.now_ns, self._catalog.record.history_s)
                for digest in roots:
                    await self._mark_image(digest, marked)
        except NotFound:
            return None
        return marked

    async def _mark_image(self, digest: Digest, marked: Marked) -> None:
        marked.objects.add((ObjectKind.IMAGE, digest))
        image = await self._catalog.image(digest)
        if isinstance(image, Variants):
            for variant in image.images:
                await self._mark_image(variant.digest, marked)
            return
        for member in image.members:
            content = await self._catalog.content(member.tree)
            marked.objects.add((ObjectKind.TREE, member.tree))
            marked.objects.add((ObjectKind.PLACEMENT, member.tree))
            marked.packs |= {name.tobytes() for name in content.placement.packs}

    async def _candidates(self, marked: Marked, since_ns: int) -> Doomed:
        packs: set[bytes] = set()
        for facts in await self._store.list_objects(layout.PACKS):
            name = layout.pack_name_of(facts.key)
            if name and name not in marked.packs and facts.written_ns < since_ns:
                packs.add(name)
        objects: set[tuple[ObjectKind, Digest]] = set()
        for prefix, kind in PREFIXES.items():
            for facts in await self._store.list_objects(prefix):
                digest = layout.digest_of_key(facts.key)
                if digest and facts.written_ns < since_ns:
                    objects |= {(kind, digest)} - marked.objects
        return Doomed(secrets.token_bytes(16), frozenset(packs), frozenset(objects))

    async def _decide(self, epoch: bytes) -> bool:
        """Whether the verdict is ours; where it is a writer's, the epoch is removed."""
        verdict = layout.verdict_key(epoch)
        if await self._store.create(verdict, [Verdict(epoch, Decision.DELETE, "test").encode()]):
            return True
        await self._remove(epoch)
        return False

    async def _cancel(self, epoch: bytes) -> None:
        verdict = Verdict(epoch, Decision.CANCEL, "test")
        await self._store.create(layout.verdict_key(epoch), [verdict.encode()])
        await self._remove(epoch)

    async def _remove(self, epoch: bytes) -> None:
        await self._store.delete(layout.doomed_key(epoch))
        await self._store.delete(layout.verdict_key(epoch))

    async def _delete(self, doomed: Doomed, spared: Marked) -> AsyncIterator[str]:
        keys = [
            prefix + digest.hex
            for prefix, kind in PREFIXES.items()
            for its_kind, digest in sorted(doomed.objects - spared.objects)
            if its_kind is kind
        ]
        keys += [layout.pack_key(name) for name in sorted(doomed.packs - spared.packs)]
        for key in keys:
            await self._store.delete(key)
            self.deleted.append(key)
            yield f"deleted {key}"
        for key in (layout.doomed_key(doomed.epoch), layout.verdict_key(doomed.epoch)):
            await self._store.delete(key)
            yield f"removed {key}"


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
