"""Pulls: the target is whole or as before, whatever happens on the way.

Long, because every ending of a pull is asked of the same targets; going on is in `test_resume`.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from imgfmt import layout
from imgfmt.codec import RAW, ZSTD
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import (
    Conflict,
    CorruptData,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
)
from imgfmt.image import Rule, Variant, Variants
from tests.transfer.fixture_store import (
    CONFIG,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    after,
    contents,
    directory,
    expected,
    flip,
    link,
    noise,
    run,
)
from tests.transfer.killing import forked, kill
from tests.transfer.privilege import modes_count
from transfer.catalog import open_catalog
from transfer.config import TransferConfig
from transfer.pull import PullReport, pull
from transfer.pulling import moving, staging
from transfer.store.posix import PosixStore

NODES: Nodes = {
    b"": directory(0o750, mtime_ns=1_500_000_000_000_000_001),
    b"d/large": Node(noise(3 * MIB)),
    b"d/other": Node(same_as=b"d/large"),
    b"small": Node(b"x", mode=0o400),
    b"ro": directory(0o555),
    b"ro/link": link(b"/etc/passwd"),
}


class Watcher:
    """Calls `look` when a phase begins; fits the progress of a pull."""

    def __init__(self, look: Callable[[str], None]) -> None:
        self._look = look

    def phase(self, name: str, total_bytes: int) -> None:
        self._look(name)

    def advance(self, n_bytes: int) -> None:
        pass


def pulled(
    store: FixtureStore,
    digest: Digest,
    target: Path,
    *,
    config: TransferConfig = CONFIG,
    look: Callable[[str], None] = lambda _: None,
    **given: Any,
) -> PullReport:
    given.setdefault("facts", {})
    progress = Watcher(look)
    return run(pull(store.catalog, digest, str(target), config=config, progress=progress, **given))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    made = FixtureStore(tmp_path / "store", chunks_a_pack=2)
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the targets lie, and nothing else."""
    made = tmp_path / "home"
    made.mkdir()
    return made


@pytest.mark.parametrize("codec", [RAW, ZSTD])
def test_a_target_that_is_absent_appears_at_the_end(tmp_path: Path, home: Path, codec: int) -> None:
    store = FixtureStore(tmp_path / "zstd", codec=codec)
    seen: list[tuple[str, bool]] = []
    target = home / "image"
    digest = store.add(NODES)
    report = pulled(store, digest, target, look=lambda p: seen.append((p, target.exists())))
    n_chunks = store.content(store.add_tree(NODES)).tree.n_chunks
    store.close()
    assert contents(target) == expected(NODES)
    assert os.listdir(home) == ["image"]
    assert seen == [(p, False) for p in ("resolve", "fetch", "attributes", "publish")]
    root = os.stat(target)
    assert stat.S_IMODE(root.st_mode) == 0o750
    assert root.st_mtime_ns == NODES[b""].mtime_ns
    assert (report.digest, report.files, report.warnings) == (digest, 3, ())
    assert report.logical_bytes == 3 * MIB + 1
    phases = ["resolve", "plan", "prepare", "fetch", "attributes", "publish", "total"]
    assert list(report.seconds) == phases
    assert report.fetched_bytes == sum(size for _, _, size in store.store.reads)
    assert report.chunks == n_chunks


def test_an_empty_directory_is_filled_and_marked(store: FixtureStore, home: Path) -> None:
    digest = store.add(NODES)
    inode = home.stat().st_ino
    with modes_count():
        pulled(store, digest, home)
        assert (home / ".snapcask-complete").read_text() == f"{digest}\n"
    (home / ".snapcask-complete").unlink()
    assert contents(home) == expected(NODES)
    assert home.stat().st_ino == inode
    assert stat.S_IMODE(home.stat().st_mode) == 0o750
    assert stat.S_IMODE((home / "ro").stat().st_mode) == 0o555


