"""Verify: read back what images need, and tell all that is damaged. Changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from imgfmt import index, layout
from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, InvalidImage, NotFound, Unsupported
from imgfmt.image import Image
from imgfmt.pack import check_header
from imgfmt.placement import locate
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.execute import Executor, each
from transfer.plan import ChunkTable, Numbers
from transfer.progress import Clock, PhaseClock, Progress, Silent
from transfer.store.base import ObjectFacts
from transfer.threads import Threads

_DAMAGE = (NotFound, CorruptData, InvalidImage, Unsupported)
"""What says something of the object; other errors say something of the store or of us."""


class DamageKind(StrEnum):
    """What is damaged or missing."""

    REFERENCE = "reference"
    IMAGE = "image"
    TREE = "tree"
    PLACEMENT = "placement"
    PACK = "pack"
    CHUNK = "chunk"
    INDEX = "index"


_KINDS = {
    layout.REFS: DamageKind.REFERENCE,
    layout.IMAGES: DamageKind.IMAGE,
    layout.TREES: DamageKind.TREE,
    layout.PLACEMENTS: DamageKind.PLACEMENT,
    layout.PACKS: DamageKind.PACK,
    layout.INDEX: DamageKind.INDEX,
}


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file that can't be had. An empty path means the whole member."""

    image: Digest
    member: str
    path: bytes


