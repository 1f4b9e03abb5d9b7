"""What an image or a directory holds: entries, sizes, zeros, chunks, and where they are stored.

A directory is read whole, as a push would: only so are its zeros and repetitions known.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from imgfmt import layout
from imgfmt.chunking import Profile
from imgfmt.criu import CriuSummary
from imgfmt.digest import DIGEST_BYTES, Digest
from imgfmt.image import Image, Member
from imgfmt.tree import Entry, EntryType, Tree
from transfer.buffers import BufferPool
from transfer.catalog import Catalog
from transfer.compare import distinct
from transfer.config import TransferConfig
from transfer.progress import Progress
from transfer.pushing.ingest import Ingest
from transfer.pushing.provenance import describe_directory
from transfer.pushing.scan import scan_directory
from transfer.tasks import first_cause
from transfer.threads import Threads

KIB = 1024
HISTOGRAM_EDGES = (0, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB)
"""Lower bounds of the buckets of chunk sizes, in bytes; the last one holds the full chunks."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Chunks whose plain length is in [`from_bytes`, the next bucket's `from_bytes`)."""

    from_bytes: int
    chunks: int
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class ContentFacts:
    """Content of some files. `zero_bytes` are in holes; `distinct_*` counts equal chunks once."""

    logical_bytes: int
    zero_bytes: int
    chunks: int
    distinct_chunks: int
    distinct_bytes: int
    histogram: list[Bucket]


@dataclass(frozen=True, slots=True)
class EntryFacts:
    """One entry below a root, `path` relative to it. `data_bytes` are not in holes."""

    path: bytes
    type: EntryType
    mode: int
    size_bytes: int
    data_bytes: int
    chunks: int
    target: bytes


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """One member. `stored_bytes` is what its distinct chunks take in packs."""

    member: Member
    entries: list[EntryFacts]
    content: ContentFacts
    packs: int
    runs: int
    encoded_chunks: int
    stored_bytes: int
    tree_bytes: int
    placement_bytes: int


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """An image. `content` is that of all members together."""

    digest: Digest
    image: Image
    members: list[MemberFacts]
    content: ContentFacts


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """A directory as a push would find it. `facts` would become the member's provenance."""

    entries: list[EntryFacts]
    content: ContentFacts
    criu: CriuSummary | None
    facts: dict[str, str]
    warnings: list[str]


async def inspect_image(catalog: Catalog, digest: Digest, image: Image) -> ImageFacts:
    """Facts about an image and how it is stored. No chunk is read."""
    members: list[MemberFacts] = []
    digests: list[npt.NDArray[np.uint8]] = []
    sizes: list[npt.NDArray[np.uint32]] = []
    for member in image.members:
        found, tree = await _inspect_member(catalog, member)
        members.append(found)
        digests.append(tree.chunk_digest)
        sizes.append(tree.chunk_bytes)
    content = _content(
        sum(found.content.logical_bytes for found in members),
        sum(found.content.zero_bytes for found in members),
        np.concatenate(digests),
        np.concatenate(sizes),
    )
    return ImageFacts(digest, image, members, content)


async def inspect_directory(
    path: str | bytes, *, profile: Profile, config: TransferConfig, progress: Progress
) -> DirectoryReport:
    """Facts about a directory that is no image yet. Raises as `scan_directory` does, and Conflict
    for a file that changes meanwhile; special files are only warned of."""
    with Threads("inspect", config.n_threads) as threads:
        described = await threads.run(lambda: describe_directory(path))
        listing = await threads.run(lambda: scan_directory(path, skip_special=True))
        progress.phase("read", listing.logical_bytes)
        recorder = _Recorder()
        try:
            async with asyncio.TaskGroup() as group:
                pool = BufferPool(config.n_slots, config.block_bytes)
                ingest = Ingest(listing, profile, pool, threads, group)
                ingest.start()
                async for batch in ingest.batches():
                    for chunk, digest in zip(batch.chunks, batch.digests, strict=True):
                        recorder.add(chunk.entry, digest, chunk.plain_bytes)
                    progress.advance(sum(chunk.plain_bytes for chunk in batch.chunks))
                    batch.release()
        except BaseExceptionGroup as error:
            raise first_cause(error) from None
    start = len(listing.root) + 1
    paths = [path[start:] for path in listing.paths]
    return DirectoryReport(
        recorder.entries(listing.entries, paths),
        recorder.content(listing.logical_bytes),
        described.criu,
        described.facts,
        [*described.warnings, *listing.warnings],
    )


