"""Trees (SPEC.md 5.1): what the bytes of one directory are, never where they lie.

`build_tree` turns entries and the cuts of their files into canonical bytes; `Tree` is the checked
view of such bytes. All that grows with the number of chunks is a numpy column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt import wire
from imgfmt.chunking import Profile
from imgfmt.digest import DIGEST_BYTES, Digest, Octets, digest_of
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.tree_check import MAX_BYTES, check_tree

ROOT = 0

PEEK_BYTES = 4096
"""The beginning of a tree that holds its head."""

LAYOUT = wire.Layout(
    "tree",
    (
        wire.Column("parent", 4),
        wire.Column("type", 1),
        wire.Column("mode", 2),
        wire.Column("uid", 4),
        wire.Column("gid", 4),
        wire.Column("mtime_s", 8, signed=True),
        wire.Column("mtime_ns", 4),
        wire.Column("size", 8),
        wire.Column("group", 4),
        wire.Column("name_end", 4),
        wire.Column("names", 1),
        wire.Column("targets", 1),
        wire.Column("extent_count", 4),
        wire.Column("extent_chunks", 4),
        wire.Column("extent_hole_pages", 8),
        wire.Column("chunk_digest", DIGEST_BYTES),
        wire.Column("chunk_pages", 1),
        wire.Column("xattr_entry", 4),
        wire.Column("xattr_name_end", 4),
        wire.Column("xattr_value_end", 4),
        wire.Column("xattr_names", 1),
        wire.Column("xattr_values", 1),
    ),
)

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]


class EntryType(IntEnum):
    """What an entry is, as stored."""

    DIRECTORY = 0
    FILE = 1
    SYMLINK = 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One directory, file or symbolic link. Entries are in the order of SPEC.md 5.1.

    `group` is the index of the first entry of the hard-link group, the own index if alone.
    `size_bytes` is 0 for directories and for later names of a hard-linked file or link; `target` is
    that of the group.
    """

    parent: int
    name: bytes
    type: EntryType
    mode: int
    uid: int
    gid: int
    mtime_s: int
    mtime_ns: int
    size_bytes: int
    group: int
    target: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class FileContent:
    """The cuts of one file. Shapes: digests (n, 32) u1, chunk_pages (n,) integers, extents (m,)."""

    chunk_digest: U8
    chunk_pages: npt.NDArray[Any]
    extent_chunks: npt.NDArray[Any]
    extent_hole_pages: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class EncodedTree:
    """Canonical bytes of a tree, in pieces, and their digest."""

    pieces: list[Octets]
    digest: Digest
    zero_bytes: int

    @property
    def size_bytes(self) -> int:
        """Length of all pieces."""
        return sum(len(piece) for piece in self.pieces)


def build_tree(
    entries: Sequence[Entry], contents: Mapping[int, FileContent], profile: Profile
) -> EncodedTree:
    """Encode a tree. `contents` maps the index of each file that has bytes to its cuts.

    Raises InvalidInput for values that no column can hold. Nothing of chunk size is copied.
    """
    files = [contents[i] for i in sorted(contents)]
    counts = np.zeros(len(entries), dtype=np.uint32)
    for index, content in contents.items():
        counts[index] = len(content.extent_chunks)
    hole_pages = [content.extent_hole_pages for content in files]
    columns: dict[str, Any] = {
        **_entry_columns(entries),
        **_xattr_columns(entries),
        "extent_count": counts,
        "extent_chunks": [content.extent_chunks for content in files],
        "extent_hole_pages": hole_pages,
        "chunk_digest": [content.chunk_digest for content in files],
        "chunk_pages": [content.chunk_pages - 1 for content in files],
    }
    head: dict[str, Any] = {
        "page_bytes": profile.page_bytes,
        "profile": profile.name,
        "logical_bytes": sum(e.size_bytes for e in entries if e.type is EntryType.FILE),
        "zero_bytes": sum(_hole_bytes(entries[i], contents[i], profile) for i in contents),
    }
    if head["logical_bytes"] > MAX_BYTES:
        raise InvalidInput(f"files of {head['logical_bytes']} bytes are more than a tree can hold")
    pieces = wire.encode_table(LAYOUT, head, columns)
    return EncodedTree(pieces, digest_of(*pieces), head["zero_bytes"])


def _hole_bytes(entry: Entry, content: FileContent, profile: Profile) -> int:
    """Bytes of the file that lie in holes; a hole that ends the file may be short."""
    total = int(content.extent_hole_pages.sum()) * profile.page_bytes
    if len(content.extent_hole_pages) and content.extent_hole_pages[-1]:
        total -= -entry.size_bytes % profile.page_bytes
    return total


