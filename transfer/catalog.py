"""A store's objects by their meaning: opening and setting up stores, and reading checked objects.

Every object that a digest names is checked against it here, so nobody above sees one that is not.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from imgfmt import image as images
from imgfmt import layout, pack, placement
from imgfmt.chunking import Profile
from imgfmt.digest import Digest, Octets, digest_of
from imgfmt.errors import (
    Conflict,
    CorruptData,
    InvalidImage,
    InvalidInput,
    NotFound,
    Unsupported,
)
from imgfmt.image import Image, Variants
from imgfmt.pack import PackTable
from imgfmt.placement import Placement
from imgfmt.probe_record import ProbeRecord
from imgfmt.reference import ImageRef, TargetKind
from imgfmt.sizes import check_size
from imgfmt.store_record import StoreRecord
from imgfmt.tree import PEEK_BYTES, Tree, peek_totals
from transfer.store.base import Placed, Probed, Store
from transfer.tasks import both
from transfer.threads import Threads


async def init_store(
    store: Store, record: StoreRecord, *, allow_non_empty: bool = False
) -> StoreRecord:
    """Set up `store` by `record`. Raises InvalidInput if it is one already, or can't be one.

    Tries first what keeps two writers apart. What holds other things is refused unless
    `allow_non_empty`, and what lies in another store in any case: each would see the other's.
    """
    if await store.facts(layout.STORE_KEY) is not None:
        raise InvalidInput(f"{store.url} is a snapcask store already; nothing was changed")
    await _check_place(store, allow_non_empty=allow_non_empty)
    if isinstance(store, Probed):
        found = await store.probe()
    else:
        await probe_creation(store)
        found = {"exclusive-creation": "honoured"}
    if not await store.create(layout.STORE_KEY, [record.encode()]):
        raise Conflict(f"{store.url} was set up by someone else meanwhile")
    probed = ProbeRecord(time.time_ns(), found)
    await store.put(layout.PROBE_KEY, [probed.encode()])
    return record


async def _check_place(store: Store, *, allow_non_empty: bool) -> None:
    if not isinstance(store, Placed):
        return
    if (around := await store.enclosing_store()) is not None:
        raise InvalidInput(f"{store.url} lies in the store {around}; name a place outside of it")
    if not allow_non_empty and (found := await store.in_the_way()) is not None:
        raise InvalidInput(
            f"{store.url} is not empty, it holds {found}; name an empty place, or make it a store"
            " as it is with --allow-non-empty"
        )


async def probe_creation(store: Store) -> None:
    """Raise InvalidInput unless a key is created once only."""
    probe = f"{layout.TMP}probe-{secrets.token_hex(8)}"
    try:
        answers = [await store.create(probe, [b"probe"]) for _ in range(2)]
    finally:
        await store.delete(probe)
    if answers != [True, False]:
        raise InvalidInput(
            f"{store.url} does not honour exclusive creation; use another filesystem"
        )


@dataclass(frozen=True, slots=True)
class MemberContent:
    """One member's tree and where its chunks lie."""

    tree: Tree
    placement: Placement


