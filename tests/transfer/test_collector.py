"""A collector at work between any two steps of a push: references never dangle (SPEC.md 11).

Long, because all scenarios play in one world, which is most of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import Conflict, ImageError, NotFound, StoreUnavailable
from imgfmt.image import Image, Member
from imgfmt.lease import Decision, Doomed, Verdict
from imgfmt.reference import ImageRef
from imgfmt.store_record import StoreRecord
from tests.transfer.collecting import (
    Clock,
    ClockedStore,
    Collector,
    advance,
    collect_all,
    nothing,
)
from tests.transfer.pushes import (
    CONFIG,
    new_store,
    noise,
    push_interposed,
    pushed,
    quick_folder,
    remove_reference,
    request_of,
    run,
    target_of,
    write_files,
)
from tests.transfer.store_check import check_references
from transfer import leases, naming
from transfer.catalog import Catalog, open_catalog
from transfer.push import PushReport, PushRequest
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore
from transfer.threads import P, T, Threads

TTL_S = 100
KINDS = ["again", "member and directory"]
Act = Callable[[int], Awaitable[None]]

FILES = {"f": noise(9000), "g": noise(8000, 1), "h": b"x" * 7000}
CHANGED = FILES | {"g": noise(8000, 2)}


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Nothing here is about durability, nor about how long a writer waits for a collector."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        patch.setattr(leases, "_EPOCH_WAIT_S", 0)
        yield


class Inline(Threads):
    """Does at once what a thread would do: quicker, and every run is like the others."""

    def __init__(self) -> None:
        super().__init__("none", 1)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return work(*args, **kwargs)


class World:
    """A store with one image that is kept and one whose reference is gone; a copy of `template`."""

    def __init__(self, template: Path, place: Path) -> None:
        shutil.copytree(template / "store", place)
        self.clock = Clock()
        self.posix = PosixStore(str(place))
        self.posix._files.threads = Inline()
        self.store = ClockedStore(self.posix, self.clock)
        self.sources = template
        self.place = place
        self.begun: list[AsyncGenerator[str, None]] = []

    async def open(self) -> World:
        """Read the store record and what is known of the images."""
        self.catalog = await open_catalog(self.store)
        self.kept = await target_of(self.posix, "keep")
        gone = await self.store.read_reference("snap", "v1")
        assert gone is not None
        target = gone.record.history[0].target
        assert target is not None
        self.gone = target
        image = await self.catalog.image(target)
        assert isinstance(image, Image)
        self.gone_member: Member = image.members[0]
        return self

    def collect(self) -> AsyncGenerator[str, None]:
        """The steps of a collector, which `check` lets come to its end."""
        self.collector = Collector(self.store, self.catalog, self.clock)
        self.begun.append(self.collector.steps())
        return self.begun[-1]

    async def outwait(self) -> None:
        """Let so much time pass that the latest collector need not wait any more; it is awake."""
        for _ in range(5):
            self.clock.advance(TTL_S / 4)
            await self.collector.renew()

    def request(self, kind: str, tag: str = "v1") -> PushRequest:
        """A push that uses again what the reference that is gone has left."""
        stored = [replace(self.gone_member, name="stored")] if "member" in kind else []
        sources = {"again": ["again"], "changed": ["changed"], "member": []}
        names = sources.get(kind, ["changed"])
        return replace(request_of(*(self.sources / name for name in names), tag=tag), stored=stored)

    async def push(self, kind: str, act: Act | None = None) -> PushReport | ImageError:
        """Push, with `act(position)` before every store operation. Conflicts are an answer."""
        n_operations, in_turn = 0, asyncio.Lock()

        async def before(operation: str, key: str) -> None:
            nonlocal n_operations
            async with in_turn:
                self.clock.advance(0.01)
                position, n_operations = n_operations, n_operations + 1
                try:
                    if act is not None:
                        await act(position)
                except ImageError as error:
                    raise AssertionError(f"the collector failed: {error}") from error

        answer: PushReport | ImageError
        try:
            answer = await push_interposed(self.store, self.request(kind), before, now_s=self.clock)
        except (Conflict, NotFound) as error:
            answer = error
        assert "member" in kind or isinstance(answer, PushReport), answer
        return answer

    async def check(self, answer: PushReport | ImageError) -> None:
        """No reference dangles now, after a whole collection, and after everyone's end."""
        expected = {"snap:keep": self.kept}
        if isinstance(answer, PushReport):
            expected["snap:v1"] = answer.digest
        assert await check_references(self.posix) == expected
        for steps in self.begun:
            await collect_all(steps, self.clock, TTL_S)
        self.clock.advance(TTL_S + 1)  # a push that ended may have killed a collector within it
        await collect_all(self.collect(), self.clock, TTL_S)
        await self.check_no_garbage(expected)

    async def check_no_garbage(self, references: dict[str, Digest | None]) -> None:
        """All that is left is what references need."""
        assert await self.store.list_objects(layout.DOOMED) == []
        assert await self.store.list_objects(layout.LEASES) == []
        found = {f.key for prefix in ("images/", "trees/", "placements/", "packs/")
                 for f in await self.store.list_objects(prefix)}  # fmt: skip
        wanted = set()
        for digest in references.values():
            assert digest is not None
            wanted |= await needs_of(self.catalog, digest)
        assert found == wanted

    def close(self) -> None:
        self.posix.close()
        shutil.rmtree(self.place)


