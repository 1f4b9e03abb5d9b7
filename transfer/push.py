"""Push: directories and members that are stored already become one image (SPEC.md 11.1).

Order of writes: packs, index, trees and placements, image, reference. A failure at any point
leaves objects that nothing refers to, and packs that the next push finds again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from imgfmt import layout, placement
from imgfmt.digest import Digest, Octets, digest_of
from imgfmt.errors import Conflict, ImageError, StoreUnavailable
from imgfmt.image import Image, Member, Rule, pairs
from imgfmt.lease import ObjectKind
from imgfmt.reference import TargetKind
from transfer.buffers import BufferPool, page_aligned
from transfer.catalog import Catalog
from transfer.collect import end_left_epochs
from transfer.config import TransferConfig
from transfer.execute import each
from transfer.leases import WriterLease, boot_s, read_doomed, rescue_epoch
from transfer.leftovers import remove_leftovers
from transfer.progress import Clock, PhaseClock, Progress, Silent
from transfer.pushing.adoption import adopt_packs
from transfer.pushing.contents import ContentRecorder, Place
from transfer.pushing.drafts import Draft, draft_of_listing, draft_of_member
from transfer.pushing.indexing import join_segments
from transfer.pushing.ingest import Batch, Chunk, Ingest, Span
from transfer.pushing.known import KnownChunks
from transfer.pushing.packer import PackedCounts, Packer
from transfer.pushing.scan import Listing, check_unchanged, scan_directory
from transfer.references import next_record, take_back, whoami
from transfer.separation import check_source
from transfer.store.base import StoredReference
from transfer.tasks import TAKE_BACK_S, both, finished, first_cause
from transfer.threads import Threads

_MAX_ROUNDS = 16
_N_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class DirectorySource:
    """A member to be made from a directory. `provenance` are facts of the snapshot."""

    name: str
    path: str
    role: str = ""
    mount_path: str = ""
    provenance: dict[str, str] = field(default_factory=dict)

    def member(self, tree: Digest) -> Member:
        """The member that this directory becomes."""
        return Member(self.name, tree, self.role, self.mount_path, pairs(self.provenance))


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What to push. `stored` are members of images that are in the store already.

    `reference` is (name, tag), or None to store the image under its digest alone.
    """

    directories: Sequence[DirectorySource]
    stored: Sequence[Member] = ()
    reference: tuple[str, str] | None = None
    annotations: dict[str, str] = field(default_factory=dict)
    compat: tuple[Rule, ...] = ()
    skip_special: bool = False


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push did. `counts` tells of chunks; `metadata_bytes` is all else that was written.

    The zeros that fill pages between chunks are counted nowhere.
    """

    digest: Digest
    reference: str | None
    logical_bytes: int
    zero_bytes: int
    counts: PackedCounts
    metadata_bytes: int
    warnings: list[str]
    seconds: dict[str, float]


async def push(
    catalog: Catalog,
    request: PushRequest,
    *,
    config: TransferConfig,
    progress: Progress | None = None,
    now_s: Clock = boot_s,
) -> PushReport:
    """Store an image and point its reference to it. `now_s` tells how long the lease lasts.

    Raises Conflict if the reference, or a file that was read, was changed meanwhile; nothing that
    was stored is lost then. Cancelling leaves no half-written object.
    """
    ttl_s = min(config.lease_ttl_s, catalog.record.lease_ttl_s)
    lease = WriterLease(catalog, "push", whoami(), ttl_s, now_s)
    threads = Threads("push", config.n_threads)
    work = _Push(catalog, request, lease, threads, config, progress or Silent(), now_s)
    try:
        await lease.take()
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(lease.keep())
            group.create_task(remove_leftovers(catalog, lease))
            report = await work.run(group)
            keeper.cancel()
        return report
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    finally:
        await finished(work.clean_up())
        threads.close()
        await finished(lease.drop())


class _Push:
    def __init__(
        self, catalog: Catalog, request: PushRequest, lease: WriterLease, threads: Threads,
        config: TransferConfig, progress: Progress, now_s: Clock,
    ) -> None:  # fmt: skip
        self._now_s = now_s
        self._catalog = catalog
        self._store = catalog.store
        self._request = request
        self._lease = lease
        self._threads = threads
        self._config = config
        self._progress = progress
        self._clock = PhaseClock(time.monotonic)
        self._packer: Packer | None = None
        self._metadata_bytes = 0
        self._settled: set[bytes] = set()
        self._checked_term = lease.term

    async def clean_up(self) -> None:
        """Remove packs that were begun and not published."""
        if self._packer is not None:
            await self._packer.abort()

    async def run(self, group: asyncio.TaskGroup) -> PushReport:
        """The steps of SPEC.md 11.1 from 2 on."""
        self._check_request()
        for source in self._request.directories:
            await self._threads.run(check_source, self._store, source.path)
        seen, known = await both(self._seen_reference(), self._known_chunks())
        packer = self._packer = Packer(self._catalog, known, group, self._threads, self._config)
        listings = await self._scan()
        drafts = [
            await self._ingest(source, listing, packer, group)
            for source, listing in zip(self._request.directories, listings, strict=True)
        ]
        drafts += [await draft_of_member(self._catalog, m, known) for m in self._request.stored]
        self._clock.end("read")
        segments = await packer.finish()
        for listing in listings:
            await self._threads.run(check_unchanged, listing)
        image = self._image([draft.member for draft in drafts])
        digest = digest_of(image)
        reference = await self._publish(_Publication(digest, image, drafts, known, packer), seen)
        warnings = [w for listing in listings for w in listing.warnings] + sorted(known.unreadable)
        try:
            await join_segments(self._catalog, segments)
        except ImageError as error:  # what was pushed is published
            warnings.append(f"index segments were not joined: {error}")
        self._clock.end("publish")
        counts = packer.counts
        overhead = self._metadata_bytes + counts.index_bytes + counts.pack_overhead_bytes
        logical_bytes = sum(draft.logical_bytes for draft in drafts)
        zero_bytes = sum(draft.zero_bytes for draft in drafts)
        seconds = self._clock.total()
        return PushReport(
            digest, reference, logical_bytes, zero_bytes, counts, overhead, warnings, seconds
        )

    def _check_request(self) -> None:
        """Raise InvalidInput for what can't be an image, before anything is read."""
        nothing = digest_of(b"")
        members = [source.member(nothing) for source in self._request.directories]
        self._image([*members, *self._request.stored])

    async def _seen_reference(self) -> StoredReference | None:
        if self._request.reference is None:
            return None
        return await self._store.reference_to_change(*self._request.reference)

    async def _known_chunks(self) -> KnownChunks:
        doomed = await read_doomed(self._catalog)
        known = KnownChunks(self._catalog, doomed.packs)
        await known.load()
        self._metadata_bytes += await adopt_packs(self._catalog, known, self._lease.key)
        return known

    async def _scan(self) -> list[Listing]:
        skip_special = self._request.skip_special
        listings = [
            await self._threads.run(scan_directory, source.path, skip_special=skip_special)
            for source in self._request.directories
        ]
        self._clock.end("scan")
        self._progress.phase("read", sum(listing.logical_bytes for listing in listings))
        return listings

    async def _ingest(
        self, source: DirectorySource, listing: Listing, packer: Packer, group: asyncio.TaskGroup
    ) -> Draft:
        """Read, cut, hash and store the files of one directory."""
        contents = await self._read(listing, packer, group)
        return draft_of_listing(listing, contents, self._catalog.profile, source.member)

    async def _read(
        self, listing: Listing, packer: Packer, group: asyncio.TaskGroup
    ) -> ContentRecorder:
        """What a draft is made of. The buffers are let go with the end of this."""
        n_slots = min(self._config.n_slots, self._threads.n_threads + 2 + self._store.n_writes)
        pool = BufferPool(n_slots, self._config.block_bytes)
        ingest = Ingest(listing, self._catalog.profile, pool, self._threads, group)
        ingest.start()
        async for batch in ingest.batches():
            plain_bytes = sum(chunk.plain_bytes for chunk in batch.chunks)
            await packer.store(batch, ingest.contents)
            self._progress.advance(plain_bytes)
        return ingest.contents

    def _image(self, members: Sequence[Member]) -> bytes:
        ordered = tuple(sorted(members, key=lambda member: member.name))
        return Image(ordered, self._request.compat, pairs(self._request.annotations)).encode()

    async def _publish(self, what: _Publication, seen: StoredReference | None) -> str | None:
        """Write all metadata and change the reference (steps 5 to 9); returns the reference."""
        self._progress.phase("publish", 0)
        term = await self._write_metadata(what)
        reference = await self._point(what.digest, seen)
        if not self._lease.held_since(term):
            try:
                await self._write_metadata(what)
            except BaseException:
                if self._request.reference is not None:
                    names = self._request.reference
                    undo = take_back(self._store, *names, what.digest, seen)
                    await finished(undo, within_s=TAKE_BACK_S)
                raise
        return reference

    async def _write_metadata(self, what: _Publication) -> int:
        """Write trees, placements and the image until nothing of them is doomed (steps 5 to 7).

        Returns the term of the lease in which everything was seen to be there.
        """
        written = False
        for _ in range(_MAX_ROUNDS):
            if not self._lease.is_fresh:
                await self._lease.renew()
            if (term := self._lease.term) != self._checked_term:
                await what.known.check_again()
                self._checked_term, written = term, False
            doomed = await read_doomed(self._catalog)
            moved = await self._move_out(what, what.known.doom(doomed.packs))
            epochs = doomed.epochs(what.objects()) - self._settled
            for epoch in epochs:
                await self._rescue(epoch)
            self._settled |= epochs
            lasting = self._lease.is_fresh and self._lease.term == term
            if written and not moved and not epochs and lasting:
                return term
            image_key = layout.image_key(what.digest)
            is_image_there, _ = await both(
                self._catalog.holds(image_key, len(what.image), self._threads),
                each(iter(what.drafts), partial(self._write_draft, what.known), _N_DRAFTS),
            )
            if not is_image_there:
                await self._put(image_key, [what.image])
            written = True
        raise Conflict(
            f"collectors of store {self._store.url} leave no time to publish; push again"
        )

    async def _rescue(self, epoch: bytes) -> None:
        """See `rescue_epoch`; where the collector was killed, do what it had decided."""
        try:
            await rescue_epoch(self._catalog, epoch, whoami())
        except StoreUnavailable as error:
            try:
                await end_left_epochs(self._catalog, self._now_s)
            except Conflict:
                raise error from None

    async def _move_out(self, what: _Publication, packs: frozenset[int]) -> bool:
        """Store the chunks that lie in these packs once more; True if there were any."""
        moved = False
        for draft in what.drafts:
            for number in draft.hit_by(packs) if packs else []:
                plain = await draft.read_chunk(number)
                batch = _batch_of(
                    plain, draft.places.digest[number].tobytes(), self._catalog.profile.page_bytes
                )
                await what.packer.store(batch, _Move(draft, number))
                what.packer.counts.chunks -= 1  # it was counted when it was read
                what.packer.counts.plain_bytes -= len(plain)
                moved = True
        if moved:
            await what.packer.finish()
        return moved

    async def _write_draft(self, known: KnownChunks, draft: Draft) -> None:
        await both(self._write_tree(draft), self._place(draft, known))

    async def _write_tree(self, draft: Draft) -> None:
        key, size_bytes = layout.tree_key(draft.tree), sum(map(len, draft.pieces))
        if not await self._catalog.holds(key, size_bytes, self._threads):
            await self._put(key, draft.pieces)

    async def _place(self, draft: Draft, known: KnownChunks) -> None:
        placed = draft.placement(known.names, self._catalog.record.page_bytes)
        if not await self._is_placed(draft, placed):
            await self._put(layout.placement_key(draft.tree), placement.encode(placed))

    async def _is_placed(self, draft: Draft, placed: placement.Placement) -> bool:
        """Whether the store's placement of the tree is the one we would write."""
        try:
            there = await self._catalog.placement(draft.tree, len(draft.places.pack))
        except ImageError:  # damaged, or not there
            return False
        return b"".join(placement.encode(there)) == b"".join(placement.encode(placed))

    async def _put(self, key: str, pieces: Sequence[Octets]) -> None:
        await self._store.put(key, pieces)
        self._metadata_bytes += sum(map(len, pieces))

    async def _point(self, image: Digest, seen: StoredReference | None) -> str | None:
        """Change the reference from what it was when the push began (step 8)."""
        if self._request.reference is None:
            return None
        name, tag = self._request.reference
        if seen is not None and seen.record.target == image:
            return f"{name}:{tag}"
        record = next_record(name, tag, seen, TargetKind.IMAGE, image)
        try:
            await self._store.change_reference(record, seen)
        except Conflict as error:
            raise Conflict(
                f"{error}; your image is stored: `snapcask tag {image} {name}:{tag}`"
            ) from error
        return f"{name}:{tag}"


