"""On which disks the files of a tree lie, and opening them there. All of it blocks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from imgfmt.digest import DIGEST_BYTES, Digest
from imgfmt.errors import ImageError, InvalidImage, NotFound
from imgfmt.tree import Tree
from imgfmt.wire import Column, Layout, decode_table, encode_table
from transfer.cache.disks import MAIN
from transfer.cache.durable import read_file, remove_file, replace_file
from transfer.cache.layout import DomainPaths
from transfer.cache.records import Mark, disk_ids

PLACES = Layout("cache-places", (Column("disk", 1),))

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Entry `i` of a tree lies on disk `ids[of[i]]`. `disks` are the ids of the further disks."""

    disks: tuple[bytes, ...]
    of: npt.NDArray[np.int64]

    @property
    def ids(self) -> tuple[bytes, ...]:
        """The disks that `of` counts, the main one first."""
        return (MAIN, *self.disks)

    @classmethod
    def all_on_main(cls, tree: Tree) -> Places:
        """As where there is one disk."""
        return cls((), np.zeros(tree.n_entries, np.int64))


def read_places(paths: DomainPaths, digest: Digest, tree: Tree) -> Places:
    """Where the files of a tree lie. Raises InvalidImage or Unsupported."""
    raw = read_file(paths.places(digest))
    if raw is None:
        return Places.all_on_main(tree)
    found = _decode(raw, digest)
    if len(found.of) != tree.n_entries:
        raise InvalidImage(f"places of tree {digest.short}: they do not fit the tree")
    return found


def _decode(raw: bytes, digest: Digest) -> Places:
    table = decode_table(raw, PLACES, f"places of tree {digest.short}")
    head, of = table.head, table.columns["disk"].astype(np.int64)
    disks = disk_ids(head)
    if head.raw("tree", DIGEST_BYTES) != digest.raw:
        head.fail("they are of another tree")
    head.done()
    if int(of.max(initial=0)) > len(disks):
        head.fail("they name a disk that is not listed")
    return Places(disks, of)


def write_places(paths: DomainPaths, digest: Digest, places: Places) -> None:
    """Keep where the files of a tree lie. Not synced here."""
    if not places.disks:
        remove_file(paths.places(digest))
        return
    head = {"tree": digest.raw, "disks": list(places.disks)}
    pieces = encode_table(PLACES, head, {"disk": places.of.astype(np.uint8)})
    replace_file(paths.places(digest), pieces, fsync=False)


def missing_part(paths: DomainPaths, mark: Mark) -> str:
    """What a complete tree lacks of its parts, a clause to be read after its name; or nothing."""
    for disk_id in mark.disks:
        disk, shown = paths.disks.find(disk_id), paths.disks.shown(disk_id)
        if disk is None:
            return f"has files on disk {shown}, which is not there"
        if not os.path.isdir(paths.on(disk).tree(mark.tree)):
            return f"has lost its files on disk {shown}"
    if mark.disks:
        with contextlib.suppress(OSError, ImageError):
            raw = read_file(paths.places(mark.tree))
            if raw is not None and _decode(raw, mark.tree).disks == mark.disks:
                return ""
        return "has lost the record of the disks that it lies on"
    return ""


def part_folders(
    paths: DomainPaths, digest: Digest, disks: Sequence[bytes], *, partial: bool = False
) -> list[str]:
    """The folders of the parts of a tree, or of one that is being built, the main one first.

    Raises NotFound if a disk is not there.
    """
    folders = []
    for disk_id in (MAIN, *disks):
        disk = paths.disks.find(disk_id) if disk_id else None
        if disk is None and disk_id:
            raise NotFound(
                f"tree {digest.short} has files on disk {paths.disks.shown(disk_id)}, which is not"
                " there; mount it, or `snapcask prefetch` builds the tree again"
            )
        of_disk = paths.on(disk) if disk is not None else paths
        folders.append(of_disk.partial(digest) if partial else of_disk.tree(digest))
    return folders


class TreeFiles:
    """The files of a tree below the `folders` of its parts, the main one first."""

    def __init__(self, tree: Tree, folders: Sequence[str], places: Places) -> None:
        self.tree = tree
        self.folders = folders
        self.places = places

    @cached_property
    def names(self) -> list[bytes]:
        """The path of each entry."""
        tops = [os.fsencode(folder) for folder in self.folders]
        of, inner = self.places.of.tolist(), self.tree.paths()
        return [os.path.join(tops[part], path) for part, path in zip(of, inner, strict=True)]


def files_of(paths: DomainPaths, digest: Digest, tree: Tree) -> TreeFiles:
    """The files of a complete tree. Raises NotFound if a disk is not there, or as `read_places`."""
    places = read_places(paths, digest, tree)
    return TreeFiles(tree, part_folders(paths, digest, places.disks), places)


class Source:
    """A local tree to take chunks from. Close it in the end, unless `roots` are somebody else's."""

    def __init__(self, tree: Tree, roots: Sequence[int], places: Places) -> None:
        self.tree = tree
        self._roots = roots
        self._places = places

    @classmethod
    def at(cls, tree: Tree, folders: Sequence[str], places: Places) -> Source:
        """One whose parts are at `folders`. Raises OSError."""
        roots: list[int] = []
        try:
            for folder in folders:
                roots.append(os.open(folder, _DIRECTORY))  # noqa: PERF401 (closed where it fails)
        except OSError:
            for root in roots:
                os.close(root)
            raise
        return cls(tree, roots, places)

    @cached_property
    def names(self) -> list[bytes]:
        """Paths of its entries."""
        return self.tree.paths()

    def open(self, entry: int) -> int:
        """A descriptor to read a file by. Raises OSError."""
        root = self._roots[int(self._places.of[entry])]
        return os.open(self.names[entry], _READ, dir_fd=root)

    def disk(self, entry: int) -> bytes:
        """The id of the disk that a file lies on."""
        return self._places.ids[int(self._places.of[entry])]

    def close(self) -> None:
        """Close the directories."""
        for root in self._roots:
            os.close(root)
        self._roots = ()
