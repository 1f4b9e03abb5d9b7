"""References: listing them, pointing them at what is stored, and taking them away.

What was pushed and has no reference may be about to be collected. So a reference is only pointed at
an image under a lease, when all that the image needs was seen to exist and not to be doomed
(SPEC.md 11.1): such a reference never dangles.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from imgfmt import layout, placement
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import Conflict, CorruptData, ImageError, InvalidInput, NotFound
from imgfmt.image import Image, Variant, Variants, decode_image_or_variants
from imgfmt.lease import ObjectKind
from imgfmt.reference import ImageRef, ReferenceRecord, TargetKind
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.execute import each
from transfer.leases import DoomedSet, WriterLease, boot_s, read_doomed, rescue_epoch
from transfer.progress import Clock
from transfer.references import next_record, take_back, whoami
from transfer.store.base import StoredReference
from transfer.tasks import TAKE_BACK_S, finished

_MAX_ROUNDS = 16
_N_LOOKERS = 16


@dataclass(frozen=True, slots=True)
class Naming:
    """What a reference points to now. `changed` is False if it did so before."""

    reference: str
    target_kind: TargetKind
    target: Digest
    changed: bool


@dataclass(frozen=True, slots=True)
class Removal:
    """What a reference pointed to until now; no target if that can't be known any more."""

    reference: str
    target_kind: TargetKind
    target: Digest | None


@dataclass(frozen=True, slots=True)
class ListedReference:
    """One reference. Sizes are what trees claim, summed over members; None for what has none.

    `problem` says what could not be read of the image, or of the reference itself: then the
    record is one of a deleted reference.
    """

    record: ReferenceRecord
    n_members: int | None = None
    n_variants: int | None = None
    logical_bytes: int | None = None
    zero_bytes: int | None = None
    problem: str | None = None


async def tag(
    catalog: Catalog,
    source: ImageRef,
    name: str,
    tag: str,
    *,
    config: TransferConfig,
    now_s: Clock = boot_s,
) -> Naming:
    """Point `name:tag` at the image or variants that `source` means now.

    Raises NotFound if something that it needs is gone, Conflict if collectors are about to delete
    its packs or someone else changed the reference meanwhile.
    """
    async with _lease(catalog, "tag", config, now_s) as lease:
        seen = await catalog.store.reference_to_change(name, tag)
        target = await catalog.resolve(source)
        return await _point(catalog, lease, name, tag, target, seen)


async def claim(
    catalog: Catalog,
    source: ImageRef,
    name: str,
    tag: str,
    *,
    who: str,
    config: TransferConfig,
    now_s: Clock = boot_s,
) -> ReferenceRecord:
    """Point `name:tag` at what `source` means now, unless it points to something already.

    Returns what is there then, which may be someone else's: `who` tells. A damaged record points to
    nothing any more and is replaced. Raises as `tag` does.
    """
    seen = await catalog.store.reference_to_change(name, tag)
    if seen is None or seen.record.target is None:
        async with _lease(catalog, "claim", config, now_s) as lease:
            seen = await catalog.store.reference_to_change(name, tag)
            if seen is None or seen.record.target is None:
                target = await catalog.resolve(source)
                await _point(catalog, lease, name, tag, target, seen, who=who)
                seen = await catalog.store.read_reference(name, tag)
    if seen is None or seen.record.target is None:
        raise Conflict(f"{catalog.named(f'{name}:{tag}')} was deleted meanwhile; try again")
    return seen.record


async def write_variants(
    catalog: Catalog,
    sources: Sequence[ImageRef],
    name: str,
    tag: str,
    *,
    config: TransferConfig,
    now_s: Clock = boot_s,
) -> Naming:
    """Store the list of these images, the preferred first, and point `name:tag` at it.

    Raises InvalidInput if one is not an image or is there twice; else as `tag`.
    """
    async with _lease(catalog, "variants", config, now_s) as lease:
        seen = await catalog.store.reference_to_change(name, tag)
        digests = [await catalog.resolve(source) for source in sources]
        for source, digest in zip(sources, digests, strict=True):
            if not isinstance(await catalog.image(digest), Image):
                raise InvalidInput(f"{source} names variants itself; give its images one by one")
            if digests.count(digest) > 1:
                raise InvalidInput(f"image {digest.short} is given more than once, as {source}")
        raw = Variants(tuple(Variant(digest) for digest in digests)).encode()
        target = digest_of(raw)
        return await _point(catalog, lease, name, tag, target, seen, raw)


async def remove(catalog: Catalog, name: str, tag: str) -> Removal:
    """Make `name:tag` a deleted reference; returns what it pointed to. Frees no bytes.

    Of a reference whose record is damaged it is not known what it pointed to.

    Raises NotFound if there is none, Conflict if someone else changed it meanwhile.
    """
    seen = await catalog.store.reference_to_change(name, tag)
    if seen is None or (seen.record.target is None and not seen.problem):
        raise NotFound(f"{catalog.named(f'{name}:{tag}')} does not exist; `snapcask ls` lists all")
    record = next_record(name, tag, seen, TargetKind.NONE, None)
    await catalog.store.change_reference(record, seen)
    return Removal(f"{name}:{tag}", seen.record.target_kind, seen.record.target)


async def list_references(catalog: Catalog, *, hidden: bool = False) -> list[ListedReference]:
    """All references by name and tag; with `hidden` also deleted and reserved ones."""
    return [
        await _listed(catalog, state)
        for state in await catalog.store.list_references()
        if hidden or not (_is_deleted(state) or state.record.name.startswith("_"))
    ]


def _is_deleted(state: StoredReference) -> bool:
    return state.record.target is None and not state.problem


