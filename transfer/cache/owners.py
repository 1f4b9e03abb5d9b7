"""Which local trees own which chunks, so that a new tree need not fetch them.

An owners table has a tree's chunks by the first 8 bytes of their digests, and is searched mapped.
It is a hint: the whole digest is compared with the tree object's before a chunk is taken.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgfmt.digest import DIGEST_BYTES, Digest, Octets, digest_of
from imgfmt.errors import CorruptData, ImageError
from imgfmt.tree import Tree
from imgfmt.wire import Column, Layout, decode_table, encode_table
from transfer.cache.durable import read_file, replace_file
from transfer.cache.layout import DomainPaths
from transfer.cache.locks import Lock, lock
from transfer.cache.places import Places, missing_part, read_places
from transfer.cache.records import Mark
from transfer.plan import U1, Numbers

OWNERS = Layout("cache-owners", (Column("key", 8), Column("chunk", 4)))
ABSENT = -1

Keys = npt.NDArray[np.uint64]


def keys_of(digests: U1) -> Keys:
    """The first 8 bytes of each digest, shape (n,)."""
    if not len(digests):
        return np.zeros(0, np.uint64)
    keys: Keys = np.ascontiguousarray(digests[:, :8]).view("<u8").reshape(-1)
    return keys


def write_object(paths: DomainPaths, digest: Digest, raw: Octets) -> None:
    """Keep a tree object and its owners table. Not synced here."""
    replace_file(paths.object(digest), [raw], fsync=False)
    if not os.path.exists(paths.owners(digest)):
        _write_owners(paths, digest, Tree(raw, f"tree {digest.short}"))


def read_object(paths: DomainPaths, digest: Digest) -> Tree:
    """A tree that was kept. Raises CorruptData if it is lost or damaged."""
    path = paths.object(digest)
    try:
        raw = _mapped(path)
    except FileNotFoundError:
        raise CorruptData(f"tree {digest.short} of the cache has lost its object") from None
    if digest_of(raw) != digest:
        raise CorruptData(f"tree object {path} does not have its digest; remove it and warm again")
    return Tree(raw, f"tree {digest.short} of the cache")


def read_mark(paths: DomainPaths, digest: Digest) -> Mark | None:
    """What says that a tree is complete, if it is there."""
    raw = read_file(paths.mark(digest))
    return None if raw is None else Mark.decode(raw, f"mark of tree {digest.short} of the cache")


def is_sound(paths: DomainPaths, digest: Digest, session: bytes) -> bool:
    """Whether a tree is complete, may be trusted in this session, and has no known damage.

    `session` is that of the main disk.
    """
    mark = read_mark(paths, digest)
    if mark is None:
        return False
    if not mark.synced and mark.session != paths.disks.session(session, mark.disks):
        return False
    return not missing_part(paths, mark) and not os.path.exists(paths.damage(digest))


@dataclass(frozen=True, slots=True, eq=False)
class Donor:
    """A complete tree that may be shared from while `lock` is held: items of `numbers` that it has.

    Item `i` of `wanted` is chunk `chunk[i]` of `tree`.
    """

    digest: Digest
    tree: Tree
    lock: Lock
    wanted: Numbers
    chunk: Numbers
    places: Places


def find_donors(
    paths: DomainPaths, session: bytes, digests: U1, *, but: frozenset[Digest]
) -> list[Donor]:
    """Trees that together have what can be had of these digests, each item from one tree only.

    Those with most of them come first. Trees of `but` are left out. The locks are the caller's.
    """
    keys = keys_of(digests)
    counted = []
    for digest in paths.listed("marks"):
        if digest in but:
            continue
        count = int((_search(*_owners(paths, digest), keys) != ABSENT).sum())
        if count:
            counted.append((count, digest))
    left = np.ones(len(keys), np.bool_)
    donors: list[Donor] = []
    for _, digest in sorted(counted, key=lambda item: -item[0]):
        wanted = np.flatnonzero(left)
        if len(wanted) and (donor := _donor(paths, session, digest, digests, wanted)):
            left[donor.wanted] = False
            donors.append(donor)
    return donors


def _donor(
    paths: DomainPaths, session: bytes, digest: Digest, digests: U1, wanted: Numbers
) -> Donor | None:
    held = lock(paths.lock(digest), shared=True, wait=False)
    if held is None:
        return None
    try:
        if is_sound(paths, digest, session):
            tree = read_object(paths, digest)
            chunk = find_chunks(paths, digest, tree, digests[wanted])
            has = chunk != ABSENT
            if has.any():
                places = read_places(paths, digest, tree)
                return Donor(digest, tree, held, wanted[has], chunk[has], places)
    except ImageError:
        pass  # its object or record is damaged, which `cache verify` tells
    except BaseException:
        held.close()
        raise
    held.close()
    return None


def find_chunks(paths: DomainPaths, digest: Digest, tree: Tree, digests: U1) -> Numbers:
    """For each digest the number of a chunk of `tree` that has it, or ABSENT."""
    found = _search(*_owners(paths, digest), keys_of(digests))
    found[found >= tree.n_chunks] = ABSENT
    candidate = np.flatnonzero(found != ABSENT)
    same = (tree.chunk_digest[found[candidate]] == digests[candidate]).all(axis=1)
    found[candidate[~same]] = ABSENT
    return found


def _search(owned: Keys, chunks: npt.NDArray[np.uint32], keys: Keys) -> Numbers:
    """For each key the number of the first chunk that has it, or ABSENT."""
    if not len(owned):
        return np.full(len(keys), ABSENT, np.int64)
    place = np.minimum(np.searchsorted(owned, keys), len(owned) - 1)
    result: Numbers = np.where(owned[place] == keys, chunks[place].astype(np.int64), ABSENT)
    return result


def _owners(paths: DomainPaths, digest: Digest) -> tuple[Keys, npt.NDArray[np.uint32]]:
    """The owners table of a tree, made again from its object where it can't be read."""
    empty = np.zeros(0, np.uint64), np.zeros(0, np.uint32)
    for attempt in range(2):
        try:
            table = decode_table(_mapped(paths.owners(digest)), OWNERS, "owners table")
            if table.head.raw("tree", DIGEST_BYTES) == digest.raw:
                return table.columns["key"], table.columns["chunk"]
        except (OSError, ImageError):
            pass
        if attempt:
            break
        try:
            _write_owners(paths, digest, read_object(paths, digest))
        except (OSError, ImageError):
            break
    return empty


def _write_owners(paths: DomainPaths, digest: Digest, tree: Tree) -> None:
    keys = keys_of(tree.chunk_digest)
    order = np.argsort(keys, kind="stable")
    columns = {"key": keys[order], "chunk": order.astype("u4")}
    pieces = encode_table(OWNERS, {"tree": digest.raw}, columns)
    replace_file(paths.owners(digest), pieces, fsync=False)


def _mapped(path: str) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = os.fstat(descriptor).st_size
        if not length:
            return memoryview(b"")
        return memoryview(mmap.mmap(descriptor, length, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
