"""A writer's lease, and what writers and collectors tell each other (SPEC.md 6.2, 6.3 and 11)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import InvalidImage, OutOfResources, StoreUnavailable
from imgfmt.lease import Decision, Doomed, Lease, ObjectKind, Verdict
from tests.transfer.collecting import Clock
from tests.transfer.pushes import new_store, run
from transfer import leases
from transfer.catalog import Catalog, open_catalog
from transfer.leases import WriterLease, boot_s, read_doomed, rescue_epoch
from transfer.testing.interpose import InterposedStore

TTL_S = 100
EPOCH, OTHER = bytes([1] * 16), bytes([2] * 16)
TREE = (ObjectKind.TREE, Digest(bytes(32)))
IMAGE = (ObjectKind.IMAGE, Digest(bytes(32)))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    store = new_store(tmp_path / "store")
    yield run(open_catalog(store))
    store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def leases_of(catalog: Catalog) -> list[Lease]:
    found = await catalog.store.list_objects(layout.LEASES)
    return [Lease.decode(await catalog.store.get(facts.key), facts.key) for facts in found]


def test_a_lease_counts_its_renewals_and_goes_when_it_is_dropped(
    catalog: Catalog, clock: Clock
) -> None:
    async def work() -> None:
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        for renewal in range(3):
            [found] = await leases_of(catalog)
            assert (found.purpose, found.who, found.ttl_s) == ("push", "me", TTL_S)
            assert found.renewal == renewal
            clock.advance(TTL_S / 4)
            await lease.renew()
        assert lease.held_since(0)
        await lease.drop()
        assert await leases_of(catalog) == []

    run(work())


def test_a_lease_is_fresh_for_half_its_time_and_held_for_all_of_it(
    catalog: Catalog, clock: Clock
) -> None:
    async def work() -> None:
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        for passed, is_fresh, is_held in ((0, True, True), (49, True, True), (51, False, True),
                                          (99, False, True), (101, False, False)):  # fmt: skip
            now = clock.now_s
            clock.advance(passed)
            assert (lease.is_fresh, lease.held_since(0)) == (is_fresh, is_held)
            clock.now_s = now

    run(work())


@pytest.mark.parametrize("slept_s", [TTL_S - 1, TTL_S, TTL_S + 1, 10 * TTL_S])
def test_a_lease_that_was_over_is_another_one_and_a_new_term(
    catalog: Catalog, clock: Clock, slept_s: int
) -> None:
    async def work() -> None:
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        [before] = await leases_of(catalog)
        clock.advance(slept_s)
        await lease.renew()
        [after] = await leases_of(catalog)
        was_over = slept_s >= TTL_S
        assert (after.id != before.id) == was_over
        assert (after.renewal == 0) == was_over
        assert lease.term == was_over
        assert lease.held_since(0) != was_over
        assert lease.held_since(lease.term)

    run(work())


def test_a_renewal_that_took_too_long_is_a_new_term(catalog: Catalog, clock: Clock) -> None:
    """The lease may have been over, and removed, just before it was written again."""

    async def work() -> None:
        slow = [0.0, TTL_S - 10.0]

        async def before(operation: str, key: str) -> None:
            clock.advance(slow.pop(0) if slow else 0)

        catalog.store = InterposedStore(catalog.store, before)
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        clock.advance(20)
        await lease.renew()
        assert lease.term == 1
        assert len(await leases_of(catalog)) == 1

    run(work())


def test_two_renewals_at_once_leave_one_lease(catalog: Catalog, clock: Clock) -> None:
    async def work() -> None:
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        for slept_s in (1, TTL_S + 1):
            clock.advance(slept_s)
            await asyncio.gather(lease.renew(), lease.renew(), lease.renew())
            assert len(await leases_of(catalog)) == 1
        assert lease.term == 1
        await lease.drop()
        assert await leases_of(catalog) == []

    run(work())


def test_a_lease_is_kept_until_its_keeper_is_cancelled(
    catalog: Catalog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)
        await sleep(0)

    async def work() -> None:
        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        monkeypatch.setattr("asyncio.sleep", noted)
        keeper = asyncio.create_task(lease.keep())
        while len(slept) < 8:
            await sleep(0.001)
        keeper.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeper
        monkeypatch.undo()
        assert lease.term == 0
        assert set(slept) == {TTL_S / 4}

    run(work())


def test_a_lease_that_can_not_be_dropped_is_no_failure(catalog: Catalog, clock: Clock) -> None:
    async def work() -> None:
        async def before(operation: str, key: str) -> None:
            if operation == "delete":
                raise OutOfResources("told to fail")

        lease = WriterLease(catalog, "push", "me", TTL_S, clock)
        await lease.take()
        catalog.store = InterposedStore(catalog.store, before)
        await lease.drop()

    run(work())


def test_the_clock_of_leases_is_one_that_runs_while_the_machine_sleeps() -> None:
    assert abs(boot_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 5


async def doom(catalog: Catalog, doomed: Doomed) -> None:
    await catalog.store.put(layout.doomed_key(doomed.epoch), doomed.encode())


async def decide(catalog: Catalog, decision: Decision) -> None:
    key = layout.verdict_key(EPOCH)
    assert await catalog.store.create(key, [Verdict(EPOCH, decision, "it").encode()])


async def verdict_of(catalog: Catalog) -> Decision | None:
    key = layout.verdict_key(EPOCH)
    if await catalog.store.facts(key) is None:
        return None
    return Verdict.decode(await catalog.store.get(key), key).verdict


def test_what_is_doomed_is_the_union_of_all_epochs(catalog: Catalog) -> None:
    async def work() -> None:
        packs = [secrets.token_bytes(16) for _ in range(3)]
        await doom(catalog, Doomed(EPOCH, frozenset(packs[:2]), frozenset({TREE})))
        await doom(catalog, Doomed(OTHER, frozenset(packs[1:]), frozenset({TREE, IMAGE})))
        await decide(catalog, Decision.DELETE)
        found = await read_doomed(catalog)
        assert found.packs == frozenset(packs)
        assert found.epochs({TREE}) == {EPOCH, OTHER}
        assert found.epochs({IMAGE}) == {OTHER}
        assert found.epochs({(ObjectKind.PLACEMENT, TREE[1])}) == set()

    run(work())


def test_an_epoch_that_goes_while_it_is_read_dooms_nothing(catalog: Catalog) -> None:
    async def work() -> None:
        await doom(catalog, Doomed(EPOCH, frozenset(), frozenset({TREE})))
        store = catalog.store

        async def before(operation: str, key: str) -> None:
            if operation == "get":
                await store.delete(key)

        catalog.store = InterposedStore(store, before)
        assert (await read_doomed(catalog)).objects == {}

    run(work())


def test_what_is_doomed_and_can_not_be_read_stops_the_writer(catalog: Catalog) -> None:
    async def work() -> None:
        await catalog.store.put(layout.doomed_key(EPOCH), [b"what?"])
        with pytest.raises(InvalidImage, match=f"doomed/{EPOCH.hex()} in store"):
            await read_doomed(catalog)

    run(work())


def test_an_epoch_without_a_verdict_is_cancelled(catalog: Catalog) -> None:
    async def work() -> None:
        await doom(catalog, Doomed(EPOCH, frozenset(), frozenset({TREE})))
        await rescue_epoch(catalog, EPOCH, "me")
        assert await verdict_of(catalog) is Decision.CANCEL
        await rescue_epoch(catalog, EPOCH, "another")

    run(work())


def test_an_epoch_that_had_ended_gets_no_verdict(catalog: Catalog) -> None:
    async def work() -> None:
        await rescue_epoch(catalog, EPOCH, "me")
        assert await verdict_of(catalog) is None

    run(work())


def test_an_epoch_that_is_carried_out_is_waited_for(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_EPOCH_WAIT_S", 0)

    async def work() -> None:
        await doom(catalog, Doomed(EPOCH, frozenset(), frozenset({TREE})))
        await decide(catalog, Decision.DELETE)
        waiting = asyncio.create_task(rescue_epoch(catalog, EPOCH, "me"))
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await catalog.store.delete(layout.doomed_key(EPOCH))
        await waiting

    run(work())


def test_an_epoch_that_is_never_carried_out_is_given_up(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_EPOCH_WAIT_S", 0)
    monkeypatch.setattr(leases, "_EPOCH_WAITS", 5)

    async def work() -> None:
        await doom(catalog, Doomed(EPOCH, frozenset(), frozenset({TREE})))
        await decide(catalog, Decision.DELETE)
        with pytest.raises(StoreUnavailable, match=f"collection {EPOCH.hex()} .*run it again"):
            await rescue_epoch(catalog, EPOCH, "me")

    run(work())