async def _listed(catalog: Catalog, state: StoredReference) -> ListedReference:
    record = state.record
    if record.target is None:
        return ListedReference(record, problem=state.problem)
    try:
        found = await catalog.image(record.target)
        if isinstance(found, Variants):
            return ListedReference(record, n_variants=len(found.images))
        totals = [await catalog.tree_totals(member.tree) for member in found.members]
    except ImageError as error:
        return ListedReference(record, problem=str(error))
    logical, zero = (sum(column) for column in zip(*totals, strict=True))
    return ListedReference(record, len(found.members), None, logical, zero)


@asynccontextmanager
async def _lease(
    catalog: Catalog, purpose: str, config: TransferConfig, now_s: Clock
) -> AsyncIterator[WriterLease]:
    ttl_s = min(config.lease_ttl_s, catalog.record.lease_ttl_s)
    lease = WriterLease(catalog, purpose, whoami(), ttl_s, now_s)
    try:
        await lease.take()
        yield lease
    finally:
        await finished(lease.drop())


async def _point(
    catalog: Catalog, lease: WriterLease, name: str, tag: str, target: Digest,
    seen: StoredReference | None, raw: bytes | None = None, who: str | None = None,
) -> Naming:  # fmt: skip
    """Change the reference once that is safe. For `raw` see `_protect`."""
    kind, term = await _protect(catalog, target, lease, raw), lease.term
    changed = seen is None or seen.record.target != target
    if changed:
        record = next_record(name, tag, seen, kind, target, who)
        await catalog.store.change_reference(record, seen)
    if changed and not lease.held_since(term):  # SPEC.md 11.4
        try:
            await _protect(catalog, target, lease, raw)
        except BaseException:
            undo = take_back(catalog.store, name, tag, target, seen)
            await finished(undo, within_s=TAKE_BACK_S)
            raise
    return Naming(f"{name}:{tag}", kind, target, changed)


@dataclass(slots=True)
class _Needs:
    """All that a reference to one target keeps alive."""

    kind: TargetKind
    objects: set[tuple[ObjectKind, Digest]]
    packs: set[bytes]

    def keys(self) -> Iterator[str]:
        key_of = {
            ObjectKind.IMAGE: layout.image_key,
            ObjectKind.TREE: layout.tree_key,
            ObjectKind.PLACEMENT: layout.placement_key,
        }
        yield from (key_of[kind](digest) for kind, digest in self.objects)
        yield from map(layout.pack_key, self.packs)


async def _protect(
    catalog: Catalog, target: Digest, lease: WriterLease, raw: bytes | None = None
) -> TargetKind:
    """Return once a reference to `target` is safe to write (SPEC.md 11.1, steps 2, 3, 6 and 7).

    `raw` are the bytes of the target, if it is ours to write, and to write again.
    """
    settled: set[bytes] = set()
    for _ in range(_MAX_ROUNDS):
        settled_before = len(settled)
        needs = await _needs_of(catalog, target, raw)
        await _settle(catalog, target, needs, await read_doomed(catalog), settled)
        if raw is not None:  # not before: a deletion that was decided could still take it
            await catalog.store.put(layout.image_key(target), [raw])
        await _check_exist(catalog, target, needs)
        await _settle(catalog, target, needs, await read_doomed(catalog), settled)
        if len(settled) == settled_before and lease.is_fresh:
            return needs.kind
        if not lease.is_fresh:
            await lease.renew()
    raise Conflict(f"collectors of store {catalog.store.url} leave no time; try again")


async def _needs_of(catalog: Catalog, target: Digest, raw: bytes | None) -> _Needs:
    found = (
        await catalog.image(target)
        if raw is None
        else decode_image_or_variants(raw, catalog.named(f"image {target.short}"))
    )
    is_image = isinstance(found, Image)
    needs = _Needs(TargetKind.IMAGE if is_image else TargetKind.VARIANTS, set(), set())
    needs.objects.add((ObjectKind.IMAGE, target))
    if isinstance(found, Image):
        await _add_image(catalog, found, needs)
        return needs
    for variant in found.images:
        needs.objects.add((ObjectKind.IMAGE, variant.digest))
        image = await catalog.image(variant.digest)
        if isinstance(image, Image):
            await _add_image(catalog, image, needs)
    return needs


async def _add_image(catalog: Catalog, image: Image, needs: _Needs) -> None:
    for member in image.members:
        what = catalog.named(f"placement of tree {member.tree.short}")
        placed = placement.decode(await catalog.read(layout.placement_key(member.tree)), what)
        if placed.tree != member.tree:
            raise CorruptData(f"{what} is that of another tree; push the directory again")
        needs.objects |= {(ObjectKind.TREE, member.tree), (ObjectKind.PLACEMENT, member.tree)}
        needs.packs |= {name.tobytes() for name in placed.packs}


async def _settle(
    catalog: Catalog, target: Digest, needs: _Needs, doomed: DoomedSet, settled: set[bytes]
) -> None:
    """Cancel what dooms the target's objects; adds to `settled`. Raises Conflict for its packs."""
    if needs.packs & doomed.packs:
        raise Conflict(
            f"{catalog.named(f'image {target.short}')} is about to be collected; push it again"
        )
    for epoch in doomed.epochs(needs.objects) - settled:
        await rescue_epoch(catalog, epoch, whoami())
        settled.add(epoch)


async def _check_exist(catalog: Catalog, target: Digest, needs: _Needs) -> None:
    """Raise NotFound unless all objects and packs of the target are there."""

    async def look(key: str) -> None:
        if await catalog.store.facts(key) is None:
            raise NotFound(
                f"{catalog.named(key)}, which image {target.short} needs, does not exist;"
                " push the image again"
            )

    await each(needs.keys(), look, _N_LOOKERS)
