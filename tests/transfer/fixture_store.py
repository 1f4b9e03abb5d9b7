"""Small stores made by hand from the format alone, and what is to be found after a pull."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from imgfmt import layout, placement
from imgfmt.chunking import Cutter, Profile, page_marks
from imgfmt.codec import RAW, ZSTD, encode_zstd
from imgfmt.digest import Digest, digest_of
from imgfmt.image import Image, Member, Rule, Variants
from imgfmt.pack import PackTable, encode_header, encode_tail
from imgfmt.store_record import StoreRecord
from imgfmt.tree import Entry, EntryType, FileContent, build_tree
from transfer.catalog import Catalog, MemberContent, init_store, open_catalog
from transfer.config import TransferConfig
from transfer.store.posix import PosixStore

KIB, MIB = 1024, 1024 * 1024
PAGE = 4096
PROFILE = Profile()
CONFIG = TransferConfig(block_bytes=2 * MIB, max_memory_bytes=16 * MIB, n_threads=4, fsync=False)

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end."""
    return asyncio.run(work)


def noise(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that no codec shrinks and no chunk repeats."""
    return np.random.default_rng(seed).bytes(n_bytes)


def text(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that zstd shrinks a lot, and no page is like another."""
    words = np.random.default_rng(seed).integers(0, 4, n_bytes, dtype=np.uint8)
    return (words + 97).tobytes()


@dataclass(frozen=True)
class Node:
    """One entry of a tree to make. A link has a `target`, another name of a file `same_as`."""

    content: bytes | None = None
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 1_600_000_000_123_456_789
    target: bytes = b""
    same_as: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def type(self) -> EntryType:
        """What the entry is."""
        if self.target:
            return EntryType.SYMLINK
        return EntryType.DIRECTORY if self.content is None and not self.same_as else EntryType.FILE


Nodes = Mapping[bytes, Node]
"""Entries by path; the root's is empty and may be left out, as may other directories."""


def directory(mode: int = 0o755, **given: Any) -> Node:
    """A directory."""
    return Node(mode=mode, **given)


def link(target: bytes, **given: Any) -> Node:
    """A symbolic link."""
    return Node(mode=0o777, target=target, **given)


class SpyStore(PosixStore):
    """Notes what is read from packs, and calls `before_read` before each read of one."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.before_read: Callable[[], Coroutine[Any, Any, None]] | None = None

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        if key.startswith(layout.PACKS):
            self.reads.append((key, offset, len(buffer)))
            if self.before_read is not None:
                await self.before_read()
        await super().read_into(key, offset, buffer)


@dataclass
class Packed:
    """Where a chunk lies."""

    pack: int
    offset: int
    stored_bytes: int
    codec: int


@dataclass
class FixtureStore:
    """A store below `root`. Chunks go into packs of `chunks_a_pack`, equal ones once.

    The tables of packs with `lying` call each pack's first chunk by another name.
    """

    root: Path
    codec: int = RAW
    chunks_a_pack: int = 8
    page_bytes: int = PAGE
    lying: bool = False
    packs: list[bytes] = field(default_factory=list)
    places: dict[bytes, Packed] = field(default_factory=dict)
    store: SpyStore = field(init=False)
    catalog: Catalog = field(init=False)

    def __post_init__(self) -> None:
        self.store = SpyStore(str(self.root))
        run(init_store(self.store, StoreRecord(uuid=bytes(16), concurrent_writers=True)))
        self.catalog = run(open_catalog(self.store))

    def close(self) -> None:
        """End the store's threads."""
        self.store.close()

    def pack_paths(self) -> list[Path]:
        """The files of the packs, in the order in which they were written."""
        return [self.root / layout.pack_key(name) for name in self.packs]

    def content(self, tree: Digest) -> MemberContent:
        """A tree and its placement, read anew."""
        return run(self.catalog.content(tree))

    def add_record(self, record: Image | Variants) -> Digest:
        """Write an image or variants."""
        raw = record.encode()
        digest = digest_of(raw)
        run(self.store.put(layout.image_key(digest), [raw]))
        return digest

    def add_image(
        self, *trees: Digest, names: Sequence[str] = (), compat: tuple[Rule, ...] = ()
    ) -> Digest:
        """Write an image of these trees; a single one is called `main`."""
        numbered = [f"rank-{i}" for i in range(len(trees))]
        called = names or (["main"] if len(trees) == 1 else numbered)
        members = tuple(Member(name, tree) for name, tree in zip(called, trees, strict=True))
        return self.add_record(Image(members, compat))

    def add(self, nodes: Nodes) -> Digest:
        """Write an image with one tree."""
        return self.add_image(self.add_tree(nodes))

    def add_tree(self, nodes: Nodes, *, fresh: bool = False) -> Digest:
        """Write packs, a tree and its placement. With `fresh` no chunk is used again."""
        if fresh:
            self.places.clear()
        ordered = _ordered(nodes)
        entries = _entries(ordered)
        contents: dict[int, FileContent] = {}
        chunks: list[bytes] = []
        for index, (_, node) in enumerate(ordered):
            if node.content:
                contents[index], of_file = _cut(node.content)
                chunks += of_file
        encoded = build_tree(entries, contents, PROFILE)
        run(self.store.put(layout.tree_key(encoded.digest), encoded.pieces))
        self._place(encoded.digest, chunks)
        return encoded.digest

    def _place(self, tree: Digest, chunks: Sequence[bytes]) -> None:
        digests = [digest_of(chunk).raw for chunk in chunks]
        new = {d: c for d, c in zip(digests, chunks, strict=True) if d not in self.places}
        items = list(new.items())
        for i in range(0, len(items), self.chunks_a_pack):
            self._write_pack(dict(items[i : i + self.chunks_a_pack]))
        found = [self.places[digest] for digest in digests]
        raw_digests = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)
        made = placement.build(
            tree,
            np.frombuffer(b"".join(self.packs), np.uint8).reshape(-1, 16),
            np.array([p.pack for p in found], "u4"),
            np.array([p.offset for p in found], "u8"),
            np.array([p.stored_bytes for p in found], "u4"),
            np.array([p.codec for p in found], "u1"),
            raw_digests,
            self.page_bytes,
        )
        run(self.store.put(layout.placement_key(tree), placement.encode(made)))

    def _write_pack(self, chunks: Mapping[bytes, bytes]) -> None:
        name = os.urandom(16)
        number = len(self.packs)
        self.packs.append(name)
        payload = bytearray(encode_header(name, self.page_bytes))
        for i, (digest, plain) in enumerate(chunks.items()):
            zstd = self.codec == ZSTD and i % 4 != 3  # so that a pack has both
            stored = encode_zstd([plain]) if zstd else plain
            if not zstd:
                payload += bytes(-len(payload) % self.page_bytes)
            codec = ZSTD if zstd else RAW
            self.places[digest] = Packed(number, len(payload), len(stored), codec)
            payload += stored
        end = len(payload)
        payload += bytes(-len(payload) % self.page_bytes)
        tail = encode_tail(self._table(name, chunks), end)
        run(self.store.put(layout.pack_key(name), [payload, tail]))

    def _table(self, name: bytes, chunks: Mapping[bytes, bytes]) -> PackTable:
        places = [self.places[digest] for digest in chunks]
        rows = [i for i, place in enumerate(places) if place.codec]
        plain = list(chunks.values())
        names = np.array([list(digest) for digest in chunks], "u1")
        names[0] ^= int(self.lying)
        return PackTable(
            pack=name,
            page_bytes=self.page_bytes,
            names=names,
            stored_bytes=np.array([p.stored_bytes for p in places], "u4"),
            encoded_rows=np.array(rows, "u4"),
            encoded_codecs=np.full(len(rows), ZSTD, "u1"),
            encoded_plain_bytes=np.array([len(plain[i]) for i in rows], "u4"),
        )


