"""`cp`: an image in another store, of the same digest, from packs checked on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, InvalidInput
from imgfmt.lease import Doomed
from imgfmt.reference import parse_reference
from imgfmt.store_record import NewChunks
from tests.transfer.fixture_store import flip
from tests.transfer.pushes import (
    CONFIG,
    KIB,
    MIB,
    new_store,
    noise,
    pushed,
    run,
    text,
    write_files,
)
from tests.transfer.store_check import check_image, check_references, files_of
from transfer.catalog import open_catalog
from transfer.copy import CopyReport, copy
from transfer.naming import write_variants
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore

FILES = {"a.img": noise(3 * MIB), "small": b"small", "text": text(700 * KIB)}


async def copied(source: Store, target: Store, digest: Digest, tag: str = "v1") -> CopyReport:
    sources, targets = await open_catalog(source), await open_catalog(target, write=True)
    return await copy(sources, targets, digest, "copy", tag, config=CONFIG)


@pytest.fixture
def target(tmp_path: Path) -> PosixStore:
    return new_store(tmp_path / "target")


@pytest.mark.parametrize("codec", [NewChunks.RAW, NewChunks.ZSTD])
def test_a_copy_has_the_same_digest_and_the_same_files(
    tmp_path: Path, target: PosixStore, codec: NewChunks
) -> None:
    source = new_store(tmp_path / "source", codec=codec)
    digest = pushed(source, write_files(tmp_path / "dir", FILES)).digest
    report = run(copied(source, target, digest))
    assert report.digest == digest
    assert run(check_references(target)) == {"copy:v1": digest}
    wanted = {name.encode(): content for name, content in FILES.items()}
    assert run(files_of(target, digest)) == wanted


def test_a_second_copy_moves_only_packs_that_are_missing(
    tmp_path: Path, target: PosixStore
) -> None:
    source = new_store(tmp_path / "source")
    first = pushed(source, write_files(tmp_path / "one", FILES), tag="v1").digest
    more = {**FILES, "b.img": noise(2 * MIB, seed=1)}
    second = pushed(source, write_files(tmp_path / "two", more), tag="v2")
    before = run(copied(source, target, first))
    after = run(copied(source, target, second.digest, "v2"))
    assert after.packs_present == before.packs_moved
    assert second.counts.stored_bytes <= after.moved_bytes < 1.2 * second.counts.stored_bytes
    again = run(copied(source, target, second.digest, "v2"))
    assert (again.packs_moved, again.moved_bytes, again.metadata_bytes) == (0, 0, 0)


def test_a_push_finds_again_what_a_copy_brought(tmp_path: Path, target: PosixStore) -> None:
    source = new_store(tmp_path / "source")
    folder = write_files(tmp_path / "dir", FILES)
    run(copied(source, target, pushed(source, folder).digest))
    assert pushed(target, folder).counts.new_chunks == 0


def test_variants_are_copied_with_all_their_images(tmp_path: Path, target: PosixStore) -> None:
    source = new_store(tmp_path / "source")
    folders = [write_files(tmp_path / f"v{i}", {"f": noise(200 * KIB, i)}) for i in (1, 2)]
    images = [pushed(source, folder, tag=folder.name).digest for folder in folders]

    async def variants() -> Digest:
        catalog = await open_catalog(source, write=True)
        refs = [parse_reference("snap:v1"), parse_reference("snap:v2")]
        return (await write_variants(catalog, refs, "snap", "all", config=CONFIG)).target

    digest = run(variants())
    run(copied(source, target, digest))

    async def check() -> None:
        catalog = await open_catalog(target)
        assert await catalog.resolve(parse_reference("copy:v1")) == digest
        for image in images:
            await check_image(catalog, image)

    run(check())


@pytest.mark.parametrize("codec", [NewChunks.RAW, NewChunks.ZSTD])
def test_a_damaged_pack_is_named_and_nothing_is_published(
    tmp_path: Path, target: PosixStore, codec: NewChunks
) -> None:
    source = new_store(tmp_path / "source", codec=codec)
    digest = pushed(source, write_files(tmp_path / "dir", FILES)).digest
    packs = (tmp_path / "source" / "packs").glob("*/*")
    pack = max(packs, key=lambda path: path.stat().st_size)
    flip(pack, 5000)
    with pytest.raises(CorruptData, match=f"pack {pack.name} .*damaged"):
        run(copied(source, target, digest))
    assert run(check_references(target)) == {}
    assert pack.name not in {path.name for path in (tmp_path / "target").glob("packs/*/*")}
    assert list((tmp_path / "target" / "tmp").iterdir()) == []


def test_a_cancelled_copy_leaves_no_half_pack_and_no_lease(
    tmp_path: Path, target: PosixStore
) -> None:
    source = new_store(tmp_path / "source")
    digest = pushed(source, write_files(tmp_path / "dir", FILES)).digest

    async def cancelled() -> None:
        async def before(operation: str, key: str) -> None:
            if operation == "read_into" and key.startswith("packs/"):
                task.cancel()

        task = asyncio.ensure_future(copied(InterposedStore(source, before), target, digest))
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancelled())
    assert run(check_references(target)) == {}
    assert list((tmp_path / "target" / "tmp").iterdir()) == []
    assert list((tmp_path / "target" / "leases").iterdir()) == []


def test_a_pack_that_is_about_to_be_collected_is_not_used(
    tmp_path: Path, target: PosixStore
) -> None:
    source = new_store(tmp_path / "source")
    digest = pushed(source, write_files(tmp_path / "dir", FILES)).digest
    run(copied(source, target, digest))
    name = bytes.fromhex(next((tmp_path / "target").glob("packs/*/*")).name)
    doomed = Doomed(bytes(16), frozenset({name}))
    run(target.put(f"doomed/{bytes(16).hex()}", doomed.encode()))
    with pytest.raises(Conflict, match=name.hex()):
        run(copied(source, target, digest, "v2"))
    assert "copy:v2" not in run(check_references(target))


def test_stores_of_different_page_sizes_do_not_exchange_packs(tmp_path: Path) -> None:
    source = new_store(tmp_path / "source")
    other = new_store(tmp_path / "other", page_bytes=65536)
    digest = pushed(source, write_files(tmp_path / "dir", FILES)).digest
    with pytest.raises(InvalidInput, match="pull the image and push it there"):
        run(copied(source, other, digest))
