"""The structural rules of a tree (SPEC.md 5.1), checked on its columns before anyone uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt.chunking import Profile
from imgfmt.wire import Fields, Table

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4095
MAX_XATTR_VALUE_BYTES = 65_536
XATTR_PREFIX = b"user."
XATTR_NAMES = (b"security.capability", b"system.posix_acl_access", b"system.posix_acl_default")
MAX_BYTES = 2**63 - 1
"""Of all files together, and so of one."""

_DIRECTORY, _FILE, _SYMLINK = 0, 1, 2
_MAX_PAGES = 2**51

Columns = dict[str, npt.NDArray[Any]]


def xattr_is_stored(name: bytes) -> bool:
    """Whether a tree may hold the extended attribute `name`."""
    return name in XATTR_NAMES or (name.startswith(XATTR_PREFIX) and len(name) > len(XATTR_PREFIX))


def check_tree(table: Table, profile: Profile, logical_bytes: int, zero_bytes: int) -> None:
    """Raise InvalidImage if the columns are not those of a valid tree."""
    columns, head = table.columns, table.head
    _check_lengths(columns, head)
    _check_entries(columns, head)
    _check_names(columns, head)
    _check_links(columns, head)
    _check_groups(columns, head)
    _check_extents(columns, head, profile, zero_bytes)
    _check_xattrs(columns, head)
    if int(columns["size"][columns["type"] == _FILE].astype(object).sum()) != logical_bytes:
        head.fail("its logical_bytes are not the sum of its files")


def _check_lengths(columns: Columns, head: Fields) -> None:
    per_entry = ("type", "mode", "uid", "gid", "mtime_s", "mtime_ns", "size", "group", "name_end",
                 "extent_count")  # fmt: skip
    n_entries = len(columns["parent"])
    if not 1 <= n_entries < 2**32 or any(len(columns[name]) != n_entries for name in per_entry):
        head.fail("its entry columns have different lengths or none")
    for first, second in (
        ("extent_chunks", "extent_hole_pages"),
        ("chunk_digest", "chunk_pages"),
        ("xattr_entry", "xattr_name_end"),
        ("xattr_entry", "xattr_value_end"),
    ):
        if len(columns[first]) != len(columns[second]) or len(columns[first]) >= 2**32:
            head.fail(f"columns {first!r} and {second!r} have different lengths")


def _check_entries(columns: Columns, head: Fields) -> None:
    parent, kind = columns["parent"], columns["type"]
    if parent[0] != 0 or kind[0] != _DIRECTORY:
        head.fail("entry 0 is not a root directory")
    if (kind > _SYMLINK).any():
        head.fail("an entry has an unknown type")
    if (parent[1:] >= np.arange(1, len(parent), dtype=np.uint32)).any():
        head.fail("an entry comes before its directory")
    if (parent[1:-1] > parent[2:]).any():
        head.fail("entries are not in order of their directories")
    if (kind[parent] != _DIRECTORY).any():
        head.fail("an entry lies beneath something that is not a directory")
    if (columns["mode"] > 0o7777).any() or (columns["mtime_ns"] > 999_999_999).any():
        head.fail("an entry has a mode or time out of range")
    if (columns["size"] > MAX_BYTES).any() or columns["size"][kind == _DIRECTORY].any():
        head.fail("an entry has a size out of range")


def _check_names(columns: Columns, head: Fields) -> None:
    ends, blob = columns["name_end"], columns["names"]
    _check_ends(ends, len(blob), "name", head)
    lengths = np.diff(ends, prepend=np.uint32(0))
    if lengths[0] or (lengths[1:] == 0).any() or (lengths > MAX_NAME_BYTES).any():
        head.fail(f"a name is empty or longer than {MAX_NAME_BYTES} bytes")
    if ((blob == 0) | (blob == ord("/"))).any():
        head.fail("a name holds NUL or '/'")
    names = blob.tobytes()
    parents = columns["parent"].tolist()
    path_bytes = [0] * len(parents)
    start, before = 0, b""
    for index, end in enumerate(ends.tolist()):
        name = names[start:end]
        if name in (b".", b".."):
            head.fail(f"a name is {name.decode()!r}")
        if index > 1 and parents[index] == parents[index - 1] and name <= before:
            head.fail(f"name {name!r} is a duplicate or not in order")
        path_bytes[index] = path_bytes[parents[index]] + len(name) + 1 if index else 0
        if path_bytes[index] > MAX_PATH_BYTES + 1:
            head.fail(f"a path is longer than {MAX_PATH_BYTES} bytes")
        start, before = end, name


def _check_ends(ends: npt.NDArray[Any], total_bytes: int, what: str, head: Fields) -> None:
    if (ends[:-1] > ends[1:]).any() or (int(ends[-1]) if len(ends) else 0) != total_bytes:
        head.fail(f"its {what} ends do not fit")


def _check_links(columns: Columns, head: Fields) -> None:
    first = columns["group"] == np.arange(len(columns["group"]), dtype=np.uint32)
    sizes = columns["size"][(columns["type"] == _SYMLINK) & first]
    if (
        (sizes == 0).any()
        or (sizes > MAX_PATH_BYTES).any()
        or sizes.sum() != len(columns["targets"])
    ):
        head.fail("the targets of its symbolic links do not fit")
    if (columns["targets"] == 0).any():
        head.fail("the target of a symbolic link holds NUL")


def _check_groups(columns: Columns, head: Fields) -> None:
    group, own = columns["group"], np.arange(len(columns["group"]), dtype=np.uint32)
    if (group > own).any():
        head.fail("a hard link comes before its first name")
    later = np.flatnonzero(group != own)
    first = group[later]
    kinds = columns["type"][later]
    if (kinds == _DIRECTORY).any() or (kinds != columns["type"][first]).any():
        head.fail("a hard link is a directory, or of another type than its first name")
    if (group[first] != first).any():
        head.fail("a hard link names another hard link")
    if columns["size"][later].any() or columns["extent_count"][later].any():
        head.fail("a later name of a hard link has content of its own")
    for name in ("mode", "uid", "gid", "mtime_s", "mtime_ns"):
        if (columns[name][later] != columns[name][first]).any():
            head.fail(f"names of one hard link differ in {name}")
    if np.isin(columns["xattr_entry"], later).any():
        head.fail("a later name of a hard link has extended attributes")


def _check_extents(columns: Columns, head: Fields, profile: Profile, zero_bytes: int) -> None:
    counts, sizes, is_file = columns["extent_count"], columns["size"], columns["type"] == _FILE
    chunks, holes = columns["extent_chunks"], columns["extent_hole_pages"]
    if ((counts > 0) != (is_file & (sizes > 0))).any():
        head.fail("a file without bytes has extents, or one with bytes has none")
    if int(counts.sum(dtype=np.uint64)) != len(chunks):
        head.fail("its files have more or fewer extents than there are")
    if int(chunks.sum(dtype=np.uint64)) != len(columns["chunk_pages"]):
        head.fail("its extents have more or fewer chunks than there are")
    if (columns["chunk_pages"] >= profile.max_pages).any():
        head.fail("a chunk is longer than its profile allows")
    filled = np.flatnonzero(counts)
    ends = np.cumsum(counts[filled], dtype=np.int64)
    begins = ends - counts[filled]
    inner = np.ones(len(chunks), dtype=np.bool_)
    inner[begins] = False
    if (inner & (chunks == 0)).any() or ((chunks == 0) & (holes == 0)).any():
        head.fail("an extent that is not the first has no chunks")
    inner[:] = True
    inner[ends - 1] = False
    if (inner & (holes == 0)).any() or (holes > _MAX_PAGES).any():
        head.fail("an extent has a hole of no or too many pages")
    if holes.sum(dtype=np.float64) > _MAX_PAGES:
        head.fail("its holes have too many pages")
    pages_before = np.zeros(len(columns["chunk_pages"]) + 1, dtype=np.int64)
    np.cumsum(columns["chunk_pages"], dtype=np.int64, out=pages_before[1:])
    pages_before += np.arange(len(pages_before))
    chunk_end = np.cumsum(chunks, dtype=np.int64)
    extent_pages = (
        pages_before[chunk_end] - pages_before[chunk_end - chunks] + holes.astype(np.int64)
    )
    total = np.concatenate([[0], np.cumsum(extent_pages)])
    wanted = -(-sizes[filled].astype(np.int64) // profile.page_bytes)
    if (total[ends] - total[begins] != wanted).any():
        head.fail("the extents of a file do not add up to its size")
    short = -sizes[filled].astype(np.int64) % profile.page_bytes
    ends_in_hole = holes[ends - 1] > 0
    found = int(holes.sum(dtype=np.uint64)) * profile.page_bytes - int(short[ends_in_hole].sum())
    if found != zero_bytes:
        head.fail("its zero_bytes are not the sum of its holes")


def _check_xattrs(columns: Columns, head: Fields) -> None:
    entry, names, values = columns["xattr_entry"], columns["xattr_names"], columns["xattr_values"]
    if (entry[:-1] > entry[1:]).any() or (entry >= len(columns["parent"])).any():
        head.fail("its extended attributes are not in order of entries")
    _check_ends(columns["xattr_name_end"], len(names), "xattr name", head)
    _check_ends(columns["xattr_value_end"], len(values), "xattr value", head)
    lengths = np.diff(columns["xattr_value_end"], prepend=np.uint32(0))
    if (lengths > MAX_XATTR_VALUE_BYTES).any():
        head.fail(f"an extended attribute is longer than {MAX_XATTR_VALUE_BYTES} bytes")
    start, before, owner_before = 0, b"", -1
    for owner, end in zip(entry.tolist(), columns["xattr_name_end"].tolist(), strict=True):
        name = names[start:end].tobytes()
        if len(name) > MAX_NAME_BYTES or 0 in name or not xattr_is_stored(name):
            head.fail(f"extended attribute {name[:40]!r} is not one that is stored")
        if owner == owner_before and name <= before:
            head.fail(f"extended attribute {name!r} is a duplicate or not in order")
        start, before, owner_before = end, name, owner
