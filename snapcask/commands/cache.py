"""`snapcask cache`: look after the cache of this node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from snapcask.commands.options import (
    byte_size,
    cache_options,
    json_option,
    optional_store_option,
    quiet_option,
)
from snapcask.commands.prefetch import command as warm

if TYPE_CHECKING:
    from snapcask.caches import CacheOptions


@click.group(no_args_is_help=False)
def command() -> None:
    """Look after the images that this node keeps."""


command.add_command(warm, "warm")


@command.command()
@cache_options
@json_option
def ls(cache: CacheOptions, as_json: bool) -> None:
    """List images and trees of the cache: what they take, since when, and what keeps them."""
    from snapcask import render
    from snapcask.commands.caching import listing_document, listing_lines
    from transfer.cache.listing import list_cache

    listed = list_cache(cache.open())
    if as_json:
        render.print_json(listing_document(listed))
    else:
        render.print_lines(listing_lines(listed))


@command.command()
@click.argument("reference", metavar="REF")
@click.option("--id", "pin_id", default="user", show_default=True, help="Name of the pin.")
@optional_store_option
@cache_options
@json_option
@quiet_option
def pin(
    reference: str, pin_id: str, store: str | None, cache: CacheOptions, as_json: bool, quiet: bool
) -> None:
    """Keep the image REF in the cache until it is unpinned."""
    from snapcask.commands.caching import pin_image, print_trees

    trees = pin_image(cache, reference, store, pin_id)
    print_trees("pinned", trees, as_json=as_json, quiet=quiet)


@command.command()
@click.argument("reference", metavar="REF")
@click.option("--id", "pin_id", default="user", show_default=True, help="Name of the pin.")
@optional_store_option
@cache_options
@json_option
@quiet_option
def unpin(
    reference: str, pin_id: str, store: str | None, cache: CacheOptions, as_json: bool, quiet: bool
) -> None:
    """Let go of the pin of the image REF."""
    from snapcask.commands.caching import print_trees, unpin_image

    trees = unpin_image(cache, reference, store, pin_id)
    print_trees("unpinned", trees, as_json=as_json, quiet=quiet)


@command.command()
@click.argument("reference", metavar="REF")
@optional_store_option
@cache_options
@json_option
@quiet_option
def rm(reference: str, store: str | None, cache: CacheOptions, as_json: bool, quiet: bool) -> None:
    """Remove the image REF from the cache, with those of its trees that nothing else needs."""
    from snapcask.commands.caching import print_evicted, remove_cached

    print_evicted(remove_cached(cache, reference, store), as_json=as_json, quiet=quiet)


@command.command()
@click.argument("references", metavar="[REF...]", nargs=-1)
@optional_store_option
@click.option("--no-mend", is_flag=True, help="Only mark what is damaged.")
@cache_options
@json_option
@quiet_option
def verify(
    references: tuple[str, ...],
    store: str | None,
    no_mend: bool,
    cache: CacheOptions,
    as_json: bool,
    quiet: bool,
) -> int:
    """Read the images REF, or all, back from the disk, and check every chunk.

    Every tree that has a bad chunk is marked, and mended from its store unless --no-mend. The exit
    code is 6 if something stays damaged.
    """
    from snapcask.commands.caching import print_verified, verify_cached
    from snapcask.exitcodes import ExitCode

    report = verify_cached(cache, references, store, mend=not no_mend)
    print_verified(report, as_json=as_json, quiet=quiet)
    return ExitCode.OK if report.sound else ExitCode.CORRUPT


@command.command()
@click.option("--all", "everything", is_flag=True, help="Remove all that nothing needs.")
@click.option(
    "--max-size",
    type=byte_size,
    metavar="SIZE",
    help="Begin where the cache is larger; end at 90 % of it.",
)
@click.option("--begin-free", type=float, default=0.20, show_default=True, metavar="SHARE",
              help="Begin where less of the filesystem is free.")  # fmt: skip
@click.option("--end-free", type=float, default=0.25, show_default=True, metavar="SHARE",
              help="End where so much of it is free.")  # fmt: skip
@cache_options
@json_option
@quiet_option
def prune(
    everything: bool,
    max_size: int | None,
    begin_free: float,
    end_free: float,
    cache: CacheOptions,
    as_json: bool,
    quiet: bool,
) -> None:
    """Remove trees by the watermarks, the least recently used first.

    None that is pinned, mounted, being built, or shared from by a running download.
    """
    from snapcask.commands.caching import print_evicted, prune_cache
    from transfer.cache.evict import Watermarks

    marks = Watermarks(begin_free=begin_free, end_free=end_free, max_bytes=max_size)
    print_evicted(prune_cache(cache, marks, everything=everything), as_json=as_json, quiet=quiet)


@command.command()
@click.argument("disk", metavar="DISK")
@cache_options
@json_option
@quiet_option
def forget(disk: str, cache: CacheOptions, as_json: bool, quiet: bool) -> None:
    """Take the further disk at the directory DISK out of the cache; nothing on it is removed.

    Images that lie on it too are built again when they are asked for.
    """
    from snapcask import render
    from snapcask.commands.caching import forget_disk_of

    forget_disk_of(cache, disk)
    if as_json:
        render.print_json({"forgotten": disk})
    elif not quiet:
        render.print_lines([render.one_line(disk)])