@dataclass(frozen=True, slots=True)
class Damage:
    """One object that is not as it must be, `name` being a digest, a pack's name or a reference.

    `pack` is the pack that a chunk was read from; `files` are those that are lost by it. Nothing is
    in the place of a pack that is `gone`.
    """

    kind: DamageKind
    name: str
    reason: str
    pack: str = ""
    files: tuple[DamagedFile, ...] = ()
    gone: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and all that is damaged. `chunks` counts each as often as trees name it."""

    images: int
    trees: int
    packs: int
    chunks: int
    fetched_bytes: int
    damages: tuple[Damage, ...]
    seconds: Mapping[str, float]

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damages


async def verify(
    catalog: Catalog,
    digests: Sequence[Digest],
    *,
    config: TransferConfig,
    progress: Progress | None = None,
    now_s: Clock = time.monotonic,
) -> VerifyReport:
    """Check these images or variants, and all that they need: each range of a pack is read once."""
    job = _Verify(catalog, config, progress or Silent(), PhaseClock(now_s))
    return await job.run(digests)


async def verify_all(
    catalog: Catalog,
    *,
    config: TransferConfig,
    progress: Progress | None = None,
    now_s: Clock = time.monotonic,
) -> VerifyReport:
    """As `verify`, for every image in the store; and that what references point to exists.

    What lies in the place of an object and is none is damage too, whether or not an image needs it.
    """
    job = _Verify(catalog, config, progress or Silent(), PhaseClock(now_s))
    listed = await job.check_listings()
    await job.check_references(listed[layout.REFS])
    await job.check_index(listed[layout.INDEX])
    found = [layout.digest_of_key(facts.key) for facts in listed[layout.IMAGES]]
    return await job.run([digest for digest in found if digest])


def _reference_of(key: str) -> tuple[str, str] | None:
    """Name and tag of a reference by the key of its state: one generation of it, or in a bucket."""
    parsed = layout.parse_generation_key(key) or layout.parse_generation_key(f"{key}/{0:016d}")
    return parsed[:2] if parsed else None


class _Collector:
    """A sink that only takes note of damage: of chunks, and of those whose pack is gone."""

    def __init__(self) -> None:
        self.found: list[tuple[Numbers, str]] = []
        self.without_pack: list[Numbers] = []

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """Chunks that are as they must be."""

    def damaged(self, numbers: Numbers, error: CorruptData | NotFound) -> None:
        """See `Sink.damaged`."""
        if isinstance(error, NotFound):
            self.without_pack.append(numbers)
        else:
            self.found.append((numbers, str(error)))


class _Verify:
    """One verification. `users` of a tree are the members that are made of it."""

    def __init__(
        self, catalog: Catalog, config: TransferConfig, progress: Progress, clock: PhaseClock
    ) -> None:
        self._catalog = catalog
        self._config = config
        self._progress = progress
        self._clock = clock
        self._damages: list[Damage] = []
        self._misplaced: list[tuple[DamageKind, str]] = []
        self._users: dict[Digest, list[DamagedFile]] = {}
        self._contents: list[MemberContent] = []

    def _note(self, kind: DamageKind, name: object, reason: object, **more: Any) -> None:
        self._damages.append(Damage(kind, str(name), str(reason), **more))

    async def check_listings(self) -> dict[str, list[ObjectFacts]]:
        """List all kinds of objects, and take note of what is none for `run` to tell."""
        listed: dict[str, list[ObjectFacts]] = {}
        for prefix, kind in _KINDS.items():
            listed[prefix] = []
            try:
                listed[prefix] = await self._catalog.store.list_objects(prefix)
            except _DAMAGE as error:
                self._note(kind, prefix, error)
            for facts in listed[prefix]:
                if not facts.is_object:
                    self._misplaced.append((kind, facts.key))
        return listed

    async def _note_misplaced(self) -> None:
        """Tell what is in the place of objects, unless it was told of those by their names."""
        told = {(damage.kind, damage.name) for damage in self._damages}
        for kind, key in self._misplaced:
            name, reference = key, layout.parse_generation_key(key)
            if digest := layout.digest_of_key(key):
                name = str(digest)
            elif pack := layout.pack_name_of(key):
                name = pack.hex()
            elif reference:
                name = f"{reference[0]}:{reference[1]}"
            if (kind, name) in told:
                continue
            try:
                await self._catalog.store.facts(key)
            except _DAMAGE as error:
                self._note(kind, name, error)

    async def check_references(self, listed: Sequence[ObjectFacts]) -> None:
        """Check that every reference can be read, and that its target exists."""
        store = self._catalog.store
        for name, tag in sorted(set(filter(None, (_reference_of(facts.key) for facts in listed)))):
            try:
                state = await store.read_reference(name, tag)
            except _DAMAGE as error:
                self._note(DamageKind.REFERENCE, f"{name}:{tag}", error)
                continue
            target = state.record.target if state else None
            if target and not await self._is_there(layout.image_key(target)):
                reason = f"it points to image {target}, which does not exist"
                self._note(DamageKind.REFERENCE, f"{name}:{tag}", reason)

    async def check_index(self, listed: Sequence[ObjectFacts]) -> None:
        """Check that every segment of the index can be read."""
        for facts in listed:
            if not facts.is_object or not layout.is_object_key(facts.key):
                continue
            try:
                index.decode(await self._catalog.read(facts.key), self._catalog.named(facts.key))
            except NotFound:  # joined with others meanwhile
                continue
            except _DAMAGE as error:
                self._note(DamageKind.INDEX, facts.key, error)

    async def _is_there(self, key: str) -> bool:
        """Whether anything is in the object's place; what it is is told elsewhere."""
        try:
            return await self._catalog.store.facts(key) is not None
        except CorruptData:
            return True

    async def run(self, digests: Sequence[Digest]) -> VerifyReport:
        """Check all that these images need."""
        self._progress.phase("resolve", 0)
        n_images = await self._check_images(digests)
        for tree in self._users:
            await self._check_tree(tree)
        self._clock.end("resolve")
        n_packs = n_chunks = fetched_bytes = 0
        if self._contents:
            with Threads("verify", self._config.n_threads) as threads:
                given = (self._catalog, self._contents, threads, self._config)
                executor = await threads.run(Executor, *given)
                fetched_bytes = await self._check_chunks(executor)
            n_packs, n_chunks = len(executor.table.packs), len(executor.table)
        await self._note_misplaced()
        return VerifyReport(
            images=n_images,
            trees=len(self._users),
            packs=n_packs,
            chunks=n_chunks,
            fetched_bytes=fetched_bytes,
            damages=tuple(self._damages),
            seconds=self._clock.total(),
        )

    async def _check_images(self, digests: Sequence[Digest]) -> int:
        """Read images, and those that variants name; returns how many there are."""
        pending = list(dict.fromkeys(digests))
        for digest in pending:  # grows on the way
            try:
                image = await self._catalog.image(digest)
            except _DAMAGE as error:
                self._note(DamageKind.IMAGE, digest, error)
                continue
            if isinstance(image, Image):
                for member in image.members:
                    user = DamagedFile(digest, member.name, b"")
                    self._users.setdefault(member.tree, []).append(user)
            else:
                named = (variant.digest for variant in image.images)
                pending += [d for d in dict.fromkeys(named) if d not in pending]
        return len(pending)

    async def _check_tree(self, digest: Digest) -> None:
        """Read a tree and its placement."""
        users = tuple(self._users[digest])
        kind = DamageKind.TREE
        try:
            tree = await self._catalog.tree(digest)
            kind = DamageKind.PLACEMENT
            placement = await self._catalog.placement(digest, tree.n_chunks)
            locate(placement, tree.chunk_bytes, self._catalog.record.page_bytes)
        except _DAMAGE as error:
            self._note(kind, digest, error, files=users)
        else:
            self._contents.append(MemberContent(tree, placement))

    async def _check_chunks(self, executor: Executor) -> int:
        """Read all chunks, then the tables of the packs that they lie in; returns bytes read."""
        total_bytes = int(executor.table.plain_bytes.sum(dtype=np.uint64))
        self._progress.phase("verify", total_bytes)
        sink = _Collector()
        stats = await executor.read(sink, progress=self._progress)
        self._clock.end("verify")
        table = executor.table
        sound = np.ones(len(table), dtype=np.bool_)
        gone = self._note_gone(table, sink.without_pack)
        for numbers, reason in sink.found:
            sound[numbers] = False
            first = int(numbers[0])
            self._note(
                DamageKind.CHUNK,
                Digest(table.digest[first].tobytes()),
                reason,
                pack=table.packs[table.pack[first]].tobytes().hex(),
                files=tuple(dict.fromkeys(self._files(table, numbers))),
            )
        self._progress.phase("packs", 0)
        by_pack = np.argsort(table.pack, kind="stable")
        edges = np.searchsorted(table.pack[by_pack], np.arange(len(table.packs) + 1))

        async def check(pack_index: int) -> None:
            chunks = by_pack[edges[pack_index] : edges[pack_index + 1]]
            await self._check_pack(table, pack_index, chunks[sound[chunks]])

        left = (pack for pack in range(len(table.packs)) if pack not in gone)
        await each(left, check, self._config.n_threads)
        self._clock.end("packs")
        return stats.fetched_bytes

    def _note_gone(self, table: ChunkTable, lost: Sequence[Numbers]) -> set[int]:
        """Tell of packs that do not exist, once each, all of whose chunks are `lost`."""
        if not lost:
            return set()
        numbers = np.unique(np.concatenate(lost))
        gone = np.unique(table.pack[numbers]).tolist()
        for pack in gone:
            name = table.packs[pack].tobytes()
            chunks = numbers[table.pack[numbers] == pack]
            n_lost = len(np.unique(table.offset[chunks]))
            reason = f"{self._catalog.named(f'pack {name.hex()}')} does not exist"
            self._note(
                DamageKind.PACK,
                name.hex(),
                f"{reason}: {n_lost} chunks that images need are lost",
                gone=True,
                files=tuple(dict.fromkeys(self._files(table, chunks))),
            )
        return set(gone)

    def _files(self, table: ChunkTable, numbers: Numbers) -> Iterator[DamagedFile]:
        """The files that hold any of these chunks, by all their names."""
        placed = (table.tree_of(number) for number in numbers.tolist())
        entries = ((i, int(self._contents[i].tree.chunk_entry[n])) for i, n in placed)
        for i, entry in dict.fromkeys(entries):
            content = self._contents[i]
            names = np.flatnonzero(content.tree.columns["group"] == entry).tolist()
            for user in self._users[content.placement.tree]:
                for name in names:
                    yield replace(user, path=content.tree.path(name))

    async def _check_pack(self, table: ChunkTable, pack_index: int, chunks: Numbers) -> None:
        """Check a pack's header and table, and that its table has these chunks, which are sound."""
        catalog = self._catalog
        name = table.packs[pack_index].tobytes()
        page_bytes = catalog.record.page_bytes
        header = bytearray(page_bytes)
        try:
            await catalog.store.read_into(layout.pack_key(name), 0, memoryview(header))
            check_header(header, name, page_bytes, catalog.named(f"pack {name.hex()}"))
            found = await catalog.pack_table(name)
        except _DAMAGE as error:
            self._note(DamageKind.PACK, name.hex(), error)
            return
        rows = np.searchsorted(found.offsets, table.offset[chunks])
        listed = rows < len(found)
        rows[~listed] = 0
        listed &= found.offsets[rows] == table.offset[chunks]
        listed &= (found.names[rows] == table.digest[chunks]).all(axis=1)
        if not listed.all():
            reason = f"its table does not have {int((~listed).sum())} of the chunks that it holds"
            self._note(DamageKind.PACK, name.hex(), reason)
