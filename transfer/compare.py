"""How two images differ: which files, and how many bytes of chunks they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Digest
from imgfmt.image import Image, Member
from imgfmt.tree import EntryType, Tree
from transfer.catalog import Catalog

_METADATA = ("mode", "uid", "gid", "mtime_s", "mtime_ns")

U1 = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]


class Change(StrEnum):
    """What became of an entry; `content` covers its type and a link's target."""

    ADDED = "added"
    REMOVED = "removed"
    CONTENT = "content"
    METADATA = "metadata"


@dataclass(frozen=True, slots=True)
class EntryChange:
    """One entry that differs. `path` is empty for a member's root.

    A size is None for a directory, and on a side that does not have the entry.
    """

    member: str
    path: bytes
    change: Change
    before_bytes: int | None
    after_bytes: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Image `before` against image `after`, entry by entry and chunk by chunk.

    The byte counts are plain bytes of distinct chunks: those of both, of only one. `unchanged`
    counts entries. Images that were cut by different profiles share chunks of small files only.
    """

    before: Digest
    after: Digest
    changes: list[EntryChange]
    unchanged: int
    shared_bytes: int
    only_before_bytes: int
    only_after_bytes: int
    same_profile: bool


async def compare(
    catalog: Catalog, before: tuple[Digest, Image], after: tuple[Digest, Image]
) -> Comparison:
    """Compare two images. Members are matched by name; where each has just one, these two are."""
    trees = {
        member.tree: await catalog.tree(member.tree)
        for _, image in (before, after)
        for member in image.members
    }
    changes: list[EntryChange] = []
    unchanged = 0
    for name, old, new in _matched(before[1].members, after[1].members):
        found, same = _compare_trees(
            name, trees[old.tree] if old else None, trees[new.tree] if new else None
        )
        changes += found
        unchanged += same
    old_trees, new_trees = (
        [trees[member.tree] for member in image.members] for _, image in (before, after)
    )
    shared, only_old, only_new = shared_bytes(old_trees, new_trees)
    return Comparison(
        before[0], after[0], changes, unchanged, shared, only_old, only_new,
        same_profile=len({tree.profile for tree in trees.values()}) == 1,
    )  # fmt: skip


def distinct(digests: U1, plain_bytes: npt.NDArray[np.uint32]) -> tuple[int, int]:
    """How many different chunks there are, and their plain bytes. Shapes (n, 32) and (n,)."""
    order, first = grouped(digests)
    return len(first), int(plain_bytes[order[first]].sum(dtype=np.uint64))


def shared_bytes(before: Sequence[Tree], after: Sequence[Tree]) -> tuple[int, int, int]:
    """Plain bytes of the distinct chunks that both have, and that only one or the other has."""
    trees = [*before, *after]
    digests = np.concatenate([tree.chunk_digest for tree in trees])
    plain_bytes = np.concatenate([tree.chunk_bytes for tree in trees])
    n_before = sum(tree.n_chunks for tree in before)
    order, first = grouped(digests)
    if not len(first):
        return 0, 0, 0
    in_before = np.logical_or.reduceat(order < n_before, first)
    in_after = np.logical_or.reduceat(order >= n_before, first)
    sizes = plain_bytes[order[first]]
    shared, only_before, only_after = (
        int(sizes[which].sum(dtype=np.uint64))
        for which in (in_before & in_after, ~in_after, ~in_before)
    )
    return shared, only_before, only_after


def grouped(digests: U1) -> tuple[Indices, Indices]:
    """An order in which equal digests are neighbours, and where in it each different one begins."""
    words = np.ascontiguousarray(digests).view(np.uint64)
    order = np.argsort(words[:, 0], kind="stable")
    key = words[order, 0]
    alike = np.flatnonzero(key[1:] == key[:-1])
    begins = np.ones(len(order), dtype=np.bool_)
    if (words[order[alike]] == words[order[alike + 1]]).all():  # all but always
        begins[alike + 1] = False
    else:
        order = np.lexsort(words.T)
        begins[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    return order, np.flatnonzero(begins)


def _matched(
    before: Sequence[Member], after: Sequence[Member]
) -> Iterator[tuple[str, Member | None, Member | None]]:
    if len(before) == len(after) == 1:
        yield after[0].name, before[0], after[0]
        return
    old, new = ({member.name: member for member in members} for members in (before, after))
    for name in sorted(old.keys() | new.keys()):
        yield name, old.get(name), new.get(name)


def _compare_trees(
    member: str, before: Tree | None, after: Tree | None
) -> tuple[list[EntryChange], int]:
    """The entries that differ, by path, and how many do not."""
    if before is not None and before is after:
        return [], before.n_entries
    old = _Side(before) if before is not None else None
    new = _Side(after) if after is not None else None
    old_paths, new_paths = old.paths if old else {}, new.paths if new else {}
    changes: list[EntryChange] = []
    unchanged = 0
    for path in sorted(old_paths.keys() | new_paths.keys()):
        i, j = old_paths.get(path), new_paths.get(path)
        change = Change.ADDED if i is None else Change.REMOVED
        if old and new and i is not None and j is not None:
            difference = _difference(old, i, new, j)
            if difference is None:
                unchanged += 1
                continue
            change = difference
        before_bytes = old.size_bytes(i) if old and i is not None else None
        after_bytes = new.size_bytes(j) if new and j is not None else None
        changes.append(EntryChange(member, path, change, before_bytes, after_bytes))
    return changes, unchanged


class _Side:
    """One tree, made ready to be asked about one entry after the other."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.names = tree.paths()
        self.paths = {path: index for index, path in enumerate(self.names)}
        self.group: list[int] = tree.columns["group"].tolist()
        self._type: list[int] = tree.columns["type"].tolist()
        self._size: list[int] = tree.columns["size"].tolist()
        self._metadata = list(
            zip(*(tree.columns[name].tolist() for name in _METADATA), strict=True)
        )
        self._with_xattrs = set(tree.columns["xattr_entry"].tolist())

    def size_bytes(self, index: int) -> int | None:
        """Size of an entry, that of a hard-linked file for each of its names; no directory's."""
        if self._type[index] == EntryType.DIRECTORY:
            return None
        return self._size[self.group[index]]

    def type(self, index: int) -> int:
        """Its `EntryType` as a number."""
        return self._type[index]

    def metadata(self, index: int) -> tuple[object, ...]:
        """Mode, owner, time, extended attributes and the first name of a hard-linked file."""
        first = self.group[index]
        xattrs = self.tree.entry(first).xattrs if first in self._with_xattrs else ()
        return (*self._metadata[index], xattrs, self.names[first])

    def target(self, index: int) -> bytes:
        """Target of a symbolic link."""
        return self.tree.entry(index).target

    def chunks(self, index: int) -> tuple[U1, npt.NDArray[np.uint64]]:
        """Digests and offsets of the chunks of a file; with its size they tell all its bytes."""
        first, end = self.tree.chunk_range(self.group[index])
        return self.tree.chunk_digest[first:end], self.tree.chunk_offset[first:end]


def _difference(old: _Side, i: int, new: _Side, j: int) -> Change | None:
    if old.type(i) != new.type(j) or old.size_bytes(i) != new.size_bytes(j):
        return Change.CONTENT
    if old.type(i) == EntryType.SYMLINK and old.target(i) != new.target(j):
        return Change.CONTENT
    if old.type(i) == EntryType.FILE:
        (old_digest, old_offset), (new_digest, new_offset) = old.chunks(i), new.chunks(j)
        if not np.array_equal(old_digest, new_digest) or not np.array_equal(old_offset, new_offset):
            return Change.CONTENT
    return None if old.metadata(i) == new.metadata(j) else Change.METADATA
