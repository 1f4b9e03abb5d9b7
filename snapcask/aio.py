"""The public API for programs that run an event loop: the calls of `snapcask`, as coroutines.

Sizes, offsets and lengths are in bytes. A store is named by its directory or `file://` URL. An
image is named by `name`, `name:tag`, `name@blake3:<hex>` or `blake3:<hex>`, where 8 digits or more
may stand for a whole digest. Every call may raise `InvalidInput`, `NotFound`, `AccessDenied`,
`StoreUnavailable`, `Unsupported` (a newer store) and `OutOfResources`, and where it reads an image
`CorruptData` and `InvalidImage`. Cancelling a call undoes what it had not published.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from imgfmt.errors import InvalidInput
from imgfmt.reference import parse_reference
from imgfmt.store_record import NewChunks, StoreRecord
from snapcask.declared import declared_facts, with_declared
from snapcask.handles import AsyncImageHandle, EntryStat
from snapcask.requests import MemberSource, PathName, push_request
from snapcask.stores import StoreName, opened, transfer_config
from transfer.catalog import init_store as init_catalog
from transfer.collect import CollectReport, collect, plan_collection
from transfer.progress import Progress, Silent
from transfer.pull import PullReport
from transfer.pull import pull as pull_image
from transfer.pulling.pull_plan import PullPlan
from transfer.pulling.pull_plan import plan_pull as plan_pull_of_image
from transfer.push import PushReport
from transfer.push import push as push_image
from transfer.reader import open_reader
from transfer.store.posix import PosixStore
from transfer.store.surroundings import check_folders
from transfer.store.url import open_store
from transfer.verify import VerifyReport, verify_all
from transfer.verify import verify as verify_images

if TYPE_CHECKING:
    from restore.compat import CompatReport
    from restore.host_facts import MachineFacts
    from snapcask.loading import Tensors as Tensors
    from snapcask.loading import load as load
    from snapcask.loading import load_ranges as load_ranges
    from snapcask.loading import load_replicas as load_replicas

_LOADS = ("Tensors", "load", "load_ranges", "load_replicas")

__all__ = [
    "AsyncImageHandle",
    "EntryStat",
    "MemberSource",
    "Tensors",
    "check",
    "gc",
    "init_store",
    "load",
    "load_ranges",
    "load_replicas",
    "open_image",
    "plan_pull",
    "pull",
    "push",
    "verify",
]


def __getattr__(name: str) -> object:
    """Load what brings tensors to devices at its first use: most programs never do."""
    if name not in _LOADS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("snapcask.loading"), name)
    globals()[name] = value
    return value


async def init_store(
    url: StoreName,
    *,
    page_bytes: int | None = None,
    pack_bytes: int | None = None,
    codec: str | None = None,
    allow_non_empty: bool = False,
) -> StoreRecord:
    """Make a directory a store, and the directory too; returns what was recorded.

    New trees are cut at pages of `page_bytes` (4096 by default, 16384 or 65536), and packs closed
    at about `pack_bytes` (128 MiB). `codec` is how new chunks are stored: "raw", the default in a
    directory, "zstd", or "auto" for zstd where a sample gains 1.4 times. Raises InvalidInput if it
    is a store already, lies in one, or holds other things, unless `allow_non_empty`.
    """
    given = {"page_bytes": page_bytes, "pack_bytes": pack_bytes}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    store = open_store(os.fspath(url))
    try:
        if isinstance(store, PosixStore):
            check_folders(store.root)
        if codec is not None:
            chosen["codec"] = _codec(codec)
        elif isinstance(store, PosixStore):
            chosen["codec"] = NewChunks.RAW
        uuid = secrets.token_bytes(16)
        record = StoreRecord(uuid, concurrent_writers=True, **chosen)
        return await init_catalog(store, record, allow_non_empty=allow_non_empty)
    finally:
        store.close()


async def push(
    directory: PathName | None,
    reference: str | None,
    *,
    store: StoreName | None,
    members: Mapping[str, PathName | MemberSource] | None = None,
    annotations: Mapping[str, str] | None = None,
    require: Sequence[str] = (),
    facts: Mapping[str, str] | None = None,
    engine: str | None = None,
    model: str | None = None,
    engine_flags: str | None = None,
    container_image: str | None = None,
    record_host: bool = False,
    skip_special: bool = False,
    max_memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> PushReport:
    """Store a directory, or several as the members of one image, and point `reference` to it.

    Give either `directory`, which becomes the member `main`, or `members` by name; a plain path
    there is a directory. Without a reference the image has only its digest, and may be collected.
    `require` has rules about the machine that may use the image: "fact=value", "fact>=1.2" or
    "fact~=a,b". `facts` are recorded of each directory beside those that it tells itself, and so
    are `engine` ("name" or "name:version"), `model`, `engine_flags` (as on a command line) and
    `container_image` ("name@sha256:..."), and with `record_host` facts of this machine. Sockets,
    fifos and devices are refused unless `skip_special`. All buffers together take
    `max_memory_bytes`. Raises Conflict if a file or the reference changes meanwhile; the next push
    finds what was stored.
    """
    config = transfer_config(max_memory_bytes)
    declared = declared_facts(
        engine=engine, model=model, engine_flags=engine_flags, container_image=container_image
    )
    async with opened(store, write=True) as catalog:
        request, warnings = await push_request(
            catalog,
            directory=directory,
            reference=reference,
            members=members or {},
            annotations=annotations or {},
            require=require,
            facts=with_declared(facts or {}, declared),
            record_host=record_host,
            skip_special=skip_special,
        )
        report = await push_image(catalog, request, config=config, progress=progress)
    return replace(report, warnings=[*warnings, *report.warnings])


async def pull(
    reference: str,
    directory: PathName,
    *,
    store: StoreName | None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    fsync: bool = True,
    resume: bool = False,
    buffered: bool = False,
    max_memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> PullReport:
    """Write an image to `directory`, which is absent or empty: all of it, or nothing.

    The only member of an image, or the one named, is the directory; else each is a subdirectory of
    its name, `/` written `+`. Every chunk is verified. `facts` add to those of this machine, which
    choose among variants. With `resume` a pull that is killed, cancelled or cut off from the store
    leaves what it verified, hidden, to the next one to the same directory. Without `fsync` the
    directory may be damaged if the machine crashes. Files are written past the page cache unless
    `buffered`: for who reads them at once.
    """
    config = transfer_config(max_memory_bytes, fsync=fsync, buffered=buffered)
    async with opened(store) as catalog:
        return await pull_image(
            catalog,
            await catalog.resolve(parse_reference(reference)),
            os.fspath(directory),
            member=member,
            config=config,
            progress=progress or Silent(),
            facts=_machine(facts),
            resume=resume,
        )


async def plan_pull(
    reference: str,
    directory: PathName,
    *,
    store: StoreName | None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    resume: bool = False,
    max_memory_bytes: int | None = None,
) -> PullPlan:
    """Say what `pull` with these arguments would move, and write nothing.

    Raises what the pull would raise about the image, the directory and the room there. With
    `resume` only what an earlier pull left to be done counts.
    """
    async with opened(store) as catalog:
        return await plan_pull_of_image(
            catalog,
            await catalog.resolve(parse_reference(reference)),
            os.fspath(directory),
            member=member,
            config=transfer_config(max_memory_bytes),
            facts=_machine(facts),
            resume=resume,
        )


async def check(
    reference: str,
    *,
    store: StoreName | None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    override: Sequence[str] = (),
) -> CompatReport:
    """Compare an image, or one member of it, with this machine, rule by rule.

    Of variants it says which image a pull takes here. `facts` go before what is found here; a rule
    named in `override` refuses nothing, nor does what is not known. That it does not fit is in the
    report, not raised. GPUs are looked at only for rules about them, by a process of its own.
    """
    from restore.compat import check as check_image

    async with opened(store) as catalog:
        digest = await catalog.resolve(parse_reference(reference))
        return await check_image(catalog, digest, _machine(facts), member=member, override=override)


@asynccontextmanager
async def open_image(
    reference: str,
    *,
    store: StoreName | None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    max_memory_bytes: int | None = None,
) -> AsyncIterator[AsyncImageHandle]:
    """Read files of an image from the store: `async with open_image(...) as image`.

    `member` may be left out where there is only one. Only the chunks that cover what is read are
    fetched, and each is verified. Nothing is kept for later reads.
    """
    config = transfer_config(max_memory_bytes)
    async with opened(store) as catalog:
        reader = await open_reader(
            catalog,
            await catalog.resolve(parse_reference(reference)),
            member,
            config=config,
            facts=_machine(facts),
        )
        with reader:
            yield AsyncImageHandle(reader)


async def verify(
    references: Sequence[str] | None = None,
    *,
    store: StoreName | None,
    max_memory_bytes: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read back and check all that these images need; without `references`, all of the store.

    Damage is in the report, not raised. Changes nothing.
    """
    config = transfer_config(max_memory_bytes)
    shown = progress or Silent()
    async with opened(store) as catalog:
        if references is None:
            return await verify_all(catalog, config=config, progress=shown)
        digests = [await catalog.resolve(parse_reference(text)) for text in references]
        return await verify_images(catalog, digests, config=config, progress=shown)


async def gc(
    *,
    store: StoreName | None,
    history_s: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CollectReport:
    """Delete packs and other objects that no reference needs; with `dry_run` only count them.

    What references pointed to within `history_s` seconds stays; by default it is what the store's
    record says. Safe beside pushes and pulls. If there is anything to delete, it takes as long as a
    lease of the store may last, an hour by default. Raises Conflict where it runs elsewhere, and
    CorruptData, InvalidImage or NotFound where it can't be told what is needed.
    """
    async with opened(store, write=True) as catalog:
        if dry_run:
            return await plan_collection(catalog, history_s)
        return await collect(catalog, history_s, progress=progress)


def _machine(facts: Mapping[str, str] | None) -> MachineFacts:
    """Facts of this machine. What looks at it is loaded only now."""
    from restore.host_facts import MachineFacts

    return MachineFacts(facts)


def _codec(name: str) -> NewChunks:
    if name not in list(NewChunks):
        raise InvalidInput(f"codec {name!r} is not one of {', '.join(NewChunks)}")
    return NewChunks(name)
