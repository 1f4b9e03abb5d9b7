"""Pushes: what is stored, what is shared, and that nothing half done is ever seen.

Long, because all of it is asked of one small sample and one way to look at a store; failures at
every step are in `test_push_failures`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from imgfmt import layout
from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import Digest
from imgfmt.errors import (
    AccessDenied,
    Conflict,
    InvalidInput,
    NotFound,
    Unsupported,
)
from imgfmt.image import Image, Member
from imgfmt.store_record import NewChunks
from tests.transfer.privilege import modes_count
from tests.transfer.pushes import (
    CONFIG,
    KIB,
    MIB,
    Operations,
    at_first,
    new_store,
    noise,
    push_after_meeting,
    push_request,
    pushed,
    remove_reference,
    request_of,
    run,
    settle,
    start_process,
    target_of,
    text,
    write_files,
)
from tests.transfer.store_check import (
    check_image,
    check_packs,
    check_references,
    files_below,
    files_of,
)
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.push import DirectorySource, PushRequest
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore

REPLICAS = Path(__file__).parents[3] / "shared/data/criu-replicas.tar.zst"


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """The tests of stores see to durability; here it would only take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return new_store(tmp_path / "store")


def keys_of(store: PosixStore, prefix: str) -> list[str]:
    return [facts.key for facts in run(store.list_objects(prefix))]


def check_nothing_published(store: PosixStore) -> None:
    """No reference, no image, and nothing is left of the push but whole packs."""
    assert run(store.list_references()) == []
    assert keys_of(store, "images/") == []
    check_tidy(store)


def check_tidy(store: PosixStore) -> None:
    """No unfinished object, no lease, and every pack is whole."""
    assert os.listdir(f"{store.root}/tmp") == []
    assert keys_of(store, "leases/") == []
    run(check_packs(store))


def check_same(store: PosixStore, digest: Digest, root: Path, member: str = "main") -> None:
    assert run(files_of(store, digest, member)) == files_below(root)


SAMPLE = {
    "pages-1.img": noise(5 * MIB + 5) + bytes(300 * KIB) + noise(MIB, 1),
    "pages-2.img": text(3 * MIB, 2) + bytes(20 * KIB) + text(100 * KIB, 3),
    "core-1.img": noise(3000, 4),
    "d/core-2.img": b"x",
    "d/empty": b"",
    "d/zeros": bytes(2 * MIB + 1),
}


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    return write_files(tmp_path / "sample", SAMPLE)


def test_a_directory_is_stored_and_its_reference_points_to_it(
    store: PosixStore, sample: Path
) -> None:
    report = pushed(store, sample)
    assert run(check_references(store)) == {"snap:v1": report.digest}
    assert report.reference == "snap:v1"
    check_same(store, report.digest, sample)
    check_tidy(store)


def test_the_report_tells_what_was_stored(store: PosixStore, sample: Path) -> None:
    report = pushed(store, sample)
    catalog = run(open_catalog(store))
    image = run(catalog.image(report.digest))
    assert isinstance(image, Image)
    tree = run(catalog.tree(image.members[0].tree))
    counts = report.counts
    assert report.logical_bytes == sum(map(len, SAMPLE.values())) == tree.logical_bytes
    assert report.zero_bytes == tree.zero_bytes > 2 * MIB
    assert counts.chunks == tree.n_chunks
    assert counts.new_bytes + counts.reused_bytes == report.logical_bytes - report.zero_bytes
    assert counts.reused_bytes == 0
    assert counts.stored_bytes < counts.new_bytes - MIB
    packs = sum(facts.size_bytes for facts in run(store.list_objects("packs/")))
    assert counts.stored_bytes <= packs <= counts.stored_bytes + counts.pack_overhead_bytes + MIB
    assert set(report.seconds) == {"scan", "read", "publish", "total"}
    assert report.warnings == []


def test_a_second_push_stores_nothing_and_gives_the_same_digest(
    store: PosixStore, sample: Path
) -> None:
    first = pushed(store, sample)
    before = {f.key: f.written_ns for p in ("packs/", "trees/", "placements/", "images/", "refs/")
              for f in run(store.list_objects(p))}  # fmt: skip
    second = pushed(store, sample)
    after = {f.key: f.written_ns for p in ("packs/", "trees/", "placements/", "images/", "refs/")
             for f in run(store.list_objects(p))}  # fmt: skip
    assert second.digest == first.digest
    assert (second.counts.new_bytes, second.counts.stored_bytes, second.metadata_bytes) == (0, 0, 0)
    assert second.counts.reused_bytes == first.counts.new_bytes
    assert before == after