def test_the_mark_is_set_last(
    store: FixtureStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store.add(NODES)
    order: list[object] = []
    monkeypatch.setattr(staging, "sync_filesystem", lambda _: order.append(os.listdir(home)))
    pulled(store, digest, home, config=TransferConfig(block_bytes=2 * MIB))
    (before,) = order
    assert isinstance(before, list)
    assert sorted(before) == [".snapcask-partial.moving", "d", "ro", "small"]
    assert home.stat().st_mtime_ns == NODES[b""].mtime_ns


def test_all_is_on_disk_before_the_target_appears(
    store: FixtureStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = home / "image"
    order: list[object] = []
    monkeypatch.setattr(staging, "sync_filesystem", lambda _: order.append(target.exists()))
    digest = store.add(NODES)
    pulled(store, digest, target, config=TransferConfig(block_bytes=2 * MIB))
    pulled(store, digest, home / "unsynced")
    assert order == [False]


@pytest.mark.parametrize("name", ["x", ".snapcask-complete", "lost+found"])
def test_a_directory_that_holds_something_is_left_alone(
    store: FixtureStore, home: Path, name: str
) -> None:
    (home / name).write_text("mine")
    with pytest.raises(InvalidInput, match="holds"):
        pulled(store, store.add(NODES), home)
    assert os.listdir(home) == [name]


def test_a_file_in_place_of_the_target_is_left_alone(store: FixtureStore, home: Path) -> None:
    (home / "file").write_text("mine")
    (home / "dangling").symlink_to("nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(InvalidInput, match=f"{name} exists"):
            pulled(store, store.add(NODES), home / name)
    assert sorted(os.listdir(home)) == ["dangling", "file"]


def test_a_missing_parent_is_named(store: FixtureStore, home: Path) -> None:
    with pytest.raises(InvalidInput, match="home/no is no directory; make it first"):
        pulled(store, store.add(NODES), home / "no/image")


def test_a_name_that_means_something_in_place_is_refused(store: FixtureStore, home: Path) -> None:
    nodes = {b".snapcask-complete": Node(b"?")}
    digest = store.add(nodes)
    with pytest.raises(InvalidInput, match=r"holds \.snapcask-complete"):
        pulled(store, digest, home)
    assert os.listdir(home) == []
    pulled(store, digest, home / "image")
    assert contents(home / "image") == expected(nodes)


def test_members_get_directories_of_their_names(store: FixtureStore, home: Path) -> None:
    other: Nodes = {b"": directory(0o700), b"d/large": NODES[b"d/large"], b"y": Node(b"y")}
    trees = [store.add_tree(NODES), store.add_tree(other), store.add_tree({})]
    digest = store.add_image(*trees, names=["a", "a/b", "empty"])
    report = pulled(store, digest, home / "all")
    assert sorted(os.listdir(home / "all")) == ["a", "a+b", "empty"]
    assert contents(home / "all/a") == expected(NODES)
    assert contents(home / "all/a+b") == expected(other)
    modes = [stat.S_IMODE((home / "all" / n).stat().st_mode) for n in (".", "a", "a+b", "empty")]
    assert modes == [0o755, 0o750, 0o700, 0o755]
    assert report.logical_bytes == 2 * (3 * MIB + 1)
    assert report.fetched_bytes < 4 * MIB
    pulled(store, digest, home / "one", member="a/b")
    assert contents(home / "one") == expected(other)
    (home / "place").mkdir(0o711)
    pulled(store, digest, home / "place")
    assert stat.S_IMODE((home / "place").stat().st_mode) == 0o711
    assert contents(home / "place/a") == expected(NODES)
    with pytest.raises(NotFound, match="has no member 'c'; it has a, a/b, empty"):
        pulled(store, digest, home / "none", member="c")


def test_facts_choose_among_variants(store: FixtureStore, home: Path) -> None:
    rules = [(Rule.parse(f"gpu={name}"),) for name in ("H100", "B200")]
    images = [store.add({b"x": Node(bytes([i]))}) for i in range(2)]
    listed = tuple(Variant(i, when) for i, when in zip(images, rules, strict=True))
    digest = store.add_record(Variants(listed))
    report = pulled(store, digest, home / "image", facts={"gpu": "B200"})
    assert report.digest == images[1]
    assert (home / "image/x").read_bytes() == b"\1"
    with pytest.raises(InvalidInput, match="none of the variants fits"):
        pulled(store, digest, home / "none", facts={"gpu": "A100"})
    assert os.listdir(home) == ["image"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_damaged_chunk_is_named_and_nothing_is_left(
    store: FixtureStore, home: Path, existing: bool
) -> None:
    digest = store.add(NODES)
    target = home / "image"
    if existing:
        target.mkdir()
    for raw, place in list(store.places.items()):
        pack = store.pack_paths()[place.pack]
        at = place.offset + place.stored_bytes - 1
        flip(pack, at)
        with modes_count(), pytest.raises(CorruptData, match=f"chunk {Digest(raw)} of"):
            pulled(store, digest, target)
        flip(pack, at)
        assert os.listdir(home) == (["image"] if existing else [])
        assert not existing or os.listdir(target) == []
    pulled(store, digest, target)


def test_a_damaged_tree_is_refused_before_anything_is_written(
    store: FixtureStore, home: Path
) -> None:
    tree = store.add_tree(NODES)
    digest = store.add_image(tree)
    flip(store.root / layout.tree_key(tree), 300)
    with pytest.raises(CorruptData, match=f"tree {tree.short}"):
        pulled(store, digest, home / "image")
    assert os.listdir(home) == []


def test_packs_that_were_replaced_meanwhile_are_found(store: FixtureStore, home: Path) -> None:
    digest = store.add(NODES)
    old = store.pack_paths()

    def replace(phase: str) -> None:
        if phase == "fetch":
            writer = threading.Thread(target=store.add_tree, args=[NODES], kwargs={"fresh": True})
            writer.start()
            writer.join()
            for pack in old:
                pack.unlink()

    pulled(store, digest, home / "image", look=replace)
    assert contents(home / "image") == expected(NODES)


@pytest.mark.parametrize("existing", [False, True])
def test_of_two_pulls_to_one_target_at_once_one_is_told(
    store: FixtureStore, home: Path, existing: bool
) -> None:
    digest, target = store.add(NODES), home / "image"
    if existing:
        target.mkdir()

    async def both() -> list[PullReport | BaseException]:
        work = [pull(store.catalog, digest, str(target), config=CONFIG, facts={}) for _ in "12"]
        return await asyncio.gather(*work, return_exceptions=True)

    found = run(both())
    failed = [result for result in found if isinstance(result, BaseException)]
    assert len(failed) == 1
    assert isinstance(failed[0], Conflict | InvalidInput)
    assert os.listdir(home) == ["image"]
    (target / ".snapcask-complete").unlink(missing_ok=True)
    assert contents(target) == expected(NODES)


def test_a_pull_under_way_is_not_disturbed_by_another(store: FixtureStore, home: Path) -> None:
    digest = store.add(NODES)

    def again(phase: str) -> None:
        if phase == "attributes":
            other = subprocess.run(_child(store, digest, home / "image"), capture_output=True)
            assert b"Conflict: another pull to" in other.stderr

    pulled(store, digest, home / "image", look=again)
    assert contents(home / "image") == expected(NODES)


def test_a_directory_that_appears_meanwhile_is_not_replaced(
    store: FixtureStore, home: Path
) -> None:
    def appear(phase: str) -> None:
        if phase == "publish":
            (home / "image").mkdir()

    with pytest.raises(InvalidInput, match="image: it exists already"):
        pulled(store, store.add(NODES), home / "image", look=appear)
    assert os.listdir(home) == ["image"]
    assert os.listdir(home / "image") == []


class OldLibc:
    """Lacks what renames without replacing, or has it on a filesystem that does not."""

    def __init__(self, has_call: bool) -> None:
        if has_call:
            self.renameat2 = lambda *_: -1


@pytest.mark.parametrize("has_call", [False, True])
def test_where_renaming_may_replace_it_is_looked_before(
    store: FixtureStore, home: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: OldLibc(has_call))
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINVAL)
    digest = store.add(NODES)
    pulled(store, digest, home / "image")
    assert contents(home / "image") == expected(NODES)

    def appear(phase: str) -> None:
        if phase == "publish":
            (home / "other").mkdir()

    with pytest.raises(InvalidInput, match="other: it exists already"):
        pulled(store, digest, home / "other", look=appear)
    assert sorted(os.listdir(home)) == ["image", "other"]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("n_reads", [1, 3])
def test_a_cancelled_pull_leaves_nothing(
    store: FixtureStore, home: Path, existing: bool, n_reads: int
) -> None:
    digest, target = store.add(NODES), home / "image"
    if existing:
        target.mkdir()

    async def work() -> None:
        begun = asyncio.Event()
        store.store.before_read = after(n_reads, begun)
        work = pull(store.catalog, digest, str(target), config=CONFIG, facts={})
        task = asyncio.create_task(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())
    assert os.listdir(home) == (["image"] if existing else [])
    assert not existing or os.listdir(target) == []


def _child(store: FixtureStore, digest: Digest, target: Path, kill_at: str = "") -> list[str]:
    """A command that pulls in a process of its own, and kills itself when a phase begins."""
    program = f"""
        import asyncio, os
        from imgfmt.digest import Digest
        from tests.transfer.test_pull import CONFIG, Watcher
        from transfer.catalog import open_catalog
        from transfer.pull import pull
        from transfer.store.posix import PosixStore

        def look(phase):
            if phase == {kill_at!r}:
                os.kill(os.getpid(), {int(signal.SIGKILL)})

        async def work():
            catalog = await open_catalog(PosixStore({str(store.root)!r}))
            digest = Digest.parse({str(digest)!r})
            given = dict(config=CONFIG, facts={{}}, progress=Watcher(look))
            await pull(catalog, digest, {str(target)!r}, **given)

        asyncio.run(work())
    """
    return [sys.executable, "-c", textwrap.dedent(program)]


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("phase", ["fetch", "publish"])
def test_what_a_killed_pull_left_is_cleaned_by_the_next(
    store: FixtureStore, home: Path, existing: bool, phase: str
) -> None:
    digest, target = store.add(NODES), home / "image"
    if existing:
        target.mkdir()
    killed = subprocess.run(_child(store, digest, target, kill_at=phase), check=False)
    assert killed.returncode == -signal.SIGKILL
    left = target / ".snapcask-partial" if existing else home / _partial(digest)
    assert stat.S_IMODE(left.stat().st_mode) == 0o700
    with modes_count():
        pulled(store, digest, target)
    assert os.listdir(home) == ["image"]
    (target / ".snapcask-complete").unlink(missing_ok=True)
    assert contents(target) == expected(NODES)


def killed_while_moving_up(
    store: FixtureStore, digest: Digest, target: Path, n_moved: int
) -> list[str]:
    """Pull to an existing directory, in a process that ends after so many moves; what is moved."""
    where = str(target)

    def work() -> None:
        real, left = moving.move, [n_moved]

        def move(name: bytes, source: int, target: int) -> None:
            if not left[0]:
                kill()
            left[0] -= 1
            real(name, source, target)

        vars(staging)["move"] = move
        os.rmdir = lambda *_, **__: kill()
        catalog = run(open_catalog(PosixStore(store.store.root)))  # threads do not fork
        run(pull(catalog, digest, where, config=CONFIG, facts={}))

    assert forked(work) == -signal.SIGKILL
    return [name for name in os.listdir(target) if not name.startswith(".snapcask")]


@pytest.mark.parametrize("n_moved", range(len([n for n in NODES if n and b"/" not in n]) + 1))
def test_a_pull_that_is_killed_while_it_moves_up_is_done_by_the_next(
    store: FixtureStore, home: Path, n_moved: int
) -> None:
    digest, target = store.add(NODES), home / "image"
    target.mkdir()
    assert len(killed_while_moving_up(store, digest, target, n_moved)) == n_moved
    with modes_count():
        pulled(store, digest, target)
    (target / ".snapcask-complete").unlink()
    assert contents(target) == expected(NODES)


def test_what_somebody_else_put_in_the_place_of_a_moved_entry_is_kept(
    store: FixtureStore, home: Path
) -> None:
    digest, target = store.add({b"a": Node(b"a"), b"b": Node(b"b")}), home / "image"
    target.mkdir()
    [moved] = killed_while_moving_up(store, digest, target, 1)
    (target / moved).rename(home / "aside")
    (target / moved).write_bytes(b"mine")
    with pytest.raises(InvalidInput, match=f"holds {moved}"):
        pulled(store, digest, target)
    assert (target / moved).read_bytes() == b"mine"


def _partial(digest: Digest) -> str:
    return f".image.snapcask-partial-{digest.hex[:8]}"


def test_a_deep_left_over_is_removed(store: FixtureStore, home: Path) -> None:
    digest = store.add({b"x": Node(b"x")})
    left = home / _partial(digest)
    left.mkdir()
    folder = os.open(left, os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    pulled(store, digest, home / "image")
    assert contents(home) == {b"image": None, b"image/x": b"x"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
@pytest.mark.root
def test_a_left_over_of_somebody_else_is_not_used(store: FixtureStore, home: Path) -> None:
    digest = store.add(NODES)
    home.chmod(0o777)
    left = home / _partial(digest)
    left.mkdir()
    os.chown(left, 5, 5)
    with pytest.raises(InvalidInput, match="belongs to somebody else"):
        pulled(store, digest, home / "image")
    assert os.listdir(home) == [left.name]


def test_too_little_space_is_told_before_anything_is_written(
    store: FixtureStore, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {b"x": Node(noise(2 * MIB) + bytes(8 * MIB))}
    digest = store.add(nodes)
    free_bytes = 2 * MIB - 4096
    real = os.fstatvfs

    def small(descriptor: int) -> os.statvfs_result:
        found = list(real(descriptor))
        found[1], found[4] = 4096, free_bytes // 4096
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", small)
    monkeypatch.setattr(os, "mkdir", None)
    with pytest.raises(OutOfResources, match=f"needs {2 * MIB} bytes.* has {free_bytes} bytes"):
        pulled(store, digest, home / "image")
    assert os.listdir(home) == []
    monkeypatch.undo()
    free_bytes = 2 * MIB
    pulled(store, digest, home / "image")


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """A filesystem of 3 MiB and 20 files."""
    options = "size=3m,nr_inodes=20"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home)], check=True)
    yield home
    subprocess.run(["umount", str(home)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
@pytest.mark.root
def test_a_disk_that_fills_up_is_told_and_left_empty(store: FixtureStore, small_disk: Path) -> None:
    many = store.add({b"d/%d" % i: Node(b"x") for i in range(30)})
    large = store.add({b"x": Node(noise(2 * MIB))})

    def fill(phase: str) -> None:
        if phase == "fetch":
            (small_disk / "other").write_bytes(bytes(2 * MIB))

    with pytest.raises(OutOfResources, match=r"image/d/\d+: no space left"):
        pulled(store, many, small_disk / "image")
    with pytest.raises(OutOfResources, match="image/x: no space left"):
        pulled(store, large, small_disk / "image", look=fill)
    assert os.listdir(small_disk) == ["other"]
    (small_disk / "other").unlink()
    pulled(store, large, small_disk)
    assert (small_disk / "x").stat().st_size == 2 * MIB


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a filesystem")
@pytest.mark.root
def test_a_new_filesystem_is_empty_though_it_has_lost_and_found(
    store: FixtureStore, small_disk: Path
) -> None:
    (small_disk / "lost+found").mkdir()
    pulled(store, store.add({b"x": Node(b"x")}), small_disk)
    assert sorted(os.listdir(small_disk)) == [".snapcask-complete", "lost+found", "x"]


def test_a_target_with_the_longest_name_is_pulled(store: FixtureStore, home: Path) -> None:
    pulled(store, store.add(NODES), home / ("n" * 255))
    assert os.listdir(home) == ["n" * 255]


def test_an_image_that_is_not_there_changes_nothing(store: FixtureStore, home: Path) -> None:
    with pytest.raises(NotFound):
        pulled(store, digest_of(b"nothing"), home / "image")
    assert os.listdir(home) == []


def test_only_our_errors_come_out(store: FixtureStore, home: Path) -> None:
    """No group of a task group, whatever fails in many workers at once."""
    digest = store.add(NODES)
    for pack in store.pack_paths():
        os.truncate(pack, 5000)
    with pytest.raises(ImageError) as caught:
        pulled(store, digest, home / "image")
    assert not isinstance(caught.value, BaseExceptionGroup)