class Catalog:
    """Typed reading from one store. Made by `open_catalog`."""

    def __init__(self, store: Store, record: StoreRecord) -> None:
        self.store = store
        self.record = record

    @property
    def profile(self) -> Profile:
        """How new trees are cut."""
        return Profile(self.record.page_bytes, self.record.profile)

    def named(self, what: str) -> str:
        """`what` with the store's name, for messages."""
        return f"{what} in store {self.store.url}"

    async def read(self, key: str) -> Octets:
        """A whole object, unless it is larger than one of its kind can be (InvalidImage)."""
        return await self.store.get(key, _size_check(key, self.named(key)))

    async def probe_record(self) -> ProbeRecord | None:
        """What `init` found, or None: a store may have no such record, or one for a newer version.

        Nothing depends on it.
        """
        try:
            raw = await self.read(layout.PROBE_KEY)
            return ProbeRecord.decode(raw, self.named(layout.PROBE_KEY))
        except (NotFound, CorruptData, InvalidImage, Unsupported):
            return None

    async def holds(self, key: str, size_bytes: int, threads: Threads) -> bool:
        """Whether the tree or image of this key and size is there: it is read back and hashed."""
        try:
            facts = await self.store.facts(key)
            if facts is None or facts.size_bytes != size_bytes:
                return False
            found = await self.store.get(key)
        except (NotFound, CorruptData):
            return False
        return await threads.run(digest_of, found) == layout.digest_of_key(key)

    async def _digested(self, key: str, digest: Digest, what: str) -> Octets:
        raw = await self.read(key)
        found = digest_of(raw)
        if found != digest:
            raise CorruptData(
                f"{self.named(what)} hashes to {found.short}; restore {key} from a copy"
            )
        return raw

    async def image(self, digest: Digest) -> Image | Variants:
        """The image or variants of this digest."""
        what = f"image {digest.short}"
        raw = await self._digested(layout.image_key(digest), digest, what)
        return images.decode_image_or_variants(raw, self.named(what))

    async def tree(self, digest: Digest) -> Tree:
        """The tree of this digest."""
        what = f"tree {digest.short}"
        return Tree(await self._digested(layout.tree_key(digest), digest, what), self.named(what))

    async def tree_totals(self, digest: Digest) -> tuple[int, int]:
        """Logical and zero bytes that a tree claims: only its beginning is read, some are large."""
        key, what = layout.tree_key(digest), self.named(f"tree {digest.short}")
        facts = await self.store.facts(key)
        if facts is None:
            raise NotFound(f"{what} does not exist")
        beginning = bytearray(min(facts.size_bytes, PEEK_BYTES))
        await self.store.read_into(key, 0, memoryview(beginning))
        return peek_totals(beginning, what)

    async def placement(self, digest: Digest, n_chunks: int | None = None) -> Placement:
        """Where the `n_chunks` chunks of a tree lie; without a number it is not compared."""
        what = self.named(f"placement of tree {digest.short}")
        found = placement.decode(await self.read(layout.placement_key(digest)), what)
        self._check_placement(found, digest, n_chunks)
        return found

    def _check_placement(self, found: Placement, digest: Digest, n_chunks: int | None) -> None:
        if found.tree != digest or n_chunks not in (None, found.n_chunks):
            what = self.named(f"placement of tree {digest.short}")
            raise CorruptData(f"{what} is that of another tree; run `snapcask index rebuild`")

    async def content(self, digest: Digest) -> MemberContent:
        """A tree and its placement."""
        tree, placed = await both(self.tree(digest), self.placement(digest))
        self._check_placement(placed, digest, tree.n_chunks)
        return MemberContent(tree, placed)

    async def pack_table(self, name: bytes) -> PackTable:
        """The chunk table of a pack, with one read where the table is of usual size."""
        key = layout.pack_key(name)
        what = self.named(f"pack {name.hex()}")
        facts = await self.store.facts(key)
        if facts is None:
            raise NotFound(f"{what} does not exist")
        tail = bytearray(min(facts.size_bytes, pack.TAIL_HINT_BYTES))
        await self.store.read_into(key, facts.size_bytes - len(tail), memoryview(tail))
        offset, length, digest = pack.parse_footer(bytes(tail[-64:]), facts.size_bytes, what)
        start = offset - (facts.size_bytes - len(tail))
        if start < 0:
            tail = bytearray(length)
            await self.store.read_into(key, offset, memoryview(tail))
            start = 0
        raw = bytes(memoryview(tail)[start : start + length])  # tables are kept, tails are not
        return pack.decode_table(raw, name, digest, self.record.page_bytes, offset, what)

    async def resolve(self, reference: ImageRef) -> Digest:
        """The digest that a reference means now. Raises NotFound, InvalidInput (ambiguous)."""
        if reference.digest is not None:
            if await self.store.facts(layout.image_key(reference.digest)) is None:
                raise NotFound(self.named(f"image {reference.digest}") + " does not exist")
            return reference.digest
        if reference.digest_prefix is not None:
            return await self._by_prefix(reference.digest_prefix)
        assert reference.name is not None
        try:
            state = await self.store.read_reference(reference.name, reference.effective_tag)
        except (CorruptData, InvalidImage) as error:
            advice = "push to the reference again, or `snapcask tag` an image with it"
            raise type(error)(f"{error}; {advice}") from error
        if state is None or state.record.target is None:
            wanted = f"{reference.name}:{reference.effective_tag}"
            raise NotFound(f"{self.named(wanted)} does not exist; `snapcask ls` lists what does")
        assert state.record.target_kind is not TargetKind.NONE
        return state.record.target

    async def _by_prefix(self, prefix: str) -> Digest:
        found = [
            digest
            for facts in await self.store.list_objects(layout.IMAGES)
            if (digest := layout.digest_of_key(facts.key)) and digest.hex.startswith(prefix)
        ]
        if not found:
            raise NotFound(
                self.named(f"an image that begins with blake3:{prefix}") + " does not exist"
            )
        if len(found) > 1:
            raise InvalidInput(
                f"blake3:{prefix} is ambiguous: {found[0].short} and"
                f" {len(found) - 1} more begin with it; give more digits"
            )
        return found[0]


def _size_check(key: str, what: str) -> Callable[[int, Octets], None]:
    def check(size_bytes: int, beginning: Octets) -> None:
        check_size(key, size_bytes, beginning, what)

    return check


async def open_catalog(store: Store, *, write: bool = False) -> Catalog:
    """Read and check the store record. Raises NotFound, Unsupported (naming the feature)."""
    what = f"store record of {store.url}"
    try:
        raw = await store.get(layout.STORE_KEY, _size_check(layout.STORE_KEY, what))
    except NotFound:
        if await store.facts(layout.STORE_KEY) is not None:  # or raises: there is no bucket
            raise
        url, away = store.url, "is it mounted? " if store.url.startswith("/") else ""
        raise NotFound(
            f"{url} is not a snapcask store; {away}`snapcask init {url}` makes a new one"
        ) from None
    record = StoreRecord.decode(raw, what)
    if write:
        record.check_writable()
    else:
        record.check_readable()
    return Catalog(store, record)
