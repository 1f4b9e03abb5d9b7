"""What tests of a cache on several disks share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from imgfmt.digest import Digest
from tests.filesystems import Disk, run
from tests.transfer.cache.support import World
from tests.transfer.fixture_store import MIB, FixtureStore, Node, Nodes, contents, noise
from transfer.cache.publish import mount_image, unmount_image


def world_on(disks: list[Disk], store: FixtureStore) -> World:
    """A cache on the first disk that uses the others too."""
    return World(disks[0].root / "cache", store, tuple(d.root / "part" for d in disks[1:]))


def pages(seed: int, *, files: int = 6, mib: int = 4, own: int = 6) -> Nodes:
    """Page files, the first `own` of them in this tree only; small files, links, directories."""
    nodes: dict[bytes, Node] = {
        b"deep/er/pages-%d.img" % i: Node(noise(mib * MIB, seed * 100 + i if i < own else i))
        for i in range(files)
    }
    nodes[b"deep/er/same.img"] = Node(same_as=b"deep/er/pages-0.img")
    nodes[b"elsewhere/a/b/again.img"] = Node(same_as=b"deep/er/pages-0.img")
    nodes[b"link"] = Node(mode=0o777, target=b"deep/er/pages-0.img")
    nodes[b"empty"] = Node(b"")
    nodes[b"shut"] = Node(mode=0o500)
    for i in range(10):
        nodes[b"core-%d.img" % i] = Node(noise(300 + i, seed * 1000 + i), mode=0o444)
    return nodes


def parts(world: World, image: Digest) -> list[set[bytes]]:
    """Paths of the files that lie on each disk, the main one first."""
    tree = world.tree_of(image)
    roots = [world.paths, *(world.paths.on(disk) for disk in world.cache.disks)]
    return [_files(root.tree(tree)) for root in roots]


def _files(folder: str) -> set[bytes]:
    found = set()
    for above, _, names in os.walk(os.fsencode(folder)):
        found |= {os.path.relpath(os.path.join(above, n), os.fsencode(folder)) for n in names}
    return found


def seen(world: World, image: Digest) -> dict[bytes, bytes | None]:
    """What a mount of an image has."""
    with tempfile.TemporaryDirectory() as at:
        mount_image(world.cache, world.paths, image, at)
        try:
            return contents(at)
        finally:
            unmount_image(world.cache, at)


def path_of(world: World, image: Digest, name: bytes) -> Path:
    """Where a file of an image lies."""
    tree = world.tree_of(image)
    roots = [world.paths, *(world.paths.on(disk) for disk in world.cache.disks)]
    (found,) = (
        path for root in roots
        if (path := Path(root.tree(tree)) / os.fsdecode(name)).exists()
    )  # fmt: skip
    return found


def hide(disk: Disk) -> None:
    """Mount something over a disk."""
    run("mount", "-t", "tmpfs", "tmpfs", disk.root)
