"""What is garbage, and what stops a collection; `test_collector` plays it against pushes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from imgfmt import layout, lease
from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, InvalidImage, NotFound, StoreUnavailable
from imgfmt.image import Image
from tests.transfer.collecting import Clock, ClockedStore
from tests.transfer.pushes import (
    new_store,
    noise,
    pushed,
    remove_reference,
    run,
    target_of,
    write_files,
)
from tests.transfer.store_check import check_references
from transfer import collect, garbage
from transfer.catalog import Catalog, open_catalog
from transfer.collect import Collector, CollectReport, Step, plan_collection
from transfer.garbage import mark, unneeded
from transfer.leases import WriterLease
from transfer.progress import Silent
from transfer.store.posix import PosixStore

pytestmark = pytest.mark.slow

TTL_S = 1
"""A real collection takes so long."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PosixStore]:
    """Two images that share the chunk of `same`; the reference of the second, v1, is deleted."""
    store = new_store(tmp_path / "store", pack_bytes=4096, lease_ttl_s=TTL_S)
    same = {"same": noise(8192, 9)}
    pushed(store, write_files(tmp_path / "keep", {"k": noise(9000, 7), **same}), tag="keep")
    pushed(store, write_files(tmp_path / "gone", {"g": noise(20_000, 8), **same}))
    run(remove_reference(store))
    yield store
    store.close()


def collected(store: PosixStore, history_s: int | None = None) -> CollectReport:
    async def work() -> CollectReport:
        catalog = await open_catalog(store, write=True)
        return await collect.collect(catalog, history_s)

    return run(work())


def keys(store: PosixStore) -> set[str]:
    """All but the references and the record."""
    prefixes = ("images/", "trees/", "placements/", "packs/", "doomed/", "leases/", "index/")
    return {facts.key for prefix in prefixes for facts in run(store.list_objects(prefix))}


def size_of(store: PosixStore, tmp_path: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(folder, name))
        for folder, _, names in os.walk(tmp_path / "store")
        for name in names
    )


def test_what_no_reference_needs_is_deleted_and_counted(store: PosixStore, tmp_path: Path) -> None:
    plan = run(planned(store))
    before, size_bytes = keys(store), size_of(store, tmp_path)
    report = collected(store)
    freed = {key for key in before - keys(store) if not key.startswith(layout.INDEX)}
    assert {key.partition("/")[0] for key in freed} == {"images", "trees", "placements", "packs"}
    assert (report.packs, report.objects) == (plan.packs, plan.objects) == (len(freed) - 3, 3)
    assert report.freed_bytes == plan.freed_bytes > 20_000
    assert size_bytes - size_of(store, tmp_path) >= report.freed_bytes
    assert list(run(check_references(store))) == ["snap:keep"]
    assert not run(store.list_objects(layout.LEASES)) + run(store.list_objects(layout.DOOMED))
    again = collected(store)
    assert (again.packs, again.objects, again.freed_bytes) == (0, 0, 0)
    assert again.needed_bytes == report.needed_bytes


async def planned(store: PosixStore) -> CollectReport:
    return await plan_collection(await open_catalog(store))


def test_a_plan_changes_nothing(store: PosixStore) -> None:
    before = keys(store)
    assert run(planned(store)).packs > 0
    assert keys(store) == before


def test_the_index_forgets_deleted_packs_and_keeps_the_others(
    store: PosixStore, tmp_path: Path
) -> None:
    collected(store)
    again = pushed(store, tmp_path / "gone")
    assert again.counts.new_bytes == 20_000
    assert again.counts.reused_bytes == 8192


def test_what_was_replaced_lately_is_kept_as_long_as_asked(store: PosixStore) -> None:
    assert collected(store, history_s=3600).packs == 0
    assert collected(store, history_s=0).packs > 0


def gone_image(store: PosixStore) -> Digest:
    state = run(store.read_reference("snap", "v1"))
    assert state is not None
    target = state.record.history[0].target
    assert target is not None
    return target


