"""Reading the cache back from the disk, and mending what is bad from the stores it came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, ImageError
from transfer.cache.damage import damaged_trees
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.locks import lock
from transfer.cache.owners import read_mark
from transfer.cache.places import missing_part
from transfer.cache.repair import find_damage, mend
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.threads import Threads

OpenStore = Callable[[str], AbstractAsyncContextManager[Catalog]]


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What was read, and what was found. `wrong` are paths of trees that were not as they must be.

    `marked` are all trees that have a bad chunk, `mended` those that are sound again, `problems`
    are reasons why something was not read or mended.
    """

    trees: int
    n_bytes: int
    wrong: tuple[tuple[Digest, bytes], ...]
    marked: tuple[Digest, ...]
    mended: tuple[Digest, ...]
    problems: tuple[str, ...]
    left: int

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged any more."""
        return not self.left


async def scrub(
    cache: CacheRoot,
    wanted: Sequence[tuple[DomainPaths, Digest]] | None,
    config: TransferConfig,
    *,
    open_store: OpenStore | None,
    bytes_per_s: float = 0.0,
) -> ScrubReport:
    """Check these trees, or all; mend by stores that `open_store` opens by URL, unless it is None.

    Never blocks a mount: a tree is read while others use it. With `bytes_per_s` it rests after
    each tree so that it reads no more than that on average.
    """
    if wanted is None:
        wanted = [(p, tree) for p, _ in cache.domains() for tree in p.listed("marks")]
    n_bytes, n_trees = 0, 0
    wrong: list[tuple[Digest, bytes]] = []
    marked: set[Digest] = set()
    problems: list[str] = []
    broken: set[tuple[str, Digest]] = set()
    with Threads("scrub", config.n_threads) as threads:
        for paths, tree in dict.fromkeys(wanted):
            found = await _check(paths, tree, threads, problems)
            if found is None:
                continue
            n_trees, n_bytes = n_trees + 1, n_bytes + found.n_bytes
            wrong += [(tree, path) for path in found.wrong]
            marked.update(found.marked)
            if found.wrong and not found.marked:  # its object or a part is lost
                broken.add((paths.name, tree))
            if bytes_per_s:
                await asyncio.sleep(found.n_bytes / bytes_per_s)
        mended, left = await _mend_all(cache, open_store, threads, config, problems)
    return ScrubReport(
        n_trees,
        n_bytes,
        tuple(wrong),
        tuple(sorted(marked)),
        tuple(mended),
        tuple(problems),
        left + len(broken),
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    n_bytes: int
    wrong: list[bytes]
    marked: list[Digest]


async def _check(
    paths: DomainPaths, tree: Digest, threads: Threads, problems: list[str]
) -> _Checked | None:
    held = await threads.run(lock, paths.lock(tree), shared=True, wait=False)
    if held is None:
        problems.append(f"tree {tree.short} is being built or removed, and was not read")
        return None
    with held:
        mark = await threads.run(read_mark, paths, tree)
        if mark is None:
            return None
        if missing := await threads.run(missing_part, paths, mark):
            problems.append(f"tree {tree.short} {missing}; `snapcask prefetch` builds it again")
            return _Checked(0, [b""], [])
        try:
            wrong, marked = await find_damage(paths, tree, threads)
        except CorruptData as error:
            problems.append(str(error))
            return _Checked(0, [b""], [])
    return _Checked(mark.data_bytes, wrong, marked)


async def _mend_all(
    cache: CacheRoot,
    open_store: OpenStore | None,
    threads: Threads,
    config: TransferConfig,
    problems: list[str],
) -> tuple[list[Digest], int]:
    """Mend what is marked; returns the trees that are sound again, and how many are not."""
    mended: list[Digest] = []
    left = 0
    for paths, record in cache.domains():
        damaged = await threads.run(damaged_trees, paths)
        if open_store is not None and damaged:
            mended += await _mend(paths, damaged, record.url, open_store, threads, config, problems)
        left += len(await threads.run(damaged_trees, paths))
    return mended, left


async def _mend(
    paths: DomainPaths,
    damaged: Sequence[Digest],
    url: str,
    open_store: OpenStore,
    threads: Threads,
    config: TransferConfig,
    problems: list[str],
) -> list[Digest]:
    try:
        async with open_store(url) as catalog:
            found = await mend(paths, damaged, catalog, threads, config)
    except ImageError as error:
        problems.append(f"not mended: {error}")
        found = await mend(paths, damaged, None, threads, config)
    problems += [f"tree {tree.short} was not mended: {why}" for tree, why in found.failed.items()]
    return found.sound