async def needs_of(catalog: Catalog, digest: Digest) -> set[str]:
    """Keys of all that an image needs."""
    image = await catalog.image(digest)
    assert isinstance(image, Image)
    needs = {layout.image_key(digest)}
    for member in image.members:
        content = await catalog.content(member.tree)
        needs |= {layout.tree_key(member.tree), layout.placement_key(member.tree)}
        needs |= {layout.pack_key(name.tobytes()) for name in content.placement.packs}
    return needs


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    store = new_store(folder / "store", pack_bytes=4096, lease_ttl_s=TTL_S)
    again = write_files(folder / "again", FILES)
    write_files(folder / "changed", CHANGED)
    keep = write_files(folder / "keep", {"h": FILES["h"], "k": noise(9000, 7)})
    pushed(store, keep, tag="keep")
    pushed(store, again)
    run(remove_reference(store))
    store.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with quick_folder(tmp_path) as folder:
        yield folder


@pytest.fixture
def world(template: Path, folder: Path) -> Iterator[World]:
    world = run(World(template, folder / "world").open())
    yield world
    world.close()


Scenario = Callable[[World, int], Act]


def run_at_all_positions(template: Path, folder: Path, kind: str, scenario: Scenario) -> None:
    """Play a scenario for each position that a store operation of the push has."""

    async def play(position: int) -> bool:
        world = await World(template, folder / f"w{position}").open()
        act, reached = scenario(world, position), False

        async def noting(at: int) -> None:
            nonlocal reached
            reached = reached or at >= position
            await act(at)

        try:
            await world.check(await world.push(kind, noting))
        finally:
            world.close()
        return reached

    position = 0
    while run(play(position)):
        position += 1
    assert position > 12


def doom_at(world: World, position: int) -> Act:
    """What the push is about to use is doomed in the middle of it."""
    steps = world.collect()

    async def act(at: int) -> None:
        if at == position:
            await advance(steps, "doomed")
        if at > position:
            await advance(steps)

    return act


def finish_at(world: World, position: int) -> Act:
    """What is doomed since before the push is deleted in the middle of it."""
    steps = world.collect()

    async def act(at: int) -> None:
        if at == 0:
            await advance(steps, "doomed")
            await advance(steps)
            await world.outwait()
        if at == position:
            while await advance(steps):
                world.clock.advance(TTL_S / 100)

    return act


def finish_step_by_step_from(world: World, position: int) -> Act:
    """As `finish_at`, but the push goes on between any two steps of the collector."""
    steps = world.collect()

    async def act(at: int) -> None:
        if at == 0:
            await advance(steps, "doomed")
            await advance(steps)
            await world.outwait()
        if at >= position:
            await anext(steps, "")

    return act