def test_a_missing_object_that_a_reference_needs_stops_it(
    store: PosixStore, tmp_path: Path
) -> None:
    catalog = run(open_catalog(store))
    digest = run(target_of(store, "keep"))
    assert digest is not None
    image = run(catalog.image(digest))
    assert isinstance(image, Image)
    content = run(catalog.content(image.members[0].tree))
    needed = [
        layout.image_key(digest),
        layout.tree_key(image.members[0].tree),
        layout.placement_key(image.members[0].tree),
        layout.pack_key(content.placement.packs[0].tobytes()),
    ]
    for key in needed:
        path = tmp_path / "store" / key
        raw = path.read_bytes()
        path.unlink()
        before = keys(store)
        with pytest.raises(NotFound, match=f"{key} .*nothing was deleted"):
            collected(store)
        assert keys(store) == before
        path.write_bytes(raw)
    assert collected(store).packs > 0


def test_a_missing_object_that_only_history_needs_is_passed_over(
    store: PosixStore, tmp_path: Path
) -> None:
    (tmp_path / "store" / layout.image_key(gone_image(store))).unlink()
    assert collected(store, history_s=3600).packs > 0


def test_a_damaged_reference_image_or_placement_stops_it(store: PosixStore, tmp_path: Path) -> None:
    root = tmp_path / "store"
    paths = [*root.glob("refs/snap/keep/*"), *root.glob("images/*"), *root.glob("placements/*")]
    for path in paths:
        raw = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(raw[:-1])
        before = keys(store)
        with pytest.raises((CorruptData, InvalidImage), match="nothing was deleted"):
            collected(store, history_s=3600)
        assert keys(store) == before
        path.write_bytes(raw)


def test_two_collectors_do_not_work_at_once(store: PosixStore) -> None:
    catalog = run(open_catalog(store, write=True))
    other = WriterLease(catalog, "collect", "somebody@else", 3600)
    run(other.take())
    before = keys(store)
    with pytest.raises(Conflict, match=r"is being collected by somebody@else.*ends in 3\d\d\d s"):
        collected(store)
    assert keys(store) == before


def test_what_a_push_at_work_may_have_written_is_young(store: PosixStore) -> None:
    async def work() -> None:
        clock = Clock()
        clocked = ClockedStore(store, clock)
        catalog = Catalog(clocked, (await open_catalog(store)).record)
        written = layout.image_key(gone_digest)
        clocked.note(written)
        needed = await mark(catalog, clock.now_ns, 0)
        rest = await unneeded(catalog, needed, clock.now_ns)
        facts = await store.facts(written)
        assert facts is not None
        assert rest.young_bytes == facts.size_bytes
        assert written not in rest.sizes()
        assert len(rest.objects) == 2

    gone_digest = gone_image(store)
    run(work())


def test_more_garbage_than_a_record_holds_goes_into_several_and_all_goes(
    store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "MAX_DOOMED", 1)
    monkeypatch.setattr(lease, "MAX_DOOMED", 1)
    n_packs = run(planned(store)).packs
    report = collected(store)
    assert (report.packs, report.objects) == (n_packs, 3)
    assert not run(store.list_objects(layout.DOOMED))
    assert list(run(check_references(store))) == ["snap:keep"]


def test_a_collection_that_is_cancelled_while_it_waits_leaves_nothing(store: PosixStore) -> None:
    async def work() -> None:
        catalog = await open_catalog(store, write=True)
        waiting = asyncio.Event()

        class Noting(Silent):
            def phase(self, name: str, total_bytes: int) -> None:
                if name.startswith("waiting until"):
                    waiting.set()

        task = asyncio.create_task(collect.collect(catalog, progress=Noting()))
        await waiting.wait()
        assert len(await store.list_objects(layout.DOOMED)) == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    before = keys(store)
    run(work())
    assert keys(store) == before


def test_a_collector_whose_lease_was_over_deletes_nothing_more(store: PosixStore) -> None:
    async def work() -> None:
        clock = Clock()
        catalog = Catalog(ClockedStore(store, clock), (await open_catalog(store)).record)
        collector = Collector(catalog, now_s=clock)
        steps = collector.steps()
        while await anext(steps) is not Step.DOOMED:
            pass
        clock.advance(TTL_S + 1)
        with pytest.raises(StoreUnavailable, match="was over, so it stopped; collect again"):
            await anext(steps)
        assert not collector.deleted

    run(work())