def _entry_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    integers = {
        "parent": ("u4", [e.parent for e in entries]),
        "type": ("u1", [int(e.type) for e in entries]),
        "mode": ("u2", [e.mode for e in entries]),
        "uid": ("u4", [e.uid for e in entries]),
        "gid": ("u4", [e.gid for e in entries]),
        "mtime_s": ("i8", [e.mtime_s for e in entries]),
        "mtime_ns": ("u4", [e.mtime_ns for e in entries]),
        "size": ("u8", [e.size_bytes for e in entries]),
        "group": ("u4", [e.group for e in entries]),
        "name_end": ("u4", list(accumulate(len(e.name) for e in entries))),
    }
    return {
        **{name: _integers(name, dtype, values) for name, (dtype, values) in integers.items()},
        "names": _blob([e.name for e in entries]),
        "targets": _blob([e.target for i, e in enumerate(entries) if e.group == i]),
    }


def _xattr_columns(entries: Sequence[Entry]) -> dict[str, Any]:
    rows = [(i, name, value) for i, e in enumerate(entries) for name, value in e.xattrs]
    name_end = list(accumulate(len(name) for _, name, _ in rows))
    value_end = list(accumulate(len(value) for _, _, value in rows))
    return {
        "xattr_entry": np.array([i for i, _, _ in rows], dtype="<u4"),
        "xattr_name_end": _integers("xattr_name_end", "u4", name_end),
        "xattr_value_end": _integers("xattr_value_end", "u4", value_end),
        "xattr_names": _blob([name for _, name, _ in rows]),
        "xattr_values": _blob([value for _, _, value in rows]),
    }


def _integers(name: str, dtype: str, values: list[int]) -> npt.NDArray[Any]:
    limits = np.iinfo(dtype)
    if values and not limits.min <= min(values) <= max(values) <= limits.max:
        raise InvalidInput(f"an entry's {name} is not from {limits.min} to {limits.max}")
    return np.array(values, dtype=f"<{dtype}")


def _blob(parts: Sequence[bytes]) -> U8:
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


