"""Which trees hold bad chunks, and which may be trusted again. All of it blocks."""

from __future__ import annotations

import os

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError
from imgfmt.tree import Tree
from transfer.cache.durable import read_file, remove_file, replace_file
from transfer.cache.layout import DomainPaths
from transfer.cache.owners import find_chunks, keys_of, read_object
from transfer.cache.records import Damage
from transfer.plan import U1, Numbers


def read_damage(paths: DomainPaths, digest: Digest) -> Damage | None:
    """The chunks of a tree that are known to be bad, if any are."""
    raw = read_file(paths.damage(digest))
    return None if raw is None else Damage.decode(raw, f"damage of tree {digest.short}")


def mark_damage(paths: DomainPaths, digests: U1) -> list[Digest]:
    """Mark every complete tree of the domain that has one of these chunks; returns them."""
    marked = []
    for digest in paths.listed("marks"):
        try:
            tree = read_object(paths, digest)
        except ImageError:
            continue
        if (find_chunks(paths, digest, tree, digests) >= 0).any():
            add_damage(paths, digest, chunks_with(tree, digests))
            marked.append(digest)
    return marked


def add_damage(paths: DomainPaths, digest: Digest, numbers: Numbers) -> None:
    """Say durably that these chunks of a tree are bad, beside those that were known."""
    known = read_damage(paths, digest)
    every = np.union1d(numbers, np.array(known.chunks if known else (), np.int64))
    damage = Damage(digest, tuple(every.tolist()))
    replace_file(paths.damage(digest), [damage.encode()], fsync=True)


def clear_damage(paths: DomainPaths, digest: Digest) -> None:
    """The tree is mended, durably."""
    remove_file(paths.damage(digest))


def chunks_with(tree: Tree, digests: U1) -> Numbers:
    """Numbers of all chunks of `tree` that have one of these digests."""
    candidate = np.flatnonzero(np.isin(keys_of(tree.chunk_digest), keys_of(digests)))
    wanted = {digest.tobytes() for digest in digests}
    hits = [i for i in candidate.tolist() if tree.chunk_digest[i].tobytes() in wanted]
    return np.array(hits, np.int64)


def damaged_trees(paths: DomainPaths) -> list[Digest]:
    """Complete trees of the domain that are marked."""
    return [digest for digest in paths.listed("damage") if os.path.exists(paths.mark(digest))]
