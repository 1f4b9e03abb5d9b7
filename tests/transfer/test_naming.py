"""References are never pointed at what a collector takes away (SPEC.md 11.1)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import Conflict, InvalidInput, NotFound
from imgfmt.image import Image
from imgfmt.lease import Decision, Doomed, ObjectKind, Verdict
from imgfmt.reference import ImageRef, TargetKind, parse_reference
from imgfmt.store_record import StoreRecord
from transfer import naming
from transfer.catalog import Catalog, init_store, open_catalog
from transfer.config import TransferConfig
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.posix import PosixStore

CONFIG = TransferConfig(n_threads=2)

Use = Callable[[Catalog], Awaitable[None]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory to push."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(secrets.token_bytes(100_000))
    return tmp_path / "source"


@pytest.fixture
def within(tmp_path: Path) -> Iterator[Callable[[Use], None]]:
    """Runs a test's coroutine with the catalog of a new store."""
    store = PosixStore(str(tmp_path / "store"))

    async def whole(use: Use) -> None:
        await init_store(store, StoreRecord(secrets.token_bytes(16), concurrent_writers=True))
        catalog = await open_catalog(store, write=True)
        await use(catalog)
        assert await store.list_objects(layout.LEASES) == []

    yield lambda use: asyncio.run(whole(use))
    store.close()


async def pushed(catalog: Catalog, source: Path, tag: str | None = None) -> Digest:
    """An image in the store, without a reference if there is no tag."""
    request = PushRequest(
        [DirectorySource("main", str(source))], reference=("a", tag) if tag else None
    )
    return (await push(catalog, request, config=CONFIG)).digest


async def doom(catalog: Catalog, image: Digest, what: str, *, verdict: bool = False) -> bytes:
    """What a collector does that means to delete a part of an image; returns the epoch."""
    found = await catalog.image(image)
    assert isinstance(found, Image)
    tree = found.members[0].tree
    placed = (await catalog.content(tree)).placement
    objects = {
        "image": (ObjectKind.IMAGE, image),
        "tree": (ObjectKind.TREE, tree),
        "placement": (ObjectKind.PLACEMENT, tree),
    }
    epoch = secrets.token_bytes(16)
    doomed = Doomed(
        epoch,
        frozenset([placed.packs[0].tobytes()] if what == "pack" else []),
        frozenset([objects[what]] if what in objects else []),
    )
    await catalog.store.put(layout.doomed_key(epoch), doomed.encode())
    if verdict:
        record = Verdict(epoch, Decision.DELETE, "collector")
        assert await catalog.store.create(layout.verdict_key(epoch), [record.encode()])
    return epoch


async def lease_taken(catalog: Catalog) -> None:
    """Wait as a collector does that sees the store and nothing else."""
    while not await catalog.store.list_objects(layout.LEASES):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def by_digest(image: Digest) -> ImageRef:
    return parse_reference(str(image))


async def target(catalog: Catalog, name: str, tag: str) -> Digest | None:
    state = await catalog.store.read_reference(name, tag)
    return state.record.target if state else None