@dataclass(frozen=True, slots=True)
class _Publication:
    """What is to be published: an image, the drafts of its members, and who stores their chunks."""

    digest: Digest
    image: bytes
    drafts: Sequence[Draft]
    known: KnownChunks
    packer: Packer

    def objects(self) -> set[tuple[ObjectKind, Digest]]:
        """Everything that is named by a digest."""
        kinds = (ObjectKind.TREE, ObjectKind.PLACEMENT)
        of_members = {(kind, draft.tree) for draft in self.drafts for kind in kinds}
        return {(ObjectKind.IMAGE, self.digest), *of_members}


class _Move:
    """Takes the new place of one chunk of a draft."""

    def __init__(self, draft: Draft, number: int) -> None:
        self._draft = draft
        self._number = number

    def place(self, entry: int, digests: Sequence[bytes], places: Sequence[Place]) -> None:
        """See `PlaceTaker.place`."""
        (place,), ours, number = places, self._draft.places, self._number
        ours.pack[number] = place.pack
        ours.offset[number] = place.offset
        ours.stored_bytes[number] = place.stored_bytes
        ours.codec[number] = place.codec


def _batch_of(plain: bytes, digest: bytes, page_bytes: int) -> Batch:
    padding = -len(plain) % page_bytes
    view = page_aligned(len(plain) + padding)
    view[: len(plain)] = plain
    return Batch([Chunk(0, [Span(view, 0, len(view))], len(plain), padding)], [digest])
