"""Copy an image from one store to another: its digest stays, and only packs that are missing move.

Packs are copied whole and keep their names, so the placement stays true and a later copy finds them
again. Every chunk of a copied pack is checked on the way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from imgfmt import index, layout, placement
from imgfmt.codec import RAW, decode_into
from imgfmt.digest import Digest, raw_digest
from imgfmt.errors import Conflict, CorruptData, InvalidImage, InvalidInput, NotFound
from imgfmt.image import Image, Variants
from imgfmt.pack import PackTable
from imgfmt.reference import ImageRef
from transfer.buffers import BufferPool
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.execute import each
from transfer.leases import WriterLease, read_doomed
from transfer.naming import tag
from transfer.progress import PhaseClock, Progress, Silent
from transfer.pushing.indexing import write_segment
from transfer.references import whoami
from transfer.tasks import beside, finished
from transfer.threads import Threads


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did. `moved_bytes` are whole packs, `metadata_bytes` what else was written."""

    digest: Digest
    reference: str
    packs_moved: int
    packs_present: int
    moved_bytes: int
    metadata_bytes: int
    seconds: dict[str, float]


async def copy(
    source: Catalog,
    target: Catalog,
    digest: Digest,
    name: str,
    reference_tag: str,
    *,
    config: TransferConfig,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy an image, or variants with all their images, and point `name:reference_tag` at it.

    Raises CorruptData if the source is damaged, Conflict if collectors of the target are about to
    delete what is needed, InvalidInput if the stores have different page sizes.
    """
    if source.record.page_bytes != target.record.page_bytes:
        raise InvalidInput(
            f"store {source.store.url} has pages of {source.record.page_bytes} bytes and store"
            f" {target.store.url} of {target.record.page_bytes}; pull the image and push it there"
        )
    ttl_s = min(config.lease_ttl_s, target.record.lease_ttl_s)
    lease = WriterLease(target, "cp", whoami(), ttl_s)
    work = _Copy(source, target, config, progress or Silent())
    try:
        await lease.take()
        await beside(work.run(digest), lease.keep())
        naming = await tag(target, ImageRef(digest=digest), name, reference_tag, config=config)
        work.clock.end("publish")
    finally:
        work.threads.close()
        await finished(lease.drop())
    counts = (work.packs_moved, work.packs_present, work.moved_bytes, work.metadata_bytes)
    return CopyReport(digest, naming.reference, *counts, work.clock.total())


class _Copy:
    """One copy. Counts are complete after `run`."""

    def __init__(
        self, source: Catalog, target: Catalog, config: TransferConfig, progress: Progress
    ) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._pool = BufferPool(config.n_slots, config.block_bytes)
        self._n_workers = max(1, config.n_slots // 2)
        self._tables: list[PackTable] = []
        self.threads = Threads("copy", config.n_threads)
        self.clock = PhaseClock(time.monotonic)
        self.packs_moved = self.packs_present = self.moved_bytes = self.metadata_bytes = 0

    async def run(self, digest: Digest) -> None:
        """Bring everything over that `digest` needs; the object of that digest comes last."""
        found = await self._source.image(digest)
        parts = {digest: found}
        if isinstance(found, Variants):
            parts |= {v.digest: await self._source.image(v.digest) for v in found.images}
        packs: dict[bytes, None] = {}
        keys: list[str] = []
        for part, image in parts.items():
            for member in image.members if isinstance(image, Image) else ():
                tree = await self._source.tree(member.tree)
                placed = await self._source.placement(member.tree, tree.n_chunks)
                packs |= dict.fromkeys(name.tobytes() for name in placed.packs)
                keys += [layout.tree_key(member.tree), layout.placement_key(member.tree)]
            keys.append(layout.image_key(part))
        self.clock.end("resolve")
        await self._copy_packs(list(packs))
        self.clock.end("copy")
        for key in sorted(dict.fromkeys(keys), key=layout.image_key(digest).__eq__):
            await self._copy_object(key)

    async def _copy_packs(self, names: list[bytes]) -> None:
        doomed = (await read_doomed(self._target)).packs
        missing: list[tuple[bytes, int]] = []
        for name in names:
            key = layout.pack_key(name)
            there, here = await self._target.store.facts(key), await self._source.store.facts(key)
            if name in doomed:
                raise Conflict(
                    f"{self._target.named(f'pack {name.hex()}')} is about to be collected; copy"
                    " again when the collector is done"
                )
            if there is None:
                missing.append((name, here.size_bytes if here else 0))
        self.packs_present = len(names) - len(missing)
        self._progress.phase("copy", sum(size_bytes for _, size_bytes in missing))
        await each(iter(missing), self._copy_pack, self._n_workers)
        if self._tables:
            _, size_bytes = await write_segment(self._target, index.build(self._tables))
            self.metadata_bytes += size_bytes

    async def _copy_pack(self, wanted: tuple[bytes, int]) -> None:
        """Copy one pack block by block; it appears only if all its chunks are right."""
        name, _ = wanted
        table = await self._source.pack_table(name)
        key = layout.pack_key(name)
        facts = await self._source.store.facts(key)
        assert facts is not None
        check = _PackCheck(table, self._source.named(f"pack {name.hex()}"))
        sink = await self._target.store.open_pack(key)
        try:
            for offset in range(0, facts.size_bytes, self._pool.slot_bytes):
                size_bytes = min(self._pool.slot_bytes, facts.size_bytes - offset)
                with await self._pool.acquire() as lease:
                    view = lease.view[:size_bytes]
                    await self._source.store.read_into(key, offset, view)
                    await self.threads.run(check.take, offset, view)
                    await sink.write(offset, [view])
                self._progress.advance(size_bytes)
            await sink.commit()
        except BaseException:
            await finished(sink.abort())
            raise
        self._tables.append(table)
        self.packs_moved += 1
        self.moved_bytes += facts.size_bytes

    async def _copy_object(self, key: str) -> None:
        """Copy a tree, placement or image, unless the target has it, and not damaged."""
        raw = await self._source.read(key)
        try:
            if key.startswith(layout.PLACEMENTS):
                there = await self._places(key)
            else:
                there = await self._target.holds(key, len(raw), self.threads)
        except (NotFound, CorruptData, InvalidImage):
            there = False
        if not there:
            await self._target.store.put(key, [raw])
            self.metadata_bytes += len(raw)

    async def _places(self, key: str) -> bool:
        """Whether every pack of the target's own placement exists, so that it may stay."""
        placed = placement.decode(await self._target.read(key), self._target.named(key))
        for name in placed.packs:
            if await self._target.store.facts(layout.pack_key(name.tobytes())) is None:
                return False
        return True


class _PackCheck:
    """Checks the chunks of a pack as its bytes come by in order."""

    def __init__(self, table: PackTable, what: str) -> None:
        self._table = table
        self._what = what
        self._rows: Iterator[int] = iter(range(len(table)))
        self._row = next(self._rows, None)
        self._hasher = blake3()
        self._stored = bytearray()
        self._taken = 0

    def take(self, offset: int, view: memoryview) -> None:
        """The pack's bytes from `offset` on. Raises CorruptData naming the chunk at fault."""
        end = offset + len(view)
        while self._row is not None:
            begin = int(self._table.offsets[self._row]) + self._taken
            length = int(self._table.stored_bytes[self._row]) - self._taken
            if begin >= end:
                return
            piece = view[begin - offset : min(begin + length, end) - offset]
            if int(self._table.codecs[self._row]) == RAW:
                self._hasher.update(piece)
            else:
                self._stored += piece
            self._taken += len(piece)
            if len(piece) < length:
                return
            self._finish_chunk(self._row)
            self._row = next(self._rows, None)

    def _finish_chunk(self, row: int) -> None:
        codec, name = int(self._table.codecs[row]), self._table.names[row].tobytes()
        found = self._hasher.digest()
        if codec != RAW:
            plain = bytearray(int(self._table.plain_bytes[row]))
            decode_into(codec, self._stored, memoryview(plain))
            found = raw_digest([plain])
        if found != name:
            raise CorruptData(
                f"{self._what} is damaged: its chunk {Digest(name).short} hashes to"
                f" {Digest(found).short}; nothing of it was copied"
            )
        self._hasher.reset()
        self._stored.clear()
        self._taken = 0