def test_an_image_without_a_reference_can_be_tagged(
    within: Callable[[Use], None], source: Path
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        done = await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        assert done == naming.Naming("b:1", TargetKind.IMAGE, image, changed=True)
        assert await target(catalog, "b", "1") == image

    within(use)


@pytest.mark.parametrize("what", ["image", "tree", "placement"])
def test_a_doomed_object_is_rescued_before_it_is_tagged(
    within: Callable[[Use], None], source: Path, what: str
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        epoch = await doom(catalog, image, what)
        await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        raw = await catalog.store.get(layout.verdict_key(epoch))
        assert Verdict.decode(raw, "verdict").verdict is Decision.CANCEL

    within(use)


def test_an_image_whose_pack_is_doomed_is_not_tagged(
    within: Callable[[Use], None], source: Path
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        await doom(catalog, image, "pack")
        with pytest.raises(Conflict, match="push it again"):
            await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        assert await target(catalog, "b", "1") is None

    within(use)


def test_a_tag_waits_for_a_deletion_that_is_decided_and_then_finds_nothing(
    within: Callable[[Use], None], source: Path
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        epoch = await doom(catalog, image, "image", verdict=True)

        async def collect() -> None:
            await lease_taken(catalog)
            await catalog.store.delete(layout.image_key(image))
            await catalog.store.delete(layout.verdict_key(epoch))
            await catalog.store.delete(layout.doomed_key(epoch))

        async with asyncio.TaskGroup() as group:
            group.create_task(collect())
            with pytest.raises(NotFound):
                await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        assert await target(catalog, "b", "1") is None

    within(use)


@pytest.mark.parametrize("prefix", [layout.TREES, layout.PLACEMENTS, layout.PACKS])
def test_an_image_of_which_something_is_gone_is_not_tagged(
    within: Callable[[Use], None], source: Path, prefix: str
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        for facts in await catalog.store.list_objects(prefix):
            await catalog.store.delete(facts.key)
        with pytest.raises(NotFound, match=prefix):
            await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        assert await target(catalog, "b", "1") is None

    within(use)


class Dooming(PosixStore):
    """A store in which a collector dooms an image's pack between two listings of `doomed/`."""

    epoch_wanted: Callable[[], Awaitable[object]] | None = None
    n_lists = 0

    async def list_objects(self, prefix: str):  # type: ignore[no-untyped-def]
        if prefix == layout.DOOMED:
            self.n_lists += 1
            if self.n_lists == 2 and self.epoch_wanted is not None:
                await self.epoch_wanted()
        return await super().list_objects(prefix)


@pytest.mark.parametrize(("what", "tagged"), [("pack", False), ("tree", True)])
def test_doomed_is_read_again_after_all_was_seen_to_exist(
    source: Path, tmp_path: Path, what: str, tagged: bool
) -> None:
    async def use() -> None:
        store = Dooming(str(tmp_path / "store"))
        await init_store(store, StoreRecord(secrets.token_bytes(16), concurrent_writers=True))
        catalog = await open_catalog(store, write=True)
        image = await pushed(catalog, source)
        store.n_lists = 0
        store.epoch_wanted = lambda: doom(catalog, image, what)
        try:
            if tagged:
                await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
                assert [f for f in await store.list_objects(layout.DOOMED) if "verdict" in f.key]
            else:
                with pytest.raises(Conflict):
                    await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        finally:
            store.close()

    asyncio.run(use())


def test_a_tag_that_someone_else_changes_meanwhile_is_a_conflict(
    within: Callable[[Use], None], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source, "1")
        real = naming._protect

        async def slow(*args: object, **kwargs: object) -> TargetKind:
            monkeypatch.setattr(naming, "_protect", real)
            await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
            return TargetKind.IMAGE

        monkeypatch.setattr(naming, "_protect", slow)
        with pytest.raises(Conflict, match="b:1"):
            await naming.tag(catalog, by_digest(image), "b", "1", config=CONFIG)
        with pytest.raises(NotFound):
            await naming.remove(catalog, "c", "1")

    within(use)


def test_a_removed_reference_remembers_what_it_pointed_to(
    within: Callable[[Use], None], source: Path
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source, "1")
        removed = await naming.remove(catalog, "a", "1")
        assert removed.target == image
        state = await catalog.store.read_reference("a", "1")
        assert state is not None
        assert state.record.target_kind is TargetKind.NONE
        assert state.record.history[0].target == image
        with pytest.raises(NotFound):
            await naming.remove(catalog, "a", "1")
        with pytest.raises(NotFound):
            await catalog.resolve(parse_reference("a:1"))

    within(use)


def test_variants_are_written_again_when_a_collector_dooms_them(
    within: Callable[[Use], None], source: Path
) -> None:
    async def use(catalog: Catalog) -> None:
        image = await pushed(catalog, source)
        done = await naming.write_variants(catalog, [by_digest(image)], "v", "1", config=CONFIG)
        assert done.target_kind is TargetKind.VARIANTS
        await naming.remove(catalog, "v", "1")
        epoch = secrets.token_bytes(16)
        doomed = Doomed(epoch, frozenset(), frozenset([(ObjectKind.IMAGE, done.target)]))
        await catalog.store.put(layout.doomed_key(epoch), doomed.encode())
        verdict = Verdict(epoch, Decision.DELETE, "collector")
        await catalog.store.create(layout.verdict_key(epoch), [verdict.encode()])

        async def collect() -> None:
            await lease_taken(catalog)
            await asyncio.sleep(0.01)
            for key in (
                layout.image_key(done.target),
                layout.verdict_key(epoch),
                layout.doomed_key(epoch),
            ):
                await catalog.store.delete(key)

        async with asyncio.TaskGroup() as group:
            group.create_task(collect())
            await naming.write_variants(catalog, [by_digest(image)], "v", "1", config=CONFIG)
        assert await catalog.image(done.target)

    within(use)


def test_variants_name_images_and_each_once(within: Callable[[Use], None], source: Path) -> None:
    async def use(catalog: Catalog) -> None:
        image = by_digest(await pushed(catalog, source, "1"))
        await naming.write_variants(catalog, [image], "v", "1", config=CONFIG)
        for wrong in ([image, parse_reference("a:1")], [parse_reference("v:1")]):
            with pytest.raises(InvalidInput):
                await naming.write_variants(catalog, wrong, "v", "2", config=CONFIG)
        assert await target(catalog, "v", "2") is None

    within(use)