class Tree:
    """A checked tree. Columns are views of `raw`, the bytes it was made from.

    Raises InvalidImage (breaks SPEC.md), Unsupported (newer version or profile).
    """

    def __init__(self, raw: Octets, what: str) -> None:
        table = wire.decode_table(raw, LAYOUT, what)
        head = table.head
        self.raw = raw
        self.what = what
        self.columns = table.columns
        self.profile = _profile(head)
        self.logical_bytes = head.integer("logical_bytes")
        self.zero_bytes = head.integer("zero_bytes")
        head.done()
        check_tree(table, self.profile, self.logical_bytes, self.zero_bytes)

    @property
    def n_entries(self) -> int:
        """Entries, the root included."""
        return len(self.columns["parent"])

    @property
    def n_chunks(self) -> int:
        """Chunks of all files, repeated ones counted each time."""
        return len(self.columns["chunk_pages"])

    @property
    def chunk_digest(self) -> U8:
        """Shape (n_chunks, 32)."""
        return self.columns["chunk_digest"]

    @cached_property
    def _name_start(self) -> npt.NDArray[Any]:
        return np.concatenate([[0], self.columns["name_end"][:-1]])

    def name(self, index: int) -> bytes:
        """Name of one entry; empty for the root."""
        start, end = int(self._name_start[index]), int(self.columns["name_end"][index])
        return self.columns["names"][start:end].tobytes()

    def path(self, index: int) -> bytes:
        """Path of one entry below the root, joined by `/`; empty for the root."""
        parts: list[bytes] = []
        while index != ROOT:
            parts.append(self.name(index))
            index = int(self.columns["parent"][index])
        return b"/".join(reversed(parts))

    def paths(self) -> list[bytes]:
        """Paths of all entries, in entry order."""
        result: list[bytes] = [b""]
        parents = self.columns["parent"].tolist()
        for index in range(1, self.n_entries):
            above = result[parents[index]]
            result.append(above + b"/" + self.name(index) if above else self.name(index))
        return result

    @cached_property
    def _target_end(self) -> U64:
        links = self.columns["type"] == EntryType.SYMLINK
        return np.cumsum(np.where(links, self.columns["size"], 0), dtype=np.uint64)

    def entry(self, index: int) -> Entry:
        """One entry with everything but its content."""
        column = {name: self.columns[name][index].item() for name in _SCALARS}
        kind = EntryType(column["type"])
        target = b""
        if kind is EntryType.SYMLINK:
            end = int(self._target_end[column["group"]])
            begin = end - int(self.columns["size"][column["group"]])
            target = self.columns["targets"][begin:end].tobytes()
        return Entry(
            parent=column["parent"], name=self.name(index), type=kind, mode=column["mode"],
            uid=column["uid"], gid=column["gid"], mtime_s=column["mtime_s"],
            mtime_ns=column["mtime_ns"], size_bytes=column["size"], group=column["group"],
            target=target, xattrs=self._xattrs(index),
        )  # fmt: skip

    def entries(self) -> Iterator[Entry]:
        """All entries in order."""
        return (self.entry(index) for index in range(self.n_entries))

    def _xattrs(self, index: int) -> tuple[tuple[bytes, bytes], ...]:
        first, last = np.searchsorted(self.columns["xattr_entry"], [index, index + 1]).tolist()
        names, values = self.columns["xattr_names"], self.columns["xattr_values"]
        name_end, value_end = self.columns["xattr_name_end"], self.columns["xattr_value_end"]
        return tuple(
            (
                names[int(name_end[i - 1]) if i else 0 : int(name_end[i])].tobytes(),
                values[int(value_end[i - 1]) if i else 0 : int(value_end[i])].tobytes(),
            )
            for i in range(first, last)
        )

    @cached_property
    def _extent_end(self) -> U64:
        return np.cumsum(self.columns["extent_count"], dtype=np.uint64)

    @cached_property
    def _chunk_end_of_extent(self) -> U64:
        return np.cumsum(self.columns["extent_chunks"], dtype=np.uint64)

    def chunk_range(self, index: int) -> tuple[int, int]:
        """Numbers [first, end) of the chunks of one file; empty for other entries."""
        last = int(self._extent_end[index])
        first = last - int(self.columns["extent_count"][index])
        ends = self._chunk_end_of_extent
        return (int(ends[first - 1]) if first else 0, int(ends[last - 1]) if last else 0)

    @cached_property
    def chunk_entry(self) -> npt.NDArray[np.uint32]:
        """Which entry each chunk belongs to, shape (n_chunks,)."""
        of_extent = np.repeat(
            np.arange(self.n_entries, dtype=np.uint32), self.columns["extent_count"]
        )
        return np.repeat(of_extent, self.columns["extent_chunks"])

    @cached_property
    def chunk_offset(self) -> U64:
        """Byte offset of each chunk in its file, shape (n_chunks,)."""
        pages = self.columns["chunk_pages"].astype(np.uint64) + 1
        extent_chunks, holes = self.columns["extent_chunks"], self.columns["extent_hole_pages"]
        before_extent = np.cumsum(holes) - holes
        start = np.cumsum(pages) - pages + np.repeat(before_extent, extent_chunks)
        del pages
        file_pages = (self.columns["size"] + self.profile.page_bytes - 1) // self.profile.page_bytes
        file_pages[self.columns["type"] != EntryType.FILE] = 0
        start -= (np.cumsum(file_pages) - file_pages)[self.chunk_entry]
        result: U64 = start * np.uint64(self.profile.page_bytes)
        return result

    @cached_property
    def chunk_bytes(self) -> npt.NDArray[np.uint32]:
        """Plain bytes of each chunk, shape (n_chunks,); a chunk that ends its file may be short."""
        full = (self.columns["chunk_pages"].astype(np.uint32) + 1) * np.uint32(
            self.profile.page_bytes
        )
        last = np.flatnonzero(np.diff(self.chunk_entry, append=self.n_entries))
        sizes = self.columns["size"][self.chunk_entry[last]]
        full[last] = np.minimum(full[last], sizes - self.chunk_offset[last])
        return full


def _profile(head: wire.Fields) -> Profile:
    try:
        return Profile(head.integer("page_bytes", 1, 2**20), head.text("profile"))
    except InvalidInput as error:
        raise InvalidImage(f"{head.what}: {error}") from None
    except Unsupported as error:
        raise Unsupported(f"{head.what}: {error}") from None


def peek_totals(beginning: Octets, what: str) -> tuple[int, int]:
    """Logical and zero bytes that a tree claims, from its first `PEEK_BYTES`. Not verified."""
    head = wire.peek_head(beginning, LAYOUT, what)
    return head.integer("logical_bytes"), head.integer("zero_bytes")


_SCALARS = ("parent", "type", "mode", "uid", "gid", "mtime_s", "mtime_ns", "size", "group")
