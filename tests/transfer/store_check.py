"""Reading a store in the plainest way: what references need is there, whole and in order."""

from __future__ import annotations

import os
from pathlib import Path

from imgfmt import layout
from imgfmt.codec import decode_into
from imgfmt.digest import Digest, raw_digest
from imgfmt.image import Image, Variants
from imgfmt.placement import locate
from imgfmt.tree import EntryType
from transfer.catalog import Catalog, MemberContent, open_catalog
from transfer.store.base import Store


async def chunks_of(catalog: Catalog, content: MemberContent) -> list[bytes]:
    """All chunks of a tree, each checked against its digest."""
    tree, placed = content.tree, content.placement
    places = locate(placed, tree.chunk_bytes, catalog.record.page_bytes)
    chunks: list[bytes] = []
    for number in range(tree.n_chunks):
        stored = bytearray(int(places.stored_bytes[number]))
        pack = layout.pack_key(placed.packs[places.pack[number]].tobytes())
        await catalog.store.read_into(pack, int(places.offset[number]), memoryview(stored))
        plain = bytearray(int(tree.chunk_bytes[number]))
        decode_into(int(places.codec[number]), stored, memoryview(plain))
        assert raw_digest([plain]) == tree.chunk_digest[number].tobytes()
        chunks.append(bytes(plain))
    return chunks


async def check_image(catalog: Catalog, digest: Digest) -> None:
    """Everything that an image, or variants, need exists; packs have tables; chunks verify."""
    image = await catalog.image(digest)
    if isinstance(image, Variants):
        for variant in image.images:
            await check_image(catalog, variant.digest)
        return
    for member in image.members:
        content = await catalog.content(member.tree)
        for name in content.placement.packs:
            await catalog.pack_table(name.tobytes())
        await chunks_of(catalog, content)


async def check_references(store: Store) -> dict[str, Digest]:
    """Check the image of every reference; returns what each points to."""
    catalog = await open_catalog(store)
    targets: dict[str, Digest] = {}
    for state in await store.list_references():
        if state.record.target is not None:
            targets[f"{state.record.name}:{state.record.tag}"] = state.record.target
    for digest in set(targets.values()):
        await check_image(catalog, digest)
    return targets


async def check_packs(store: Store) -> list[bytes]:
    """Every pack under its final name is whole; returns the digests of all their chunks."""
    catalog = await open_catalog(store)
    digests: list[bytes] = []
    for facts in await store.list_objects(layout.PACKS):
        name = layout.pack_name_of(facts.key)
        assert name is not None
        table = await catalog.pack_table(name)
        for row in range(len(table)):
            stored = bytearray(int(table.stored_bytes[row]))
            await store.read_into(facts.key, int(table.offsets[row]), memoryview(stored))
            plain = bytearray(int(table.plain_bytes[row]))
            decode_into(int(table.codecs[row]), stored, memoryview(plain))
            assert raw_digest([plain]) == table.names[row].tobytes()
            digests.append(table.names[row].tobytes())
    return digests


async def files_of(store: Store, digest: Digest, member: str = "main") -> dict[bytes, bytes]:
    """The bytes of all files of one member, by path; later names of a file have none."""
    catalog = await open_catalog(store)
    image = await catalog.image(digest)
    assert isinstance(image, Image)
    content = await catalog.content(next(m.tree for m in image.members if m.name == member))
    tree, chunks = content.tree, await chunks_of(catalog, content)
    files: dict[bytes, bytes] = {}
    for index, entry in enumerate(tree.entries()):
        if entry.type is EntryType.FILE:
            whole = bytearray(entry.size_bytes)
            for number in range(*tree.chunk_range(index)):
                offset = int(tree.chunk_offset[number])
                whole[offset : offset + len(chunks[number])] = chunks[number]
            files[tree.path(index)] = bytes(whole)
    return files


def files_below(root: Path) -> dict[bytes, bytes]:
    """The bytes of all files below a directory, by path."""
    top = os.fsencode(root)
    found: dict[bytes, bytes] = {}
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, top)] = file.read()
    return found