def test_the_digest_does_not_depend_on_the_store(tmp_path: Path, sample: Path) -> None:
    digests = {
        pushed(new_store(tmp_path / f"{codec}{size}", codec=codec, pack_bytes=size), sample).digest
        for codec in NewChunks
        for size in (512 * KIB, 64 * MIB)
    }
    assert len(digests) == 1


@pytest.fixture(scope="session")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not REPLICAS.exists():
        pytest.skip(f"{REPLICAS.name} is not there")
    folder = tmp_path_factory.mktemp("replicas")
    with (
        open(REPLICAS, "rb") as packed,
        zstandard.ZstdDecompressor().stream_reader(packed) as plain,
        tarfile.open(fileobj=plain, mode="r|") as archive,
    ):
        archive.extractall(folder, filter="tar")
    return next(folder.rglob("x-replica-0")).parent


@pytest.mark.slow
def test_replicas_share_what_was_promised(tmp_path: Path, replicas: Path) -> None:
    store = new_store(tmp_path / "store", pack_bytes=64 * MIB)
    wanted = {"x-replica-0": 36.5e6, "x-replica-1": 25.0e6, "y-replica-0": 25.0e6}
    for name, at_most in wanted.items():
        report = pushed(store, replicas / name, tag=name, config=TransferConfig())
        assert report.counts.new_bytes <= at_most
        assert report.counts.new_bytes > 10e6
    again = pushed(store, replicas / "x-replica-0", tag="again", config=TransferConfig())
    assert again.counts.new_bytes == 0
    assert run(target_of(store, "x-replica-0")) == again.digest
    check_same(store, again.digest, replicas / "x-replica-0")
    assert len(run(check_references(store))) == 4


def test_a_sparse_file_gives_the_digest_of_a_dense_one(tmp_path: Path, store: PosixStore) -> None:
    parts = {0: noise(100 * KIB), 3 * MIB + 12288: b"x", 9 * MIB: noise(2 * MIB, 1), 14 * MIB: b"y"}
    size_bytes = 20 * MIB - 5
    dense, sparse = tmp_path / "dense" / "f", tmp_path / "sparse" / "f"
    for path in (dense, sparse):
        path.parent.mkdir()
        with open(path, "wb") as file:
            if path is dense:
                file.write(bytes(size_bytes))
            for offset, part in parts.items():
                file.seek(offset)
                file.write(part)
            file.truncate(size_bytes)
        settle(path.parent)
    assert sparse.stat().st_blocks < dense.stat().st_blocks
    first, second = pushed(store, dense.parent), pushed(store, sparse.parent)
    assert first.digest == second.digest
    assert second.counts.new_bytes == 0
    check_same(store, first.digest, dense.parent)