def _ordered(nodes: Nodes) -> list[tuple[bytes, Node]]:
    """Entries by path in the order of SPEC.md 5.1, missing directories added."""
    whole = {b"": directory(), **nodes}
    for path in nodes:
        while b"/" in path:
            path = path.rpartition(b"/")[0]
            whole.setdefault(path, directory())
    ordered = [(b"", whole.pop(b""))]
    children: dict[bytes, list[bytes]] = {}
    for path in sorted(whole):
        children.setdefault(path.rpartition(b"/")[0], []).append(path)
    for path, _ in ordered:  # grows on the way
        ordered += [(child, whole[child]) for child in children.get(path, [])]
    return ordered


def _entries(ordered: Sequence[tuple[bytes, Node]]) -> list[Entry]:
    index = {path: i for i, (path, _) in enumerate(ordered)}
    made = []
    for own, (path, node) in enumerate(ordered):
        parent, _, name = path.rpartition(b"/")
        group = index[node.same_as] if node.same_as else own
        first = ordered[group][1]
        made.append(
            Entry(
                parent=index[parent], name=name, type=node.type, mode=first.mode,
                uid=first.uid, gid=first.gid, mtime_s=first.mtime_ns // 10**9,
                mtime_ns=first.mtime_ns % 10**9, size_bytes=len(node.target or node.content or b""),
                group=group, target=node.target, xattrs=node.xattrs,
            )
        )  # fmt: skip
    return made


def _cut(content: bytes) -> tuple[FileContent, list[bytes]]:
    """A file's cuts and the bytes of its chunks."""
    cutter = Cutter(PROFILE, len(content))
    padded = content + bytes(-len(content) % PAGE)
    found = [cutter.feed(page_marks(padded, PROFILE)), cutter.finish()]
    chunks = [run for cuts in found for run in cuts.chunks]
    holes = [run for cuts in found for run in cuts.holes]
    extents: list[tuple[int, int]] = []
    taken = 0
    for hole in holes:
        before = sum(run.start < hole.start for run in chunks)
        extents.append((before - taken, hole.pages))
        taken = before
    if taken < len(chunks):
        extents.append((len(chunks) - taken, 0))
    plain = [content[r.start * PAGE : (r.start + r.pages) * PAGE] for r in chunks]
    made = FileContent(
        np.frombuffer(b"".join(digest_of(c).raw for c in plain), np.uint8).reshape(-1, 32),
        np.array([r.pages for r in chunks], "u2"),
        np.array([n for n, _ in extents], "u4"),
        np.array([n for _, n in extents], "u8"),
    )
    return made, plain


def contents(root: Path | str) -> dict[bytes, bytes | None]:
    """All paths below a directory: bytes of files, targets of links, None for directories."""
    found: dict[bytes, bytes | None] = {}
    top = os.fsencode(root)
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            relative = os.path.relpath(path, top)
            if stat.S_ISLNK(mode):
                found[relative] = os.readlink(path)
            elif stat.S_ISDIR(mode):
                found[relative] = None
            else:
                with open(path, "rb") as file:
                    found[relative] = file.read()
    return found


def expected(nodes: Nodes) -> dict[bytes, bytes | None]:
    """What `contents` should find of these."""
    found: dict[bytes, bytes | None] = {}
    for path, node in _ordered(nodes)[1:]:
        first = nodes[node.same_as] if node.same_as else node
        found[path] = first.target or first.content
    return found


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def after(n_calls: int, event: asyncio.Event) -> Callable[[], Coroutine[Any, Any, None]]:
    """Something to be called; it sets the event the `n_calls`-th time."""
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1
        if calls == n_calls:
            event.set()

    return count
