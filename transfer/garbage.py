"""What of a store is needed and what is not (SPEC.md 11.2, steps 3 and 4). Changes nothing.

Takes about 100 bytes of memory a pack and object. Trees are not read, only whether they are there:
the packs of a tree stand in its placement, which is much smaller.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from imgfmt import layout
from imgfmt.digest import Digest
from imgfmt.errors import CorruptData, InvalidImage, NotFound
from imgfmt.image import Image
from imgfmt.lease import MAX_DOOMED, Doomed, ObjectKind
from transfer.catalog import Catalog
from transfer.execute import each
from transfer.pushing.adoption import pack_prefixes

N_READERS = 8
"""Placements in memory at once: that of 1 TB takes some 25 MB."""

PREFIXES = {
    layout.IMAGES: ObjectKind.IMAGE,
    layout.TREES: ObjectKind.TREE,
    layout.PLACEMENTS: ObjectKind.PLACEMENT,
}
"""Where objects of each kind lie, in the order in which they are deleted."""

Named = tuple[ObjectKind, Digest]
T = TypeVar("T")


@dataclass(slots=True)
class Needed:
    """What references need: packs by name, objects by kind and digest; a placement by its tree."""

    packs: set[bytes] = field(default_factory=set)
    objects: set[Named] = field(default_factory=set)

    def __or__(self, other: Needed) -> Needed:
        return Needed(self.packs | other.packs, self.objects | other.objects)


@dataclass(frozen=True, slots=True)
class Garbage:
    """What nothing needs, with sizes in bytes, and how large the rest is.

    `young_bytes` is not needed either, but not older than every lease: a push may be writing it.
    """

    packs: dict[bytes, int]
    objects: dict[Named, int]
    needed_bytes: int
    young_bytes: int

    @property
    def size_bytes(self) -> int:
        """What deleting it frees."""
        return sum(self.packs.values()) + sum(self.objects.values())

    def sizes(self) -> dict[str, int]:
        """The size of each object by its key."""
        sizes = {object_key(named): size for named, size in self.objects.items()}
        return sizes | {layout.pack_key(name): size for name, size in self.packs.items()}

    def epochs(self) -> list[Doomed]:
        """The same in records that may be written; what names packs comes before the packs."""
        doomed = [
            Doomed(secrets.token_bytes(layout.NAME_BYTES), objects=frozenset(some))
            for some in _split(sorted(self.objects, reverse=True))
        ]
        names = _split(sorted(self.packs))
        if len(doomed) <= 1 and len(names) == 1:
            objects = doomed[0].objects if doomed else frozenset()
            return [Doomed(secrets.token_bytes(layout.NAME_BYTES), frozenset(names[0]), objects)]
        return doomed + [
            Doomed(secrets.token_bytes(layout.NAME_BYTES), frozenset(some)) for some in names
        ]


def object_key(named: Named) -> str:
    """The key of an object that has a digest."""
    kind, digest = named
    [prefix] = [prefix for prefix, its_kind in PREFIXES.items() if its_kind is kind]
    return prefix + digest.hex


async def mark(catalog: Catalog, now_ns: int, history_s: int) -> Needed:
    """What the references of a store need at `now_ns` by the store's clock.

    Targets that were replaced less than `history_s` ago count; what such a one needs and the store
    has not is passed over. Raises CorruptData or InvalidImage where a reference, image or placement
    can't be read, NotFound where something is absent that a reference needs now.
    """
    targets: dict[Digest, str] = {}
    past: dict[Digest, str] = {}
    for state in await catalog.store.list_references():
        what = f"{state.record.name}:{state.record.tag}"
        if state.problem:
            raise CorruptData(
                f"{catalog.named(what)} can't be read: {state.problem}; nothing was deleted. Push"
                " to it again or `snapcask rm` it"
            )
        if state.record.target is not None:
            targets.setdefault(state.record.target, what)
        for digest in state.record.roots(now_ns, history_s):
            past.setdefault(digest, what)
    needed = await _needs_of(catalog, targets, may_miss=False)
    await _check_all_there(catalog, needed)
    rest = {digest: what for digest, what in past.items() if digest not in targets}
    return needed | await _needs_of(catalog, rest, may_miss=True)


async def _needs_of(catalog: Catalog, images: dict[Digest, str], *, may_miss: bool) -> Needed:
    """What these images need; each has the reference that needs it."""
    needed = Needed()
    trees: dict[Digest, str] = {}
    pending = dict(images)

    async def image(item: tuple[Digest, str]) -> None:
        digest, what = item
        needed.objects.add((ObjectKind.IMAGE, digest))
        with _naming(what, may_miss):
            found = await catalog.image(digest)
            if isinstance(found, Image):
                trees.update((member.tree, what) for member in found.members)
            else:
                pending.update((variant.digest, what) for variant in found.images)

    async def tree(item: tuple[Digest, str]) -> None:
        digest, what = item
        needed.objects.update({(ObjectKind.TREE, digest), (ObjectKind.PLACEMENT, digest)})
        with _naming(what, may_miss):
            placed = await catalog.placement(digest)
            needed.packs.update(name.tobytes() for name in placed.packs)

    while pending:
        now, pending = pending, {}
        await each(iter(now.items()), image, N_READERS)
        pending = {d: w for d, w in pending.items() if (ObjectKind.IMAGE, d) not in needed.objects}
    await each(iter(trees.items()), tree, N_READERS)
    return needed


@contextmanager
def _naming(what: str, may_miss: bool) -> Iterator[None]:
    """Add to an error which reference needs the object; pass over one that may be absent."""
    needed_by = f"{what} needs it, so nothing was deleted"
    try:
        yield
    except NotFound as error:
        if not may_miss:
            raise NotFound(f"{error}; {needed_by}") from error
    except (CorruptData, InvalidImage) as error:
        raise type(error)(f"{error}; {needed_by}") from error


async def _check_all_there(catalog: Catalog, needed: Needed) -> None:
    """Raise NotFound unless all packs and trees are there; images and placements were read."""
    trees = {digest for kind, digest in needed.objects if kind is ObjectKind.TREE}
    for facts in await catalog.store.list_objects(layout.TREES):
        digest = layout.digest_of_key(facts.key)
        if digest is not None:
            trees.discard(digest)
    missing = [layout.tree_key(digest) for digest in trees]
    packs = set(needed.packs)
    for prefix in pack_prefixes(len(packs)):
        for facts in await catalog.store.list_objects(prefix):
            packs.discard(layout.pack_name_of(facts.key) or b"")
    missing += map(layout.pack_key, packs)
    if missing:
        more = f" and {len(missing) - 1} more objects" if len(missing) > 1 else ""
        raise NotFound(
            f"{catalog.named(min(missing))} does not exist{more}, and references need it, so"
            " nothing was deleted; `snapcask verify --all` tells what is lost"
        )


async def unneeded(catalog: Catalog, needed: Needed, before_ns: int) -> Garbage:
    """All that is not `needed`. Only what was written before `before_ns` by the store's clock."""
    packs: dict[bytes, int] = {}
    objects: dict[Named, int] = {}
    needed_bytes = young_bytes = 0
    for prefix in (*PREFIXES, *pack_prefixes(len(needed.packs))):
        for facts in await catalog.store.list_objects(prefix):
            pack, digest = layout.pack_name_of(facts.key), layout.digest_of_key(facts.key)
            named = None if digest is None else (PREFIXES[prefix], digest)
            if not facts.is_object or (pack is None and named is None):
                continue
            if pack in needed.packs or named in needed.objects:
                needed_bytes += facts.size_bytes
            elif facts.written_ns >= before_ns:
                young_bytes += facts.size_bytes
            elif pack is not None:
                packs[pack] = facts.size_bytes
            elif named is not None:
                objects[named] = facts.size_bytes
    return Garbage(packs, objects, needed_bytes, young_bytes)


def _split(items: Sequence[T]) -> list[Sequence[T]]:
    """Pieces that one record may hold."""
    return [items[at : at + MAX_DOOMED] for at in range(0, len(items), MAX_DOOMED)]