def test_holes_of_a_file_are_not_read(
    tmp_path: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sparse"
    folder.mkdir()
    offsets = [0, 2**39, 2**40 - 4096]
    with open(folder / "f", "wb") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(noise(4096, offset))
    read_bytes: list[int] = []

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        got = preadv(descriptor, buffers, offset)
        read_bytes.append(got)
        return got

    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", counting)
    report = pushed(store, folder)
    monkeypatch.undo()
    assert report.logical_bytes == 2**40
    assert report.counts.chunks == len(offsets)
    assert sum(read_bytes) < MIB
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    run(check_references(store))


def test_a_file_that_is_one_hole_has_no_chunk(tmp_path: Path, store: PosixStore) -> None:
    folder = write_files(tmp_path / "d", {"f": b""})
    os.truncate(folder / "f", 2**40 + 1)
    report = pushed(store, folder)
    assert (report.counts.chunks, report.zero_bytes) == (0, 2**40 + 1)
    assert keys_of(store, "packs/") == []
    run(check_references(store))


def test_an_empty_directory_is_an_image(tmp_path: Path, store: PosixStore) -> None:
    report = pushed(store, write_files(tmp_path / "empty", {}))
    assert run(files_of(store, report.digest)) == {}
    assert report.counts.chunks == 0


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Stretches of noise, of text that repeats in other files, and of zeros."""
    parts = []
    for _ in range(draw(st.integers(0, 5))):
        n_bytes = draw(st.sampled_from([1, 4096, 10_000, 65_536, 200_000, MIB + 7]))
        make = draw(st.sampled_from([noise, text, lambda n, _: bytes(n)]))
        parts.append(make(n_bytes, draw(st.integers(0, 3))))
    return b"".join(parts)


@settings(max_examples=12)
@given(
    files=st.dictionaries(st.sampled_from([f"f{i}" for i in range(8)]), contents(), max_size=8),
    codec=st.sampled_from(NewChunks),
    pack_bytes=st.sampled_from([65_536, 300_000, 64 * MIB]),
    page_bytes=st.sampled_from([4096, 65_536]),
    n_threads=st.integers(1, 4),
)
def test_what_was_pushed_is_what_is_stored(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], codec: NewChunks,
    pack_bytes: int, page_bytes: int, n_threads: int,
) -> None:  # fmt: skip
    folder = tmp_path_factory.mktemp("case")
    record = {"codec": codec, "pack_bytes": pack_bytes, "page_bytes": page_bytes}
    store = new_store(folder / "store", **record)
    sample = write_files(folder / "sample", files)
    config = replace(CONFIG, n_threads=n_threads, max_memory_bytes=6 * MIB)
    first = pushed(store, sample, config=config)
    check_same(store, first.digest, sample)
    second = pushed(store, sample, config=config)
    assert (second.digest, second.counts.new_bytes) == (first.digest, 0)
    check_tidy(store)
    store.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("codec", [NewChunks.ZSTD, NewChunks.AUTO])
def test_encoded_and_raw_chunks_share_a_pack(tmp_path: Path, codec: NewChunks) -> None:
    """Raw chunks that end within a page are followed by encoded ones, and the other way round."""
    files = {}
    for i in range(12):
        make, n_bytes = (noise, text)[i % 2], 100_000 + 1000 * i
        files[f"f{i:02}"] = make(2 * MIB + n_bytes, i) if i % 4 < 2 else make(n_bytes, i)
    store = new_store(tmp_path / "store", codec=codec, pack_bytes=64 * MIB)
    sample = write_files(tmp_path / "sample", files)
    report = pushed(store, sample)
    check_same(store, report.digest, sample)
    catalog = run(open_catalog(store))
    tables = [
        run(catalog.pack_table(name))
        for key in keys_of(store, "packs/")
        if (name := layout.pack_name_of(key))
    ]
    assert len(tables) == 1
    assert {RAW, ZSTD} == set(tables[0].codecs.tolist())
    check_tidy(store)


def test_a_pack_is_closed_when_it_is_full(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store", pack_bytes=2 * MIB, codec=NewChunks.RAW)
    sample = write_files(tmp_path / "sample", {"f": noise(9 * MIB)})
    pushed(store, sample)
    sizes = [facts.size_bytes for facts in run(store.list_objects("packs/"))]
    assert 5 <= len(sizes) <= 7
    assert all(size < 2 * MIB + 64 * KIB for size in sizes)
    run(check_references(store))


def test_a_chunk_larger_than_a_pack_should_be_is_stored_alone(tmp_path: Path) -> None:
    store = new_store(tmp_path / "store", pack_bytes=4096, codec=NewChunks.RAW)
    sample = write_files(tmp_path / "sample", {"f": noise(3 * MIB), "g": b"x"})
    report = pushed(store, sample)
    assert len(keys_of(store, "packs/")) == report.counts.chunks
    check_same(store, report.digest, sample)


@pytest.mark.parametrize("page_bytes", [4096, 16384, 65536])
def test_chunks_cross_blocks(tmp_path: Path, page_bytes: int) -> None:
    """Blocks of 2 MiB hold the ends of chunks of up to 1 MiB that began in the block before."""
    store = new_store(tmp_path / "store", page_bytes=page_bytes, codec=NewChunks.RAW)
    repeated = noise(page_bytes, 9) * ((3 * MIB) // page_bytes)
    files = {"noise": noise(17 * MIB + 3), "repeated": repeated + noise(5 * MIB, 1)}
    sample = write_files(tmp_path / "sample", files)
    report = pushed(store, sample, config=replace(CONFIG, max_memory_bytes=6 * MIB, n_threads=4))
    check_same(store, report.digest, sample)


@pytest.mark.slow
def test_many_small_files_share_blocks(tmp_path: Path, store: PosixStore) -> None:
    files = {f"d{i % 7}/f{i}": noise(i % 300 * 40, i) for i in range(1500)}
    sample = write_files(tmp_path / "sample", files)
    report = pushed(store, sample)
    check_same(store, report.digest, sample)
    assert pushed(store, sample).counts.new_bytes == 0


def test_equal_files_of_one_push_are_stored_once(tmp_path: Path, store: PosixStore) -> None:
    large, small = noise(5 * MIB), noise(9000, 1)
    files = {f"{name}{i}": raw for i in range(4) for name, raw in (("l", large), ("s", small))}
    sample = write_files(tmp_path / "sample", files)
    report = pushed(store, sample)
    assert report.counts.new_bytes == len(large) + len(small)
    assert report.counts.reused_bytes == 3 * (len(large) + len(small))
    check_same(store, report.digest, sample)


def test_an_image_has_several_members(tmp_path: Path, store: PosixStore) -> None:
    shared = noise(3 * MIB)
    roots = [write_files(tmp_path / f"r{i}", {"shared": shared, "own": noise(MIB, 1 + i)})
             for i in range(3)]  # fmt: skip
    report = pushed(store, *roots)
    assert report.counts.new_bytes == 6 * MIB
    for number, root in enumerate(roots):
        check_same(store, report.digest, root, f"m{number}")
    run(check_references(store))


def stored_member(store: PosixStore, digest: Digest, name: str) -> Member:
    """The first member of an image, under another name."""
    image = run(run(open_catalog(store)).image(digest))
    assert isinstance(image, Image)
    return replace(image.members[0], name=name)


def test_members_that_are_stored_are_put_together_with_directories(
    tmp_path: Path, store: PosixStore
) -> None:
    roots = [write_files(tmp_path / f"r{i}", {"f": noise(2 * MIB, i)}) for i in range(3)]
    reports = [pushed(store, root, tag=f"rank{i}") for i, root in enumerate(roots[:2])]
    stored = [stored_member(store, r.digest, f"a{i}") for i, r in enumerate(reports)]
    report = pushed(store, roots[2], tag="all", stored=stored)
    assert report.counts.new_bytes == 2 * MIB
    assert report.logical_bytes == 6 * MIB
    for name, root in zip(("a0", "a1", "main"), roots, strict=True):
        check_same(store, report.digest, root, name)
    only = run(push_request(store, PushRequest([], stored=stored, reference=("snap", "two"))))
    assert only.counts.chunks == 0
    run(check_references(store))


def test_an_image_can_be_stored_without_a_reference(store: PosixStore, sample: Path) -> None:
    report = pushed(store, sample, tag=None)
    assert report.reference is None
    assert run(store.list_references()) == []
    run(check_image(run(open_catalog(store)), report.digest))


@pytest.mark.parametrize(
    "names",
    [["a", "a"], ["A b"], [], [f"m{i}" for i in range(1025)]],
    ids=["twice", "no name", "none", "too many"],
)
def test_members_that_no_image_has_are_refused_before_anything_is_read(
    tmp_path: Path, store: PosixStore, names: list[str]
) -> None:
    sample = write_files(tmp_path / "d", {"f": noise(MIB)})
    operations = Operations()
    interposed = InterposedStore(store, operations.before)
    sources = [DirectorySource(name, str(sample)) for name in names]
    with pytest.raises(InvalidInput):
        run(push_request(interposed, PushRequest(sources, reference=("snap", "v1"))))
    assert not any(name.startswith("open_pack") for name in operations.names)
    check_nothing_published(store)


# Files that change


def become_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "is written": lambda path: path.write_bytes(b"y" * path.stat().st_size),
    "vanishes": lambda path: path.unlink(),
    "shrinks": lambda path: os.truncate(path, 100),
    "grows": lambda path: os.truncate(path, path.stat().st_size + 1),
    "is replaced": lambda path: os.rename(shutil.copy(path, f"{path}~"), path),
    "becomes a link": become_link,
    "becomes a fifo": become_fifo,
}


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["open_pack", "commit_pack"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["small", "pages-2.img"])
def test_a_file_that_changes_is_a_conflict_that_names_it(
    tmp_path: Path, store: PosixStore, name: str, change: str, operation: str
) -> None:
    """At `open_pack` most of the large file is not read yet, at `commit_pack` all files are."""
    files = {"small": b"s" * 5000, "pages-1.img": noise(9 * MIB), "pages-2.img": noise(9 * MIB, 1)}
    sample = write_files(tmp_path / "sample", files)
    before = at_first(operation, lambda: CHANGES[change](sample / name))
    config = replace(CONFIG, n_threads=1, max_memory_bytes=6 * MIB)
    with pytest.raises(Conflict, match=rf"^{sample}/{name} changed or vanished"):
        pushed(InterposedStore(store, before), sample, config=config)
    check_nothing_published(store)


def test_a_file_that_is_added_is_a_conflict_that_names_the_directory(
    tmp_path: Path, store: PosixStore, sample: Path
) -> None:
    before = at_first("commit_pack", lambda: (sample / "d" / "new").touch())
    with pytest.raises(Conflict, match=rf"^{sample}/d changed or vanished"):
        pushed(InterposedStore(store, before), sample)
    check_nothing_published(store)


def test_a_file_that_may_not_be_read_is_denied_by_name(store: PosixStore, sample: Path) -> None:
    for name in ("core-1.img", "pages-2.img"):
        (sample / name).chmod(0)
        with modes_count(), pytest.raises(AccessDenied, match=f"^{sample}/{name}: permission"):
            pushed(PosixStore(store.root), sample)
        (sample / name).chmod(0o600)
        check_nothing_published(store)


def test_a_special_file_is_refused_by_name_or_skipped(store: PosixStore, sample: Path) -> None:
    os.mkfifo(sample / "d" / "pipe")
    with pytest.raises(InvalidInput, match=rf"^{sample}/d/pipe is a fifo"):
        pushed(store, sample)
    check_nothing_published(store)
    report = pushed(store, sample, skip_special=True)
    assert report.warnings == [f"skipped: 1 x a fifo: {sample}/d/pipe"]
    check_same(store, report.digest, sample)


# References and other writers


def test_a_reference_that_moved_is_a_conflict_and_the_image_is_stored(
    tmp_path: Path, store: PosixStore, sample: Path
) -> None:
    other = write_files(tmp_path / "other", {"f": noise(MIB, 9)})

    async def work() -> None:
        async def interfere(operation: str, key: str) -> None:
            if operation == "change_reference":
                await push_request(store, request_of(other))

        interposed = InterposedStore(store, interfere)
        with pytest.raises(Conflict, match=r"snap:v1 .*snapcask tag blake3:[0-9a-f]{64} snap:v1"):
            await push_request(interposed, request_of(sample))

    run(work())
    assert run(check_references(store)) == {"snap:v1": pushed(store, other).digest}
    digest = pushed(store, sample, tag="v2").digest
    assert digest.hex in "".join(keys_of(store, "images/"))


@pytest.mark.slow
def test_of_two_pushes_to_one_tag_at_once_one_wins_and_nothing_is_lost(
    tmp_path: Path, store: PosixStore
) -> None:
    context = multiprocessing.get_context("forkserver")
    meeting, answers = context.Barrier(2), context.Queue()
    roots = [write_files(tmp_path / f"r{i}", {"f": noise(3 * MIB, i)}) for i in range(2)]
    processes = [
        start_process(push_after_meeting, store.root, str(root), meeting, answers) for root in roots
    ]
    told = dict(
        (path, (kind, said)) for path, kind, said in (answers.get(timeout=60) for _ in roots)
    )
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(kind for kind, _ in told.values()) == ["", "Conflict"]
    for root in roots:
        kind, said = told[str(root)]
        digest = pushed(store, root, tag=None).digest
        check_same(store, digest, root)
        if kind:
            assert f"snapcask tag {digest} snap:v1" in said
        else:
            assert run(target_of(store)) == digest
            assert said == str(digest)
    check_tidy(store)


def test_two_pushes_of_one_directory_at_once_agree(store: PosixStore, sample: Path) -> None:
    async def work() -> set[Digest]:
        pushes = [push_request(store, request_of(sample, tag=f"t{i}")) for i in range(3)]
        return {report.digest for report in await asyncio.gather(*pushes)}

    assert len(run(work())) == 1
    assert len(run(check_references(store))) == 3
    check_tidy(store)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_store_with_an_unknown_feature_is_refused_by_its_name(
    tmp_path: Path, sample: Path, kind: str
) -> None:
    features = ("lease-1", "quantum-7") if kind == "write" else ("quantum-7",)
    store = new_store(tmp_path / "newer", **{kind: features})
    before = files_below(tmp_path / "newer")
    with pytest.raises(Unsupported, match="needs the feature 'quantum-7'"):
        pushed(store, sample)
    assert files_below(tmp_path / "newer") == before


def test_a_directory_that_is_no_store_is_not_written_to(tmp_path: Path, sample: Path) -> None:
    with pytest.raises(NotFound, match="snapcask init"):
        pushed(PosixStore(str(tmp_path / "none")), sample)
    assert not (tmp_path / "none").exists()


# The index


def test_an_index_segment_that_can_not_be_read_costs_a_warning(
    store: PosixStore, sample: Path
) -> None:
    first = pushed(store, sample)
    for key in keys_of(store, "index/"):
        path = Path(store.root, key)
        path.write_bytes(path.read_bytes()[:-9])
    second = pushed(store, sample)
    assert second.digest == first.digest
    assert second.counts.new_bytes == first.counts.new_bytes
    assert any("index rebuild" in warning for warning in second.warnings)
    run(check_references(store))


def test_an_index_that_may_not_be_read_costs_a_warning(store: PosixStore, sample: Path) -> None:
    first = pushed(store, sample)
    for key in keys_of(store, "index/"):
        Path(store.root, key).chmod(0)
    with modes_count():
        second = pushed(PosixStore(store.root), sample, tag="v2")
    assert second.digest == first.digest
    assert any("permission denied" in warning for warning in second.warnings)
    run(check_references(store))


def test_an_index_that_names_packs_which_are_gone_is_no_harm(
    store: PosixStore, sample: Path
) -> None:
    first = pushed(store, sample)
    run(remove_reference(store))
    packs = keys_of(store, "packs/")
    for key in packs[::2]:
        run(store.delete(key))
    second = pushed(store, sample)
    assert second.digest == first.digest
    assert 0 < second.counts.new_bytes < first.counts.new_bytes
    assert run(check_references(store)) == {"snap:v1": first.digest}


def test_an_index_that_lies_is_no_harm(store: PosixStore, sample: Path) -> None:
    """Its keys and rows point at other chunks; the packs' own tables tell."""
    first = pushed(store, sample)
    for key in keys_of(store, "index/"):
        path = Path(store.root, key)
        raw = bytearray(path.read_bytes())
        raw[-20:-8] = bytes(12)
        path.write_bytes(raw)
    assert pushed(store, sample, tag="v2").digest == first.digest
    run(check_references(store))


def test_a_pack_whose_table_is_damaged_is_not_used_again(store: PosixStore, sample: Path) -> None:
    first = pushed(store, sample)
    damaged = keys_of(store, "packs/")[0]
    path = Path(store.root, damaged)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 1
    raw[-40] ^= 1
    path.write_bytes(raw)
    second = pushed(store, sample)
    assert second.counts.new_bytes > 0
    assert any("verify" in warning for warning in second.warnings)
    path.unlink()
    assert run(check_references(store)) == {"snap:v1": first.digest}


def test_a_placement_that_is_damaged_or_lost_is_written_again(
    store: PosixStore, sample: Path
) -> None:
    first = pushed(store, sample)
    path = Path(store.root, keys_of(store, "placements/")[0])
    raw = path.read_bytes()
    for damage in (raw[:-8], raw[:16] + b"\xff" + raw[17:], b""):
        path.write_bytes(damage)
        assert pushed(store, sample).digest == first.digest
        assert path.read_bytes() == raw
    path.unlink()
    pushed(store, sample)
    assert path.read_bytes() == raw


def test_segments_of_many_pushes_are_joined(tmp_path: Path, store: PosixStore) -> None:
    for i in range(20):
        pushed(store, write_files(tmp_path / f"d{i}", {"f": noise(20_000, i)}), tag=f"t{i}")
    assert len(keys_of(store, "index/")) <= 8
    everything = write_files(tmp_path / "all", {f"f{i}": noise(20_000, i) for i in range(20)})
    assert pushed(store, everything).counts.new_bytes == 0