class _Recorder:
    """The chunks of a directory, 40 bytes each, in the order in which they are cut."""

    def __init__(self) -> None:
        self._entry = array("I")
        self._plain_bytes = array("I")
        self._digests = bytearray()

    def add(self, entry: int, digest: bytes, plain_bytes: int) -> None:
        self._entry.append(entry)
        self._plain_bytes.append(plain_bytes)
        self._digests += digest

    def entries(self, entries: list[Entry], paths: list[bytes]) -> list[EntryFacts]:
        return _entry_facts(entries, paths, _array(self._entry), _array(self._plain_bytes))

    def content(self, logical_bytes: int) -> ContentFacts:
        sizes = _array(self._plain_bytes)
        digests = np.frombuffer(self._digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        zero_bytes = logical_bytes - int(sizes.sum(dtype=np.uint64))
        return _content(logical_bytes, zero_bytes, digests, sizes)


async def _inspect_member(catalog: Catalog, member: Member) -> tuple[MemberFacts, Tree]:
    content = await catalog.content(member.tree)
    tree, placed = content.tree, content.placement
    entries = _entry_facts(tree.entries(), tree.paths(), tree.chunk_entry, tree.chunk_bytes)
    facts = MemberFacts(
        member=member,
        entries=entries,
        content=_content(tree.logical_bytes, tree.zero_bytes, tree.chunk_digest, tree.chunk_bytes),
        packs=len(placed.packs),
        runs=len(placed.run_pack),
        encoded_chunks=len(placed.encoded_chunk),
        stored_bytes=int(placed.pack_live_bytes.sum(dtype=np.uint64)),
        tree_bytes=await _size_bytes(catalog, layout.tree_key(member.tree)),
        placement_bytes=await _size_bytes(catalog, layout.placement_key(member.tree)),
    )
    return facts, tree


async def _size_bytes(catalog: Catalog, key: str) -> int:
    facts = await catalog.store.facts(key)
    return 0 if facts is None else facts.size_bytes


def _entry_facts(
    entries: Iterable[Entry],
    paths: list[bytes],
    chunk_entry: npt.NDArray[Any],
    chunk_bytes: npt.NDArray[Any],
) -> list[EntryFacts]:
    """All entries but the root, in order."""
    chunks = np.bincount(chunk_entry, minlength=len(paths)).tolist()
    data_bytes = np.bincount(chunk_entry, weights=chunk_bytes, minlength=len(paths)).tolist()
    return [
        EntryFacts(path, e.type, e.mode, e.size_bytes, int(n_bytes), n_chunks, e.target)
        for e, path, n_bytes, n_chunks in zip(entries, paths, data_bytes, chunks, strict=True)
    ][1:]


def _content(
    logical_bytes: int,
    zero_bytes: int,
    digests: npt.NDArray[np.uint8],
    sizes: npt.NDArray[np.uint32],
) -> ContentFacts:
    bucket = np.searchsorted(HISTOGRAM_EDGES, sizes, side="right") - 1
    counts = np.bincount(bucket, minlength=len(HISTOGRAM_EDGES)).tolist()
    totals = np.bincount(bucket, weights=sizes, minlength=len(HISTOGRAM_EDGES)).tolist()
    histogram = [
        Bucket(edge, count, int(total))
        for edge, count, total in zip(HISTOGRAM_EDGES, counts, totals, strict=True)
    ]
    n_distinct, distinct_bytes = distinct(digests, sizes)
    return ContentFacts(
        logical_bytes, zero_bytes, len(sizes), n_distinct, distinct_bytes, histogram
    )


def _array(values: array[int]) -> npt.NDArray[np.uint32]:
    return np.frombuffer(values, dtype=np.uint32) if len(values) else np.zeros(0, np.uint32)


def summarise_types(entries: Iterable[EntryFacts]) -> dict[str, int]:
    """How many directories, files and symbolic links there are, by lower-case name."""
    counts = Counter(entry.type for entry in entries)
    return {kind.name.lower(): counts[kind] for kind in EntryType}
