"""The members of an image that is being pushed: their trees, and where their chunks lie so far."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from imgfmt import layout, placement
from imgfmt.chunking import Profile
from imgfmt.codec import decode_into
from imgfmt.digest import Digest, Octets, raw_digest
from imgfmt.errors import Conflict, CorruptData, NotFound
from imgfmt.image import Member
from imgfmt.placement import Placement
from imgfmt.tree import Tree, build_tree
from transfer.catalog import Catalog
from transfer.execute import each
from transfer.oserrors import printable, translate
from transfer.pushing.contents import ChunkPlaces, ContentRecorder
from transfer.pushing.known import N_LOOKERS, KnownChunks
from transfer.pushing.scan import Listing, changed


@dataclass(slots=True)
class Draft:
    """One member. `pieces` are its tree's bytes.

    `read_chunk` gives a chunk's verified plain bytes by its number, for storing it once more.
    """

    member: Member
    logical_bytes: int
    zero_bytes: int
    places: ChunkPlaces
    pieces: list[Octets]
    read_chunk: Callable[[int], Awaitable[bytes]]

    @property
    def tree(self) -> Digest:
        """The tree's digest."""
        return self.member.tree

    def placement(self, pack_names: list[bytes], page_bytes: int) -> Placement:
        """The placement as things are now; `pack_names` by the packer's numbers."""
        names = np.frombuffer(b"".join(pack_names), dtype=np.uint8).reshape(-1, 16)
        p = self.places
        return placement.build(
            self.tree, names, p.pack, p.offset, p.stored_bytes, p.codec, p.digest, page_bytes
        )

    def hit_by(self, packs: frozenset[int]) -> list[int]:
        """Numbers of the chunks that lie in one of `packs`."""
        wanted = np.array(sorted(packs), dtype=np.uint32)
        return np.flatnonzero(np.isin(self.places.pack, wanted)).tolist()


def draft_of_listing(
    listing: Listing,
    contents: ContentRecorder,
    profile: Profile,
    as_member: Callable[[Digest], Member],
) -> Draft:
    """The draft of a directory whose chunks are all recorded in `contents`, which is finished."""
    files, places = contents.finish()
    encoded = build_tree(listing.entries, files, profile)
    head_tree: list[Tree] = []

    async def read_chunk(number: int) -> bytes:
        if not head_tree:
            head_tree.append(Tree(b"".join(encoded.pieces), f"tree {encoded.digest.short}"))
        tree = head_tree[0]
        path = listing.paths[int(tree.chunk_entry[number])]
        raw = _read_range(path, int(tree.chunk_offset[number]), int(tree.chunk_bytes[number]))
        if raw_digest([raw]) != tree.chunk_digest[number].tobytes():
            raise changed(path)
        return raw

    return Draft(
        as_member(encoded.digest),
        listing.logical_bytes,
        encoded.zero_bytes,
        places,
        encoded.pieces,
        read_chunk,
    )


async def draft_of_member(catalog: Catalog, member: Member, known: KnownChunks) -> Draft:
    """The draft of a member that is in the store already.

    Raises NotFound if something of it is gone; `read_chunk` raises Conflict if it goes meanwhile.
    """
    content = await catalog.content(member.tree)
    tree, placed = content.tree, content.placement
    located = placement.locate(placed, tree.chunk_bytes, catalog.record.page_bytes)
    names = [name.tobytes() for name in placed.packs]
    await _check_exist(catalog, names, member)
    numbers = np.array([known.number(name) for name in names], dtype=np.uint32)
    places = ChunkPlaces(
        tree.chunk_digest,
        numbers[located.pack] if len(numbers) else located.pack,
        located.offset.astype(np.uint32),
        located.stored_bytes,
        located.codec,
    )

    async def read_chunk(number: int) -> bytes:
        stored = bytearray(int(places.stored_bytes[number]))
        name = known.names[int(places.pack[number])]
        key = layout.pack_key(name)
        try:
            await catalog.store.read_into(key, int(places.offset[number]), memoryview(stored))
        except NotFound as error:
            what = catalog.named(f"member {member.name}")
            raise Conflict(f"{what} was collected meanwhile; push its directory again") from error
        plain = bytearray(int(tree.chunk_bytes[number]))
        decode_into(int(places.codec[number]), stored, memoryview(plain))
        if raw_digest([plain]) != tree.chunk_digest[number].tobytes():
            raise CorruptData(f"{catalog.named(f'pack {name.hex()}')} has a chunk that is damaged")
        return bytes(plain)

    return Draft(member, tree.logical_bytes, tree.zero_bytes, places, [tree.raw], read_chunk)


async def _check_exist(catalog: Catalog, packs: Sequence[bytes], member: Member) -> None:
    async def look(name: bytes) -> None:
        if await catalog.store.facts(layout.pack_key(name)) is None:
            what = catalog.named(f"pack {name.hex()}")
            raise NotFound(f"{what} of member {member.name} is gone; push its directory again")

    await each(iter(packs), look, N_LOOKERS)


def _read_range(path: bytes, offset: int, length_bytes: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pread(descriptor, length_bytes, offset)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise changed(path) from error
    except OSError as error:
        raise translate(error, printable(path)) from error
