"""Ranges are as few as they can be, and bytes get there whatever the filesystem can."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from imgfmt.tree import Tree
from tests.filesystems import Disk, disk, run
from tests.transfer.fixture_store import MIB, PAGE, FixtureStore, Node, Nodes, noise
from transfer.cache import share
from transfer.cache.share import Runs, Sharer, can_clone, join_runs


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FixtureStore]:
    """A store."""
    made = FixtureStore(tmp_path / "store")
    yield made
    made.close()


def tree(store: FixtureStore, nodes: Nodes) -> Tree:
    """A tree of these."""
    return store.content(store.add_tree(nodes)).tree


def whole(one: Tree, other: Tree) -> Runs:
    """All of a tree from chunks with the same numbers of another."""
    numbers = np.arange(one.n_chunks, dtype=np.int64)
    return join_runs(one, numbers, other, numbers)


def test_what_follows_in_both_files_is_one_range(store: FixtureStore) -> None:
    made = tree(store, {b"a": Node(noise(3 * MIB)), b"b": Node(noise(MIB, 1))})
    runs = whole(made, made)
    assert runs.length.tolist() == [3 * MIB, MIB]
    assert [(low, high) for _, low, high in runs.by_entry()] == [(0, 1), (1, 2)]


def test_a_hole_in_either_file_parts_ranges(store: FixtureStore) -> None:
    dense = tree(store, {b"a": Node(noise(MIB) + noise(MIB, 1))})
    holed = tree(store, {b"a": Node(noise(MIB) + bytes(MIB) + noise(MIB, 1))})
    for one, other in ((holed, holed), (holed, dense), (dense, holed)):
        if one.n_chunks == other.n_chunks:
            assert len(whole(one, other)) == 2


def test_a_chunk_from_elsewhere_parts_ranges(store: FixtureStore) -> None:
    made = tree(store, {b"a": Node(noise(4 * MIB))})
    numbers = np.arange(made.n_chunks, dtype=np.int64)
    swapped = numbers.copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    runs = join_runs(made, numbers, made, swapped)
    assert len(runs) == 4
    assert runs.first.tolist() == [0, 2, 3, 4, made.n_chunks]
    assert runs.length.sum() == 4 * MIB


def files(folder: Path, content: bytes) -> tuple[int, int]:
    """A file to take from, and an empty one of the same length."""
    (folder / "one").write_bytes(content)
    one = os.open(folder / "one", os.O_RDONLY)
    other = os.open(folder / "other", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.ftruncate(other, len(content))
    return one, other


@pytest.mark.root
@pytest.mark.parametrize("kind", ["xfs", "ext4", "btrfs"])
def test_bytes_are_shared_where_that_can_be_and_copied_elsewhere(tmp_path: Path, kind: str) -> None:
    content = noise(MIB + 77)
    with disk(tmp_path, kind) as made:
        assert can_clone(str(made.root)) == (kind != "ext4")
        one, other = files(made.root, content)
        sharer = Sharer()
        sharer.take(one, 64 * PAGE, other, 64 * PAGE, len(content) - 64 * PAGE)
        assert bool(sharer.shared_bytes) == (kind != "ext4")
        sharer.take(one, 5, other, 5, 64 * PAGE - 5)  # on no block: copied
        sharer.take(one, 0, other, 0, 5)
        assert sharer.copied_bytes >= 64 * PAGE
        assert os.pread(other, len(content) + 1, 0) == content
        os.close(one)
        os.close(other)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL])
def test_bytes_are_copied_where_the_kernel_can_do_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(code, "no")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(os, "copy_file_range", refuse)
    content = noise(3 * MIB + 5)
    one, other = files(tmp_path, content)
    Sharer().take(one, 0, other, 0, len(content))
    assert os.pread(other, len(content) + 1, 0) == content


def test_an_error_that_is_none_of_these_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(fcntl, "ioctl", full)
    with pytest.raises(OSError, match="full"):
        Sharer().take(*(files(tmp_path, b"x")[0], 0, files(tmp_path, b"x")[1], 0), 1)


def test_a_source_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    one, other = files(tmp_path, noise(PAGE))
    with pytest.raises(OSError, match="too early"):
        Sharer().take(one, 0, other, 0, 2 * PAGE)


def test_short_copies_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.copy_file_range

    def short(source: int, to: int, length: int, *offsets: int) -> int:
        return original(source, to, min(length, 1000), *offsets)

    monkeypatch.setattr(share.os, "copy_file_range", short)  # type: ignore[attr-defined]
    content = noise(10_000)
    one, other = files(tmp_path, content)
    share._copy(one, 0, other, 0, len(content))
    assert os.pread(other, 20_000, 0) == content


@pytest.mark.slow
@pytest.mark.root
def test_a_gigabyte_in_pieces_is_shared_much_faster_than_it_is_copied(tmp_path: Path) -> None:
    piece, n = 256 * 1024, 4096
    with disk(tmp_path, "xfs", 2600) as made:
        took = _share_gigabyte(made, piece, n)
        begun = time.perf_counter()
        run("cp", "--reflink=never", made.root / "donor", made.root / "copy")
        run("sync", "-f", made.root)
        copied = time.perf_counter() - begun
    print("sharing 1 GiB in pieces of 256 KiB, seconds:", [round(t, 3) for t in took], copied)
    assert min(took) < copied / 4, (took, copied)


def _share_gigabyte(made: Disk, piece: int, n: int) -> list[float]:
    with (made.root / "donor").open("wb") as file:
        for i in range(n // 64):
            file.write(noise(64 * piece, i))
    run("sync", "-f", made.root)
    took = []
    for _ in range(5):
        one = os.open(made.root / "donor", os.O_RDONLY)
        other = os.open(made.root / "other", os.O_RDWR | os.O_CREAT)
        os.ftruncate(other, n * piece)
        sharer = Sharer()
        begun = time.perf_counter()
        for i in range(n):
            sharer.take(one, i * piece, other, i * piece, piece)
        took.append(time.perf_counter() - begun)
        assert sharer.copied_bytes == 0
        os.close(one)
        os.close(other)
        (made.root / "other").unlink()
        run("sync", "-f", made.root)
    return took
