"""Directories that benchmarks push: real CRIU snapshots where they are, and pairs made here."""

from __future__ import annotations

import mmap
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

from imgfmt.chunking import HOLE_PAGES, Cutter, PageRun, Profile, page_marks
from transfer.config import TransferConfig

SHARED_ARCHIVE = Path(__file__).parents[2] / "shared" / "data" / "criu-replicas.tar.zst"
REPLICAS = ("x-replica-0", "x-replica-1", "y-replica-0")
"""The snapshots of the archive in the order in which they are pushed."""

PAGE = 4096
BLOCK_BYTES = TransferConfig().block_bytes
_SHARED_RUN_BYTES = 4 * 1024 * 1024
_INSERTED_PAGES = 3
_DATA_RUN_PAGES = 97
_LONG_HOLE_SHARE = 0.15
_LONG_HOLE_PAGES = 400


def unpack_replicas(folder: Path, archive: Path = SHARED_ARCHIVE) -> list[Path]:
    """Unpack the real snapshots into `folder`; an empty list where the archive is not there."""
    if not archive.exists():
        return []
    with (
        archive.open("rb") as raw,
        zstandard.ZstdDecompressor().stream_reader(raw) as plain,
        tarfile.open(fileobj=plain, mode="r|") as tar,
    ):
        tar.extractall(folder, filter="data")
    return [folder / name for name in REPLICAS]


def make_snapshot(folder: Path, size_bytes: int, seed: int = 7) -> Path:
    """Two large files of random bytes and a few small ones, as a dump has them."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for number in range(2):
        with (folder / f"pages-{number + 1}.img").open("wb") as file:
            left = size_bytes // 2 // PAGE * PAGE
            while left:
                file.write(rng.bytes(min(left, BLOCK_BYTES)))
                left -= min(left, BLOCK_BYTES)
    for number in range(12):
        (folder / f"core-{number}.img").write_bytes(rng.bytes(3000))
    return folder


def make_process_like(folder: Path, size_bytes: int, seed: int = 7) -> Path:
    """As a GPU process is dumped: 41 % zero, in a hole for each 165 pages, most of them short.

    Between the holes are random bytes. All is in one file.
    """
    folder.mkdir()
    rng = np.random.default_rng(seed)
    with (folder / "pages-1.img").open("wb") as file:
        while (left := size_bytes // PAGE - file.tell() // PAGE) > 0:
            file.write(rng.bytes(min(left, int(rng.geometric(1 / _DATA_RUN_PAGES))) * PAGE))
            is_long = rng.random() < _LONG_HOLE_SHARE
            hole = rng.geometric(1 / _LONG_HOLE_PAGES) if is_long else rng.integers(1, HOLE_PAGES)
            file.seek(int(hole) * PAGE, os.SEEK_CUR)
        file.truncate(file.tell())
    return folder


def make_half_shared(folder: Path, first: Path, seed: int = 8) -> Path:
    """As `first`, but every other 4 MiB are new, and the rest is shifted by a few pages."""
    shutil.copytree(first, folder)
    rng = np.random.default_rng(seed)
    for path in sorted(folder.glob("pages-*.img")):
        before = mapped(first / path.name)
        with path.open("wb") as file:
            file.write(rng.bytes(_INSERTED_PAGES * PAGE))
            for number, start in enumerate(range(0, len(before), _SHARED_RUN_BYTES)):
                run = before[start : start + _SHARED_RUN_BYTES]
                file.write(run if number % 2 else rng.bytes(len(run)))
    return folder


def make_replica(folder: Path, first: Path, new_share: float, seed: int = 9) -> Path:
    """As `first`, but `new_share` of the chunks, here and there, differ in one page."""
    shutil.copytree(first, folder)
    rng = np.random.default_rng(seed)
    for path in sorted(folder.glob("pages-*.img")):
        chunks = cuts(mapped(path), Profile())
        chosen = rng.permutation(len(chunks))[: round(new_share * len(chunks))]
        with path.open("r+b") as file:
            for run in (chunks[i] for i in chosen):
                file.seek((run.start + min(1, run.pages - 1)) * PAGE)
                file.write(rng.bytes(PAGE))
    return folder


def cuts(data: memoryview, profile: Profile) -> list[PageRun]:
    """The chunks of a file with these bytes."""
    cutter = Cutter(profile, len(data))
    found: list[PageRun] = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        if filling := -len(block) % profile.page_bytes:
            block = memoryview(bytes(block) + bytes(filling))
        found += cutter.feed(page_marks(block, profile)).chunks
    return found + cutter.finish().chunks


def mapped(path: Path) -> memoryview:
    """The bytes of a file that has any; unmapped when the last view of them is gone."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def files_of(folder: Path) -> Iterator[memoryview]:
    """The bytes of each file below `folder` that has any, in order of names."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size:
            yield mapped(path)


def total_bytes(folder: Path) -> int:
    """Length of all files below `folder` together."""
    return sum(os.lstat(path).st_size for path in folder.rglob("*") if path.is_file())
