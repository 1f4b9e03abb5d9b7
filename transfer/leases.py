"""A writer's lease and what collectors have doomed (SPEC.md sections 6.2, 6.3 and 11)."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, NotFound, StoreUnavailable
from imgfmt.lease import Decision, Doomed, Lease, ObjectKind, Verdict
from transfer.catalog import Catalog
from transfer.store.base import ObjectFacts

_EPOCH_WAIT_S = 0.05
_EPOCH_WAITS = 1200
_SECOND_NS = 1_000_000_000


def boot_s() -> float:
    """Seconds that pass while the machine sleeps too, as they do for the store."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WriterLease:
    """One lease in the store. Renew it by running `keep` beside the work.

    `term` is another one after every time that the lease may have been over: what was checked in an
    earlier term may be gone.
    """

    def __init__(
        self,
        catalog: Catalog,
        purpose: str,
        who: str,
        ttl_s: int,
        now_s: Callable[[], float] = boot_s,
    ) -> None:
        self._catalog = catalog
        self._now_s = now_s
        self._lease = Lease(secrets.token_bytes(16), purpose, who, ttl_s, 0)
        self._renewed_s = now_s()
        self._one_renewal = asyncio.Lock()
        self.term = 0

    @property
    def key(self) -> str:
        """The key of the lease in its store; another one in every term."""
        return layout.lease_key(self._lease.id)

    async def take(self) -> None:
        """Write the lease for the first time."""
        await self._write()

    async def renew(self) -> None:
        """Write the lease again. If it may have been over, it is a new one, and a new term.

        For collectors may remove a lease that is over at any time, also when it is written again.
        """
        async with self._one_renewal:
            before_s = self._renewed_s
            await self._write()
            if self._now_s() - before_s < self._lease.ttl_s:
                return
            over = self.key
            self._lease = replace(self._lease, id=secrets.token_bytes(16), renewal=0)
            self.term += 1
            await self._write()
            await self._catalog.store.delete(over)

    async def _write(self) -> None:
        """Write the lease; what counts is when this began."""
        begun_s = self._now_s()
        await self._catalog.store.put(self.key, [self._lease.encode()])
        self._lease = replace(self._lease, renewal=self._lease.renewal + 1)
        self._renewed_s = begun_s

    @property
    def is_fresh(self) -> bool:
        """Whether more than half of the lease is left, so that a reference may be changed."""
        return self._now_s() - self._renewed_s < self._lease.ttl_s / 2

    def held_since(self, term: int) -> bool:
        """Whether the lease was never over since it was in this term."""
        return self.term == term and self._now_s() - self._renewed_s < self._lease.ttl_s

    async def keep(self) -> None:
        """Renew for ever; run it as a task and cancel it at the end."""
        while True:
            await asyncio.sleep(self._lease.ttl_s / 4)
            await self.renew()

    async def drop(self) -> None:
        """Remove the lease. Where that fails it costs collectors time and nothing else."""
        with contextlib.suppress(ImageError):
            await self._catalog.store.delete(self.key)


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A lease that is not over. Times are by the store's clock.

    It was first written at `begun_ns` at the latest.
    """

    key: str
    lease: Lease
    begun_ns: int
    end_ns: int


async def live_leases(
    catalog: Catalog,
    now_ns: int,
    *,
    own: str | None = None,
    listed: Sequence[ObjectFacts] | None = None,
) -> list[LiveLease]:
    """The leases that are not over, but for `own`; of those `listed`, or all."""
    if listed is None:
        listed = await catalog.store.list_objects(layout.LEASES)
    found: list[LiveLease] = []
    for facts in listed:
        if facts.key == own:
            continue
        try:
            lease = Lease.decode(await catalog.read(facts.key), catalog.named(facts.key))
        except NotFound:
            continue
        ttl_ns, written_ns = lease.ttl_s * _SECOND_NS, facts.written_ns
        if written_ns + ttl_ns >= now_ns:
            begun_ns = written_ns - lease.renewal * ttl_ns
            found.append(LiveLease(facts.key, lease, begun_ns, written_ns + ttl_ns))
    return found


@dataclass(frozen=True, slots=True)
class DoomedSet:
    """All that some collector means to delete, and the epochs that say so."""

    packs: frozenset[bytes]
    objects: dict[tuple[ObjectKind, Digest], frozenset[bytes]]

    def epochs(self, wanted: set[tuple[ObjectKind, Digest]]) -> set[bytes]:
        """The epochs that doom any of `wanted`."""
        return {epoch for key in wanted for epoch in self.objects.get(key, ())}


async def read_doomed(catalog: Catalog) -> DoomedSet:
    """Everything under `doomed/` now."""
    packs: set[bytes] = set()
    objects: dict[tuple[ObjectKind, Digest], frozenset[bytes]] = {}
    for facts in await catalog.store.list_objects(layout.DOOMED):
        if facts.key.endswith(".verdict"):
            continue
        try:
            raw = await catalog.read(facts.key)
        except NotFound:
            continue
        doomed = Doomed.decode(raw, catalog.named(facts.key))
        packs |= doomed.packs
        for key in doomed.objects:
            objects[key] = objects.get(key, frozenset()) | {doomed.epoch}
    return DoomedSet(frozenset(packs), objects)


async def rescue_epoch(catalog: Catalog, epoch: bytes, who: str) -> None:
    """Settle that objects of `epoch` may be written: cancel it, or wait until it is carried out.

    Raises StoreUnavailable if a collector that decided to delete does not finish.
    """
    key = layout.verdict_key(epoch)
    if await catalog.store.create(key, [Verdict(epoch, Decision.CANCEL, who).encode()]):
        if await catalog.store.facts(layout.doomed_key(epoch)) is None:
            await catalog.store.delete(key)  # the epoch had ended before
        return
    for _ in range(_EPOCH_WAITS):
        if await catalog.store.facts(layout.doomed_key(epoch)) is None:
            return
        verdict = await _verdict(catalog, key)
        if verdict is not None and verdict.verdict is Decision.CANCEL:
            return
        await asyncio.sleep(_EPOCH_WAIT_S)
    raise StoreUnavailable(
        f"{catalog.named(f'collection {epoch.hex()}')} deletes and does not end; if that"
        " `snapcask gc` was killed, run it again, then push again"
    )


async def _verdict(catalog: Catalog, key: str) -> Verdict | None:
    try:
        return Verdict.decode(await catalog.read(key), catalog.named(key))
    except NotFound:
        return None
