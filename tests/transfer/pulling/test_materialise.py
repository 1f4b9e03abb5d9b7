"""Writing trees: all is as it was recorded, as far as the caller and the filesystem allow."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput, OutOfResources
from tests.transfer.fixture_store import (
    CONFIG,
    KIB,
    MIB,
    FixtureStore,
    Node,
    Nodes,
    contents,
    directory,
    expected,
    link,
    noise,
    run,
)
from tests.transfer.privilege import modes_count
from transfer.execute import Executor
from transfer.pulling.attributes import Warnings, WriterProfile
from transfer.pulling.materialise import TreeWriter
from transfer.threads import Threads

NOBODY = 65_534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
T0 = 1_234_567_890_987_654_321


def write(
    store: FixtureStore,
    tree: Digest,
    target: Path,
    profile: WriterProfile = WriterProfile.FAITHFUL,
) -> tuple[str, ...]:
    """Write a tree to a new directory; returns the warnings."""
    target.mkdir()
    warnings = Warnings()

    async def work() -> None:
        content = await store.catalog.content(tree)
        root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with Threads("test", 4) as threads:
                executor = Executor(store.catalog, [content], threads, CONFIG)
                where = str(target)
                writer = TreeWriter(content.tree, root, where, profile=profile, warnings=warnings)
                await writer.prepare(threads)
                await executor.read(writer)
                await writer.finish(threads)
                writer.finish_root(root)
        finally:
            os.close(root)

    run(work())
    return warnings.lines()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def written(store: FixtureStore, nodes: Nodes, target: Path, **given: Any) -> tuple[str, ...]:
    """Put `nodes` into the store and write them from there."""
    return write(store, store.add_tree(nodes), target, **given)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run as a user without rights, all threads of the process."""
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def anybodys() -> Iterator[Path]:
    """A directory that every user can write to."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def test_files_of_every_kind_come_back(store: FixtureStore, target: Path) -> None:
    large = noise(3 * MIB) + bytes(MIB) + noise(MIB + 1, 1)
    nodes = {
        b"empty": Node(b""),
        b"small": Node(b"x"),
        b"a/b/c/deep": Node(noise(70_000)),
        b"large": Node(large),
        b"again": Node(large),
        b"hole": Node(bytes(2 * MIB)),
        b"ends-in-hole": Node(noise(100_000) + bytes(MIB + 5)),
        b"begins-with-hole": Node(bytes(MIB) + noise(5)),
        b"no-files": directory(),
    }
    assert written(store, nodes, target) == ()
    assert contents(target) == expected(nodes)


def test_holes_stay_holes(store: FixtureStore, target: Path) -> None:
    data = noise(256 * KIB)
    nodes = {
        b"hole": Node(bytes(8 * MIB)),
        b"sparse": Node(data + bytes(8 * MIB) + data[::-1] + bytes(8 * MIB + 1)),
        b"one-chunk": Node(data[:4096] + bytes(8 * MIB)),
    }
    written(store, nodes, target)
    assert contents(target) == expected(nodes)
    blocks = {name: os.stat(target / name).st_blocks * 512 for name in os.listdir(target)}
    assert blocks["hole"] == 0
    assert len(data) <= blocks["one-chunk"] + blocks["sparse"] <= 3 * len(data)


def test_names_may_be_any_bytes(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"\xff\xfe/\x01\n\xc3": Node(b"odd"),
        b"\xff\xfe/to": link(b"\xf0\x28\x8c"),
        "grün/ß".encode(): Node(b"utf-8"),
        b"n" * 255: Node(b"long"),
    }
    written(store, nodes, target)
    assert contents(target) == expected(nodes)


def test_times_are_kept_to_the_nanosecond(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"": directory(mtime_ns=T0),
        b"d": directory(mtime_ns=T0 + 1),
        b"d/small": Node(b"x", mtime_ns=T0 + 2),
        b"d/large": Node(noise(2 * MIB), mtime_ns=T0 + 3),
        b"d/empty": Node(b"", mtime_ns=T0 + 4),
        b"d/link": link(b"small", mtime_ns=T0 + 5),
        b"d/e": directory(mtime_ns=T0 + 6),
        b"d/e/other": Node(same_as=b"d/small"),
        b"old": Node(b"x", mtime_ns=-1),
    }
    written(store, nodes, target)
    for path, node in nodes.items():
        if path not in (b"d/e/other", b"old"):
            assert os.lstat(os.fsencode(target) + b"/" + path).st_mtime_ns == node.mtime_ns
    assert os.stat(target / "old").st_mtime_ns == -1


def test_names_of_one_file_are_hard_links(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"large": Node(noise(2 * MIB)),
        b"a/small": Node(b"x", mode=0o400),
        b"z/1": Node(same_as=b"large"),
        b"z/2": Node(same_as=b"large"),
        b"z/3": Node(same_as=b"a/small"),
    }
    written(store, nodes, target)
    assert contents(target) == expected(nodes)
    assert os.path.samefile(target / "large", target / "z/1")
    assert os.stat(target / "large").st_nlink == 3
    assert os.path.samefile(target / "a/small", target / "z/3")


def test_links_that_point_outside_are_made_and_not_followed(
    store: FixtureStore, target: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    outside.chmod(0o640)
    os.utime(outside, ns=(T0, T0))
    before = os.stat(outside)
    nodes = {
        b"absolute": link(os.fsencode(outside), uid=NOBODY),
        b"relative": link(b"../outside"),
        b"dangling": link(b"../nothing"),
        b"x": Node(noise(2 * MIB)),
    }
    written(store, nodes, target)
    assert contents(target) == expected(nodes)
    after = os.stat(outside)
    assert outside.read_bytes() == b"mine"
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (
        before.st_mode, before.st_uid, before.st_mtime_ns
    )  # fmt: skip


def test_a_file_that_somebody_else_put_there_is_not_overwritten(
    store: FixtureStore, target: Path
) -> None:
    content = store.content(store.add_tree({b"small": Node(b"small")}))
    target.mkdir()
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    writer = TreeWriter(
        content.tree, root, "there", profile=WriterProfile.FAITHFUL, warnings=Warnings()
    )
    (target / "small").write_bytes(b"other")
    with pytest.raises(InvalidInput, match="there/small: it exists already"):
        writer.accept(np.array([0]), [memoryview(b"small")])
    os.close(root)
    assert (target / "small").read_bytes() == b"other"


def test_adjacent_chunks_are_written_together_in_whatever_order_they_come(
    store: FixtureStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = noise(2 * MIB)
    content = store.content(store.add_tree({b"x": Node(whole)}))
    tree = content.tree
    target.mkdir()
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    writer = TreeWriter(tree, root, "there", profile=WriterProfile.FAITHFUL, warnings=Warnings())
    with Threads("test", 1) as threads:
        run(writer.prepare(threads))
    views = [
        memoryview(whole)[begin : begin + size]
        for begin, size in zip(tree.chunk_offset.tolist(), tree.chunk_bytes.tolist(), strict=True)
    ]
    offsets: list[int] = []
    pwritev = os.pwritev

    def spy(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return pwritev(descriptor, pieces, offset)

    monkeypatch.setattr(os, "pwritev", spy)
    writer.accept(np.arange(tree.n_chunks)[::-1], views[::-1])
    os.close(root)
    assert offsets == [0]
    assert (target / "x").read_bytes() == whole


@pytest.mark.parametrize(("name", "number"), [("large", 0), ("small", -1)])
def test_a_link_in_place_of_a_file_is_not_written_through(
    store: FixtureStore, target: Path, tmp_path: Path, name: str, number: int
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    nodes = {b"large": Node(noise(2 * MIB)), b"small": Node(b"small")}
    content = store.content(store.add_tree(nodes))
    target.mkdir()
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    writer = TreeWriter(
        content.tree, root, "there", profile=WriterProfile.FAITHFUL, warnings=Warnings()
    )
    with Threads("test", 1) as threads:
        run(writer.prepare(threads))
    (target / name).unlink(missing_ok=True)
    (target / name).symlink_to(outside)
    with pytest.raises(InvalidInput, match=f"there/{name}: it (is|exists)"):
        writer.accept(np.array([number % content.tree.n_chunks]), [memoryview(b"not mine")])
    os.close(root)
    assert outside.read_bytes() == b"mine"


def test_read_only_directories_get_their_children(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"": directory(0o555),
        b"ro": directory(0o555),
        b"ro/none": directory(0o000),
        b"ro/none/below": directory(0o700),
        b"ro/none/file": Node(noise(2 * MIB), mode=0o000),
        b"ro/file": Node(b"x", mode=0o400),
        b"ro/link": link(b"file"),
        b"ro/other": Node(same_as=b"ro/file"),
    }
    with modes_count():
        written(store, nodes, target)
    modes = {path: stat.S_IMODE(os.lstat(target / os.fsdecode(path)).st_mode) for path in nodes}
    assert modes == {
        path: 0o777 if node.target else nodes[node.same_as].mode if node.same_as else node.mode
        for path, node in nodes.items()
    }
    with modes_count():
        os.chmod(target, 0o755)


@pytest.mark.root
@as_root
def test_root_restores_owners_and_set_id_bits(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"": directory(0o2775, gid=7),
        b"d": directory(0o1777, uid=5),
        b"d/small": Node(b"x", mode=0o4755, uid=1, gid=2),
        b"d/large": Node(noise(2 * MIB), mode=0o6755, uid=3, gid=4),
        b"d/link": link(b"small", uid=6, gid=7),
    }
    assert written(store, nodes, target) == ()
    for path, node in nodes.items():
        found = os.lstat(target / os.fsdecode(path))
        assert (found.st_uid, found.st_gid) == (node.uid, node.gid)
        assert stat.S_IMODE(found.st_mode) == node.mode


@pytest.mark.root
@as_root
def test_others_keep_what_they_write_without_set_id_bits(anybodys: Path) -> None:
    store = FixtureStore(anybodys / "store")
    nodes = {
        b"mine": Node(b"x", mode=0o4755, uid=NOBODY, gid=NOBODY),
        b"roots": Node(b"x", mode=0o6755, uid=0, gid=0),
        b"link": link(b"mine", uid=1),
        b"capable": Node(b"x", xattrs=((b"security.capability", CAPABILITY),)),
        b"capable-too": Node(b"x", xattrs=((b"security.capability", CAPABILITY),)),
    }
    tree = store.add_tree(nodes)
    with as_nobody():
        warnings = write(store, tree, anybodys / "target")
    store.close()
    assert contents(anybodys / "target") == expected(nodes)
    found = {name: os.lstat(anybodys / "target" / name) for name in ("mine", "roots", "link")}
    assert {status.st_uid for status in found.values()} == {NOBODY}
    assert stat.S_IMODE(found["mine"].st_mode) == 0o4755
    assert stat.S_IMODE(found["roots"].st_mode) == 0o755
    assert sorted(warnings) == [
        "capable and 1 more: the system refused attribute security.capability"
        " (Operation not permitted)",
        "roots: set-id bits were left out, since it has another owner",
    ]


XATTRS = ((b"security.capability", CAPABILITY), (b"user.note", b""), (b"user.\xff", b"\0\1"))


@pytest.mark.root
@as_root
def test_extended_attributes_are_kept(store: FixtureStore, target: Path) -> None:
    nodes = {
        b"": directory(xattrs=((b"user.root", b"1"),)),
        b"small": Node(b"x", mode=0o555, xattrs=XATTRS, uid=3),
        b"large": Node(noise(2 * MIB), xattrs=XATTRS, uid=3),
        b"empty": Node(b"", xattrs=XATTRS),
    }
    assert written(store, nodes, target) == ()
    for name in (b"small", b"large", b"empty"):
        path = os.fsencode(target) + b"/" + name
        found = {os.fsencode(key): os.getxattr(path, key) for key in os.listxattr(path)}
        assert found == dict(XATTRS)
    assert os.getxattr(target, "user.root") == b"1"


def test_a_sanitised_tree_lends_nobody_rights(store: FixtureStore, target: Path) -> None:
    kept = ((b"user.note", b"kept"),)
    nodes = {
        b"d": directory(0o3755),
        b"d/small": Node(b"x", mode=0o4751, xattrs=(XATTRS[0], *kept)),
        b"d/large": Node(noise(2 * MIB), mode=0o6750, xattrs=(XATTRS[0], *kept)),
    }
    assert written(store, nodes, target, profile=WriterProfile.SANITISED) == ()
    modes = {p: stat.S_IMODE(os.stat(target / os.fsdecode(p)).st_mode) for p in nodes}
    assert modes == {b"d": 0o1755, b"d/small": 0o751, b"d/large": 0o750}
    assert os.listxattr(target / "d/small") == os.listxattr(target / "d/large") == ["user.note"]


@pytest.mark.parametrize("code", [errno.ENOTSUP, errno.EPERM])
def test_attributes_that_the_filesystem_refuses_are_warned_of(
    store: FixtureStore, target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "setxattr", refuse)
    nodes = {b"x": Node(b"x", xattrs=((b"user.note", b"1"),), mode=0o640)}
    reason = os.strerror(code)
    assert written(store, nodes, target) == (
        f"x: the system refused attribute user.note ({reason})",
    )
    assert stat.S_IMODE(os.stat(target / "x").st_mode) == 0o640


@pytest.mark.root
@as_root
def test_an_owner_that_the_system_refuses_is_warned_of(
    store: FixtureStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fchown", refuse)
    nodes = {b"": directory(uid=os.getuid()), b"x": Node(b"x", mode=0o4755, uid=5)}
    assert written(store, nodes, target) == (
        "x and 1 more: the system refused to change the owner",
        "x: set-id bits were left out, since it has another owner",
    )


def test_a_full_disk_is_told_with_the_file(
    store: FixtureStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tree = store.add_tree({b"d/x": Node(noise(2 * MIB))})
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OutOfResources, match="target/d/x: no space left on its filesystem"):
        write(store, tree, target)


def test_short_writes_are_continued(
    store: FixtureStore, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {b"x": Node(noise(5 * MIB)), b"y": Node(noise(90_000, 1))}
    tree = store.add_tree(nodes)
    pwritev = os.pwritev

    def short(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        total = sum(map(len, pieces))
        cut, some = total - total // 3, []
        for piece in pieces:
            some.append(piece[:cut])
            cut -= len(some[-1])
        return pwritev(descriptor, some, offset)

    monkeypatch.setattr(os, "pwritev", short)
    write(store, tree, target)
    assert contents(target) == expected(nodes)


def test_thousands_of_small_files_come_from_few_reads(store: FixtureStore, target: Path) -> None:
    store.chunks_a_pack = 1000
    nodes = {b"d%d/f%d" % (i % 7, i): Node(noise(1 + i % 5000, i)) for i in range(2000)}
    tree = store.add_tree(nodes)
    store.store.reads.clear()
    write(store, tree, target)
    assert contents(target) == expected(nodes)
    assert len(store.store.reads) <= 6
