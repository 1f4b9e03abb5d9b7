"""What tests of the cache share: a cache on a disk, a small store, and processes that warm."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from imgfmt.digest import Digest
from tests.transfer.fixture_store import CONFIG, MIB, FixtureStore, Node, Nodes, noise
from transfer.cache.disks import NewDisk
from transfer.cache.evict import Watermarks
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.warm import WarmConfig, WarmReport, local_image, warm
from transfer.catalog import Catalog, open_catalog
from transfer.config import TransferConfig
from transfer.store.posix import PosixStore

SCOPE = "test"
NEVER = Watermarks(begin_free=0.0, end_free=0.0)
SMALL = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=6 * MIB, n_threads=3)
IN_FLIGHT_BYTES = SMALL.max_memory_bytes

_ROOT = Path(__file__).parents[3]


def config(*, fsync: bool = True, direct: bool = False) -> WarmConfig:
    """Small buffers, and no eviction by watermark."""
    transfer = TransferConfig(
        block_bytes=CONFIG.block_bytes,
        max_memory_bytes=CONFIG.max_memory_bytes,
        n_threads=4,
        fsync=fsync,
    )
    return WarmConfig(transfer=transfer, direct=direct, watermarks=NEVER)


@dataclass
class World:
    """A cache at `root` and a store beside it, in one security domain; `disks` are further ones."""

    root: Path
    store: FixtureStore
    disks: tuple[Path, ...] = ()
    cache: CacheRoot = field(init=False)
    paths: DomainPaths = field(init=False)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """As the next process finds it."""
        disks = [NewDisk(str(path)) for path in self.disks]
        self.cache = CacheRoot(str(self.root), allow_root_filesystem=True, disks=disks)
        uuid = self.store.catalog.record.uuid
        self.paths = self.cache.domain(uuid, SCOPE, self.store.store.url)

    def warm(self, image: Digest, **given: Any) -> WarmReport:
        """Warm an image in this process."""
        return asyncio.run(self.warming(image, **given))

    async def warming(
        self,
        image: Digest,
        *,
        catalog: Catalog | None = None,
        paths: DomainPaths | None = None,
        using: WarmConfig | None = None,
        **given: Any,
    ) -> WarmReport:
        """The same, to be awaited."""
        return await warm(
            self.cache,
            paths or self.paths,
            catalog or self.store.catalog,
            image,
            config=using or config(),
            facts={},
            **given,
        )

    def tree(self, image: Digest) -> Path:
        """The files of an image's only tree."""
        return Path(self.paths.tree(self.tree_of(image)))

    def tree_of_path(self, tree: Digest) -> Path:
        """The files of a tree."""
        return Path(self.paths.tree(tree))

    def tree_of_kept(self, image: Digest) -> Digest:
        """The only tree of an image that the cache knows."""
        return local_image(self.paths, image).members[0].tree

    def tree_of(self, image: Digest) -> Digest:
        """The only tree of an image of the store."""
        found = asyncio.run(self.store.catalog.image(image))
        return found.members[0].tree  # type: ignore[union-attr]


class CountingStore(PosixStore):
    """Writes down what it serves of packs: a line with the bytes of each read."""

    def __init__(self, root: str, log: Path, delay_s: float = 0.0) -> None:
        super().__init__(root)
        self._log = log
        self._delay_s = delay_s

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        if key.startswith("packs/"):
            with self._log.open("a") as log:
                log.write(f"{len(buffer)}\n")
            await asyncio.sleep(self._delay_s)
        await super().read_into(key, offset, buffer)


def served_bytes(log: Path) -> int:
    """Bytes of packs that all processes together were served."""
    return sum(map(int, log.read_text().split())) if log.exists() else 0


def warm_alone(cache: str, store: str, image: str, log: str, delay_s: float) -> None:
    """What a process does that `start` started."""

    async def work() -> None:
        backend = CountingStore(store, Path(log), delay_s)
        catalog = await open_catalog(backend)
        root = CacheRoot(cache, allow_root_filesystem=True)
        paths = root.domain(catalog.record.uuid, SCOPE, store)
        small = WarmConfig(transfer=SMALL, direct=False, watermarks=NEVER)
        digest = Digest(bytes.fromhex(image))
        await warm(root, paths, catalog, digest, config=small, facts={})
        backend.close()

    asyncio.run(work())


def start(world: World, image: Digest, log: Path, *, delay_s: float = 0.0) -> BaseProcess:
    """A process that warms an image. To be joined."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    given = str(world.root), str(world.store.root), image.hex, str(log), delay_s
    process = context.Process(target=warm_alone, args=given)
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    process.start()
    return process


def join(processes: Sequence[BaseProcess], timeout_s: float = 60.0) -> list[int | None]:
    """Exit codes of processes, when all have ended."""
    until_s = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, until_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def snapshot(seed: int, *, mib: int = 8, files: int = 20) -> Nodes:
    """A tree like a dump's: pages with holes, small files, links. Half of it is in all seeds."""
    same, own = noise(mib * MIB // 2, 1000), noise(mib * MIB // 2, seed)
    nodes = {
        b"pages-1.img": Node(same + bytes(MIB) + own + b"tail"),
        b"bin/run": Node(b"#!run", mode=0o4755),
        b"bin/link": Node(mode=0o777, target=b"run"),
        b"sub/again": Node(same_as=b"bin/run"),
        b"empty": Node(b""),
        b"sub/dir": Node(mode=0o500),
    }
    for i in range(files):
        nodes[b"core-%d.img" % i] = Node(noise(200 + i, seed * 1000 + i), mode=0o444)
    return nodes


def entry_count(folder: str) -> int:
    """Names in a folder."""
    return len(os.listdir(folder))