def expire_at(world: World, position: int) -> Act:
    """The push is asleep for longer than its lease, and all is collected meanwhile."""

    async def act(at: int) -> None:
        if at == position:
            world.clock.advance(TTL_S + 1)
            await collect_all(world.collect(), world.clock, TTL_S)

    return act


def doom_then_expire_at(world: World, position: int) -> Act:
    """The collection that begins during the push ends when the push is asleep, two steps later."""
    steps = world.collect()

    async def act(at: int) -> None:
        if at == position:
            await advance(steps, "doomed")
        if at == position + 2:
            await collect_all(steps, world.clock, TTL_S)

    return act


def expire_again_and_again(world: World, position: int) -> Act:
    """The push is asleep for too long now and three times more."""

    async def act(at: int) -> None:
        if at >= position and (at - position) % 5 == 0 and at < position + 20:
            world.clock.advance(TTL_S + 1)
            await collect_all(world.collect(), world.clock, TTL_S)

    return act


def remove_lease_late(world: World, position: int) -> Act:
    """A collector that saw the lease end is slow to remove it; another one then sees no lease."""
    seen: list[str] = []
    steps: list[AsyncGenerator[str, None]] = []

    async def act(at: int) -> None:
        if at == position:
            seen.extend(facts.key for facts in await world.store.list_objects(layout.LEASES))
            world.clock.advance(TTL_S + 1)
        if at == position + 2:
            for key in seen:
                await world.store.delete(key)
            steps.append(world.collect())
        if at > position + 2:
            await advance(steps[0])
            world.clock.advance(TTL_S / 40)

    return act


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "scenario",
    [
        doom_at,
        finish_at,
        finish_step_by_step_from,
        expire_at,
        doom_then_expire_at,
        expire_again_and_again,
        remove_lease_late,
    ],
)
def test_no_reference_dangles_wherever_a_collector_meets_a_push(
    template: Path, folder: Path, kind: str, scenario: Scenario
) -> None:
    run_at_all_positions(template, folder, kind, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name_it", [naming.tag, naming.write_variants])
@pytest.mark.parametrize(
    "scenario", [doom_at, finish_at, finish_step_by_step_from, expire_at, doom_then_expire_at]
)
def test_no_reference_dangles_wherever_a_collector_meets_a_naming(
    template: Path, folder: Path, name_it: Any, scenario: Scenario
) -> None:
    """What has no reference any more gets one by its digest, or is told to be gone."""

    async def play(position: int) -> int:
        world = await World(template, folder / f"w{position}").open()
        act, n_operations, in_turn = scenario(world, position), 0, asyncio.Lock()

        async def before(operation: str, key: str) -> None:
            nonlocal n_operations
            async with in_turn:
                n_operations += 1
                await act(n_operations - 1)

        catalog = Catalog(InterposedStore(world.store, before), world.catalog.record)
        gone = ImageRef(digest=world.gone)
        with contextlib.suppress(Conflict, NotFound):
            source = gone if name_it is naming.tag else [gone]
            await name_it(catalog, source, "snap", "v1", config=CONFIG, now_s=world.clock)
        references = await check_references(world.posix)
        for steps in world.begun:
            await collect_all(steps, world.clock, TTL_S)
        assert await check_references(world.posix) == references
        world.close()
        return n_operations

    position = 0
    while position < run(play(position)):
        position += 1
    assert position > 6


class Scheduler:
    """Lets one of those who wait for their next store operation go on, whichever the seed says."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self._rng = rng
        self._clock = clock
        self._waiting: list[asyncio.Future[None]] = []

    async def before(self, operation: str, key: str) -> None:
        """For `InterposedStore`."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]

    async def run(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Schedule until all tasks are done."""
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0 if self._waiting else 0.001)
            if self._waiting:
                chosen = self._waiting.pop(self._rng.randrange(len(self._waiting)))
                if not chosen.cancelled():
                    chosen.set_result(None)
                self._clock.advance(self._rng.random() * TTL_S / 150)
                for _ in range(self._rng.randint(0, 4)):
                    await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_no_reference_dangles_while_two_pushes_and_a_collector_interleave(
    template: Path, folder: Path, part: int
) -> None:
    for seed in range(25 * part, 25 * part + 25):
        run(interleave(template, folder / f"s{seed}", seed))


async def interleave(template: Path, place: Path, seed: int) -> None:
    """Two pushes of what a collector is about to delete; one of them may oversleep its lease."""
    rng = random.Random(seed)
    world = await World(template, place).open()
    scheduler = Scheduler(rng, world.clock)
    store = InterposedStore(world.store, scheduler.before)
    collector = Collector(store, world.catalog, world.clock)
    pushing = True

    async def push(tag: str) -> PushReport | ImageError:
        oversleeps_at = rng.choice([None, rng.randrange(40)])
        n_operations = 0

        async def before(operation: str, key: str) -> None:
            nonlocal n_operations
            await scheduler.before(operation, key)
            n_operations += 1
            if n_operations == oversleeps_at:
                for _ in range(5):
                    world.clock.advance(TTL_S / 4)
                    await collector.renew()

        request = world.request(rng.choice(["again", "changed", *KINDS]), tag)
        answer: PushReport | ImageError
        try:
            answer = await push_interposed(world.store, request, before, now_s=world.clock)
        except (Conflict, NotFound) as error:
            answer = error
        may_fail = bool(request.stored) or tags[0] == tags[1]
        assert may_fail or isinstance(answer, PushReport), answer
        return answer

    async def collect() -> None:
        while pushing:
            async for _ in collector.steps():
                if not pushing:
                    world.clock.advance(TTL_S / 4)
                    await collector.renew()

    tags = [rng.choice(["v1", "v2"]) for _ in range(2)]
    pushes = [asyncio.create_task(push(tag)) for tag in tags]
    collecting = asyncio.create_task(collect())
    await scheduler.run(pushes)
    pushing = False
    await scheduler.run([collecting])
    await collecting
    references = await check_references(world.posix)
    for tag, pushed_ in zip(tags, pushes, strict=True):
        if isinstance(answer := await pushed_, PushReport) and tags[0] != tags[1]:
            assert references[f"snap:{tag}"] == answer.digest
    world.clock.advance(1)
    await collect_all(world.collect(), world.clock, TTL_S)
    await world.check_no_garbage(dict(references))
    world.close()


@pytest.mark.slow
def test_a_collector_that_stops_after_any_step_is_followed_by_another(
    template: Path, folder: Path
) -> None:
    """What it left is ended, whatever a push did meanwhile."""

    async def play(n_steps: int) -> str:
        world = await World(template, folder / f"w{n_steps}").open()
        step = ""
        steps = Collector(world.store, world.catalog, world.clock).steps()
        for _ in range(n_steps):
            if (step := await anext(steps, "")) == "waiting":
                world.clock.advance(TTL_S / 4)
        await steps.aclose()
        decided = step == "decided" or step.startswith("deleted")
        world.clock.advance(TTL_S + 1)
        if decided:
            await collect_all(world.collect(), world.clock, TTL_S)
        await world.check(await world.push("again"))
        world.close()
        return step

    steps = [run(play(n_steps)) for n_steps in range(1, 30)]
    assert "doomed" in steps
    assert "decided" in steps
    assert any(step.startswith("deleted packs") for step in steps)


async def decided(world: World) -> AsyncGenerator[str, None]:
    """A collector that has just decided to delete."""
    steps = world.collect()
    while (step := await anext(steps)) != "decided":
        world.clock.advance(TTL_S / 4 if step == "waiting" else 0)
    return steps


def test_a_collector_that_decided_and_does_not_go_on_makes_a_push_give_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_EPOCH_WAITS", 3)

    async def work() -> None:
        await decided(world)
        with pytest.raises(
            StoreUnavailable, match=r"deletes and does not end; .*run it again, then push again"
        ):
            await world.push("again")
        assert await check_references(world.posix) == {"snap:keep": world.kept}

    run(work())


def test_a_push_ends_what_a_collector_that_was_killed_had_decided(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_EPOCH_WAITS", 3)

    async def work() -> None:
        await (await decided(world)).aclose()
        world.clock.advance(TTL_S + 1)
        report = await world.push("again")
        assert isinstance(report, PushReport)
        assert await world.store.list_objects(layout.DOOMED) == []
        await world.check(report)

    run(work())


def test_a_push_that_uses_what_is_doomed_cancels_the_collection(world: World) -> None:
    async def work() -> None:
        steps = world.collect()
        await advance(steps, "doomed")
        report = await world.push("again")
        assert isinstance(report, PushReport)
        verdict = (await world.store.list_objects(layout.DOOMED))[1]
        raw = await world.store.get(verdict.key)
        assert Verdict.decode(raw, verdict.key).verdict is Decision.CANCEL
        assert report.counts.new_bytes == sum(map(len, FILES.values())) - 7000  # `h` is kept
        assert report.counts.reused_bytes == 7000
        assert report.counts.chunks == 3
        found = []
        while step := await advance(steps, "cancelled"):
            found.append(step)
            world.clock.advance(TTL_S / 4)
        assert "cancelled" in found
        await world.check(report)

    run(work())


def test_what_a_push_has_written_is_no_candidate_however_often_it_renews(world: World) -> None:
    async def work() -> None:
        before = {facts.key for facts in await world.store.list_objects(layout.PACKS)}
        lease = leases.WriterLease(world.catalog, "push", "me", TTL_S, world.clock)
        await lease.take()
        world.clock.advance(1)
        await pushed_without_reference(world)
        for _ in range(20):
            world.clock.advance(TTL_S / 4)
            await lease.renew()
        steps = world.collect()
        await advance(steps, "doomed")
        [facts] = await world.store.list_objects(layout.DOOMED)
        doomed = Doomed.decode(await world.store.get(facts.key), facts.key)
        assert {layout.pack_key(name) for name in doomed.packs} < before
        assert lease.term == 0
        await lease.drop()

    run(work())


async def pushed_without_reference(world: World) -> PushReport:
    """An image that nothing refers to."""
    request = replace(world.request("changed"), reference=None)
    return await push_interposed(world.store, request, nothing, now_s=world.clock)


def test_garbage_is_collected_when_nobody_pushes(world: World) -> None:
    async def work() -> None:
        collector = Collector(world.store, world.catalog, world.clock)
        await collect_all(collector.steps(), world.clock, TTL_S)
        kinds = [key.partition("/")[0] for key in collector.deleted]
        assert kinds == ["images", "trees", "placements", "packs", "packs"]
        assert world.kept is not None
        await world.check_no_garbage({"snap:keep": world.kept})
        assert await check_references(world.posix) == {"snap:keep": world.kept}

    run(work())


def test_what_the_history_of_a_reference_names_is_kept_for_its_time(
    template: Path, folder: Path
) -> None:
    shutil.copytree(template, folder / "t")
    path = folder / "t" / "store" / layout.STORE_KEY
    record = StoreRecord.decode(path.read_bytes(), "store record")
    path.write_bytes(replace(record, history_s=100_000).encode())

    async def work() -> None:
        world = await World(folder / "t", folder / "w").open()
        for seconds, n_deleted in ((0, 0), (50_000, 0), (100_000, 5)):
            world.clock.advance(seconds)
            collector = Collector(world.store, world.catalog, world.clock)
            await collect_all(collector.steps(), world.clock, TTL_S)
            assert len(collector.deleted) == n_deleted
        world.close()

    run(work())


def test_a_collector_waits_for_a_push_and_spares_what_it_published(world: World) -> None:
    async def work() -> None:
        steps = world.collect()
        waits: list[str] = []

        async def act(at: int) -> None:
            world.clock.advance(TTL_S / 50)
            waits.append(await advance(steps))

        report = await world.push("changed", act)
        assert set(waits) == {"waiting"}
        await world.check(report)

    run(work())
