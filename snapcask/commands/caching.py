"""What the verbs of `snapcask cache` do and print."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from imgfmt.digest import Digest
from snapcask import render
from snapcask.caches import CacheOptions, find_cached
from snapcask.running import run
from snapcask.stores import opened, transfer_config
from transfer.cache.disks import forget_disk
from transfer.cache.evict import (
    Evicted,
    Watermarks,
    apply_watermarks,
    evict_all,
    forget_images,
    remove_image,
)
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.listing import CachedDisk, CachedTree, CacheListing, trees_of
from transfer.cache.scrub import ScrubReport, scrub
from transfer.cache.usage import add_pin, new_pin, remove_pin


def pin_image(
    options: CacheOptions, reference: str, store: str | None, pin_id: str
) -> list[Digest]:
    """Pin the trees of an image; returns them."""
    cache = options.open()
    pinned = []
    for paths, image in run(find_cached(cache, reference, store)):
        for tree in trees_of(paths, image):
            add_pin(paths, tree, pin_id, new_pin(reference), fsync=True)
            pinned.append(tree)
    return pinned


def unpin_image(
    options: CacheOptions, reference: str, store: str | None, pin_id: str
) -> list[Digest]:
    """Undo `pin_image`; returns the trees that were pinned."""
    cache = options.open()
    found = run(find_cached(cache, reference, store))
    return [
        tree
        for paths, image in found
        for tree in trees_of(paths, image)
        if remove_pin(paths, tree, pin_id)
    ]


def remove_cached(options: CacheOptions, reference: str, store: str | None) -> list[Evicted]:
    """Remove an image, and its trees that no other image has and nothing needs."""
    cache = options.open()
    removed: list[Evicted] = []
    for paths, image in run(find_cached(cache, reference, store)):
        others = {t for i in paths.listed("images") if i != image for t in trees_of(paths, i)}
        own = frozenset(trees_of(paths, image)) - others
        removed += remove_image(cache, paths, image, own)
    return removed


def forget_disk_of(options: CacheOptions, path: str) -> None:
    """Take a disk out of the cache."""
    forget_disk(options.open().path, path)


def prune_cache(options: CacheOptions, marks: Watermarks, *, everything: bool) -> list[Evicted]:
    """Evict by watermarks, or all that may go."""
    cache = options.open()
    evicted = evict_all(cache) if everything else apply_watermarks(cache, marks)
    forget_images(cache, trees_of)
    return evicted


def verify_cached(
    options: CacheOptions, references: Sequence[str], store: str | None, *, mend: bool
) -> ScrubReport:
    """Read trees back, and mend them from the stores of their domains."""
    return run(_verify(options.open(), references, store, mend=mend))


async def _verify(
    cache: CacheRoot, references: Sequence[str], store: str | None, *, mend: bool
) -> ScrubReport:
    wanted: list[tuple[DomainPaths, Digest]] | None = None
    if references:
        wanted = []
        for reference in references:
            found = await find_cached(cache, reference, store)
            wanted += [(paths, t) for paths, image in found for t in trees_of(paths, image)]
    return await scrub(cache, wanted, transfer_config(None), open_store=opened if mend else None)


def print_trees(did: str, trees: Iterable[Digest], *, as_json: bool, quiet: bool) -> None:
    """Print the trees that a verb changed."""
    names = [str(tree) for tree in trees]
    if as_json:
        render.print_json({did: names})
    elif not quiet:
        render.print_lines(names)


def print_evicted(evicted: Sequence[Evicted], *, as_json: bool, quiet: bool) -> None:
    """Print what was removed."""
    if as_json:
        rows = [
            {"tree": str(e.tree), "domain": e.domain, "freed_bytes": e.freed_bytes,
             "partial": e.partial}
            for e in evicted
        ]  # fmt: skip
        freed = sum(e.freed_bytes for e in evicted)
        render.print_json({"removed": rows, "freed_bytes": freed})
    elif not quiet:
        render.print_lines(f"{e.tree} {render.human_bytes(e.freed_bytes)}" for e in evicted)


def print_verified(report: ScrubReport, *, as_json: bool, quiet: bool) -> None:
    """Print what a scrub found."""
    if as_json:
        render.print_json(
            {
                "sound": report.sound,
                "trees": report.trees,
                "bytes": report.n_bytes,
                "marked": [str(tree) for tree in report.marked],
                "mended": [str(tree) for tree in report.mended],
                "wrong": [
                    {"tree": str(tree), **render.path_fields(path)} for tree, path in report.wrong
                ],
                "problems": list(report.problems),
            }
        )
        return
    wrong = [(tree, path) for tree, path in report.wrong if path]  # else all of it is missing
    render.print_lines(f"damaged: {render.one_line(p)} of tree {t.short}" for t, p in wrong)
    render.print_lines(f"mended: tree {tree.short}" for tree in report.mended)
    render.warn(report.problems)
    if not quiet:
        verdict = "all is well" if report.sound else "some stays damaged or missing"
        print(f"{verdict}: {report.trees} trees, {render.human_bytes(report.n_bytes)} read")
        if not report.sound:
            print("to mend: unmount the image and `snapcask prefetch` it, which builds it again")


def listing_document(listed: CacheListing) -> dict[str, Any]:
    """The listing for JSON."""
    return {
        "cache": listed.path,
        "free_bytes": listed.free_bytes,
        "size_bytes": listed.size_bytes,
        "shares": listed.shares,
        "disks": [
            {"path": d.path, "free_bytes": d.free_bytes, "size_bytes": d.size_bytes,
             "problem": d.problem}
            for d in listed.disks
        ],
        "images": [
            {"digest": str(i.digest), "domain": i.domain, "store": i.store, "complete": i.complete,
             "trees": [str(tree) for tree in i.trees]}
            for i in listed.images
        ],
        "trees": [
            {"tree": str(t.tree), "domain": t.domain, "state": t.state.value,
             "logical_bytes": t.logical_bytes, "data_bytes": t.data_bytes,
             "exclusive_bytes": t.exclusive_bytes, "used_ns": t.used_ns, "pins": list(t.pins),
             "mounts": list(t.mounts)}
            for t in listed.trees
        ],
    }  # fmt: skip


def listing_lines(listed: CacheListing) -> list[str]:
    """The listing for people."""
    header = ("TREE", "STATE", "SIZE", "ALONE", "USED", "PINS", "MOUNTS")
    rows = [_row(tree, time.time_ns()) for tree in listed.trees]
    images = [
        (image.digest.short, "complete" if image.complete else "incomplete",
         str(len(image.trees)), render.one_line(image.store))
        for image in listed.images
    ]  # fmt: skip
    size, free = map(render.human_bytes, (listed.size_bytes, listed.free_bytes))
    return [
        f"{render.one_line(listed.path)}: {size}, {free} free",
        *map(_disk_line, listed.disks),
        *render.table(("IMAGE", "STATE", "TREES", "STORE"), images, right="  r"),
        *render.table(header, rows, right="  rrrrr"),
    ]


def _disk_line(disk: CachedDisk) -> str:
    if disk.problem:
        return disk.problem
    size, free = map(render.human_bytes, (disk.size_bytes, disk.free_bytes))
    return f"{render.one_line(disk.path)}: {size}, {free} free"


def _row(tree: CachedTree, now_ns: int) -> tuple[str, ...]:
    used = render.human_age((now_ns - tree.used_ns) / 1e9) if tree.used_ns else "-"
    return (
        tree.tree.short,
        tree.state.value,
        render.human_bytes(tree.data_bytes),
        render.human_bytes(tree.exclusive_bytes),
        used,
        str(len(tree.pins)),
        str(len(tree.mounts)),
    )
