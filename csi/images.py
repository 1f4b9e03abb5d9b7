"""From a volume's attributes to an image that the Pod may have, and whether the node has it.

Who may: the policy, each time; the store, each time with the Pod's own keys where it has some. Keys
also decide which security domain of the cache is looked into, so a warm image of one Pod is none of
another that has other keys.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from csi.attributes import PullPolicy, VolumeAttributes
from csi.compat import FactsOf, Mismatch
from csi.config import CsiConfig
from csi.kept import KeptVariants
from csi.policy import check_allowed, needs_proof
from csi.records import Records
from csi.stores import OpenStore, StoreAddress, Stores
from imgfmt import layout
from imgfmt.compat import choose
from imgfmt.digest import Digest
from imgfmt.errors import (
    AccessDenied,
    DoesNotFit,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
)
from imgfmt.image import Image, Member, Variants
from imgfmt.reference import ImageRef
from transfer.cache.domains import domain_of, domains_of_url
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.owners import is_sound
from transfer.cache.warm import local_image
from transfer.catalog import Catalog
from transfer.pull import choose_members, images_of
from transfer.threads import Threads

MAX_RECENT = 4096
"""References, and stores with their keys, that are remembered without looking at the disk."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Found:
    """An image that the Pod may have. `digest` is the image's, or that of variants.

    `image` is None where its record is not in the cache; then it is to be fetched.
    """

    address: StoreAddress
    paths: DomainPaths
    digest: Digest
    image: Image | None

    def members(self, member: str | None) -> tuple[Member, ...]:
        """The members to mount. Raises NotFound."""
        assert self.image is not None
        return choose_members(self.image, self.digest, member)


class Images:
    """Finds images for one driver. What `facts_of` gives chooses among variants."""

    def __init__(
        self,
        config: CsiConfig,
        cache: CacheRoot,
        stores: Stores,
        records: Records,
        kept: KeptVariants,
        threads: Threads,
        facts_of: FactsOf,
    ) -> None:
        self._config = config
        self._cache = cache
        self._stores = stores
        self._records = records
        self._kept = kept
        self._threads = threads
        self._facts_of = facts_of
        self._known: dict[tuple[str, str], Digest] = {}
        self._domains: dict[tuple[str, str], DomainPaths] = {}

    def check_policy(self, namespace: str | None, attributes: VolumeAttributes) -> None:
        """Raise AccessDenied unless the namespace may mount this reference."""
        check_allowed(self._config.policy, namespace, attributes.image)

    async def find(
        self,
        attributes: VolumeAttributes,
        address: StoreAddress,
        *,
        namespace: str | None,
        inline: bool,
    ) -> Found:
        """The image that a reference means now. The policy has to have been asked.

        No store is asked where the cache has what the node last knew the reference to mean, unless
        the Pod has keys of its own, or wants it to be asked each time. Raises NotFound,
        AccessDenied, StoreUnavailable.
        """
        reference = attributes.image
        proof = inline and needs_proof(self._config.policy, namespace, reference)
        async with self._stores.held(address) as opened:
            if address.credentials is None and attributes.pull_policy is PullPolicy.IF_NOT_PRESENT:
                paths = self._domains.get(_told_apart(address))
                paths = paths or await self._threads.run(self._local_domain, opened)
                digest = None
                if paths is not None:
                    digest = await self._last_known(paths, reference, proof=proof)
                if paths is not None and digest is not None:
                    here = await self._threads.run(self._here, paths, digest, attributes.member)
                    if here is not None:
                        return Found(address, paths, *here)
            catalog = await opened.catalog()
            paths = await self._domain(address, catalog)
            digest, proven = await self._resolve(catalog, paths, attributes, address, proof=proof)
            if proof and not proven and not await _was_named(catalog, reference.name, digest):
                raise AccessDenied(
                    f"image {reference}: store {catalog.store.url} does not know this digest under"
                    f" that name, so namespace {namespace} may not mount it"
                )
            if proof or not reference.by_digest:
                await self._remember(paths, reference, digest)
        here = await self._threads.run(self._here, paths, digest, attributes.member)
        return Found(address, paths, *(here or (digest, None)))

    async def _resolve(
        self,
        catalog: Catalog,
        paths: DomainPaths,
        attributes: VolumeAttributes,
        address: StoreAddress,
        *,
        proof: bool,
    ) -> tuple[Digest, bool]:
        """What the reference means; the store is asked for the image itself, with these keys.

        The second says whether it was seen before that the name had this digest.
        """
        reference = attributes.image
        if address.credentials is not None and attributes.pull_policy is PullPolicy.IF_NOT_PRESENT:
            known = await self._last_known(paths, reference, proof=proof)
            if known is not None and await catalog.store.facts(layout.image_key(known)) is not None:
                return known, proof
        digest = await catalog.resolve(reference)
        if not reference.by_digest and await catalog.store.facts(layout.image_key(digest)) is None:
            raise NotFound(
                f"{catalog.named(f'image {digest.short}')}, which {reference} means, is not there;"
                " push it again"
            )
        return digest, False

    def _here(
        self, paths: DomainPaths, digest: Digest, member: str | None
    ) -> tuple[Digest, Image] | None:
        """The image, or of variants the one that fits, if it is in the cache. Blocks."""
        image = self.complete(paths, digest, member)
        if image is not None:
            return digest, image
        kept = self._kept.find(paths.name, digest)
        if kept is None:
            return None
        try:
            chosen = choose(*kept, self._facts_of())
        except (DoesNotFit, NotFound):
            return None
        image = self.complete(paths, chosen, member)
        return None if image is None else (chosen, image)

    async def chosen(self, found: Found) -> tuple[Digest, Image, list[Mismatch]]:
        """The image itself, or of variants the one that fits; the preferred one if none does.

        The store is asked. Raises NotFound.
        """
        async with self._stores.held(found.address) as opened:
            catalog = await opened.catalog()
            record = await catalog.image(found.digest)
            if isinstance(record, Image):
                return found.digest, record, []
            images = await images_of(catalog, record)
        keep, domain = self._kept.keep, found.paths.name
        await self._threads.run(keep, domain, found.digest, record, images)
        return await self._threads.run(self._choose, record, images)

    def _choose(
        self, variants: Variants, images: dict[Digest, Image]
    ) -> tuple[Digest, Image, list[Mismatch]]:
        try:
            digest = choose(variants, images, self._facts_of())
            return digest, images[digest], []
        except DoesNotFit as error:
            preferred = next((v.digest for v in variants.images if v.digest in images), None)
            if preferred is None:
                raise NotFound("none of the images that variants name is there") from error
            return preferred, images[preferred], [Mismatch("variants", "one that fits", str(error))]

    def complete(self, paths: DomainPaths, digest: Digest, member: str | None) -> Image | None:
        """The image if all that is wanted of it is in the cache and sound. Blocks."""
        try:
            image = local_image(paths, digest)
            members = choose_members(image, digest, member)
        except ImageError:
            return None
        session = self._cache.session
        return image if all(is_sound(paths, m.tree, session) for m in members) else None

    async def check_room(self, catalog: Catalog, members: tuple[Member, ...]) -> None:
        """Raise OutOfResources for an image that the cache can't hold even when it is empty."""
        limit = self._config.cache.watermarks.max_bytes
        if limit is None:
            return
        totals = await asyncio.gather(*(data_bytes(catalog, m.tree) for m in members))
        if sum(totals) > limit:
            raise OutOfResources(
                f"the image has {sum(totals)} bytes, the cache of this node may hold {limit}; raise"
                " cache.maxBytes, or name a member"
            )

    def _local_domain(self, opened: OpenStore) -> DomainPaths | None:
        """The domain of a store without asking it, where only one can be meant. Blocks."""
        found = domains_of_url(self._cache, opened.store)
        return found[0] if len(found) == 1 else None

    async def _domain(self, address: StoreAddress, catalog: Catalog) -> DomainPaths:
        key = _told_apart(address)
        found = self._domains.get(key)
        if found is None:
            found = await self._threads.run(domain_of, self._cache, catalog)
            put_recent(self._domains, key, found)
        return found

    async def _last_known(
        self, paths: DomainPaths, reference: ImageRef, *, proof: bool
    ) -> Digest | None:
        """What a reference was last seen to mean; a digest that needs proof, only once proven."""
        if reference.digest is not None and not proof:
            return reference.digest
        key = paths.name, str(reference)
        if key not in self._known:
            text = await self._threads.run(self._records.known, *key)
            try:
                digest = Digest.parse(text or "")
            except InvalidInput:
                return None
            put_recent(self._known, key, digest)
        return self._known[key]

    async def _remember(self, paths: DomainPaths, reference: ImageRef, digest: Digest) -> None:
        key = paths.name, str(reference)
        if self._known.get(key) != digest:
            await self._threads.run(self._records.remember, *key, str(digest))
            put_recent(self._known, key, digest)


def put_recent(found: dict[K, V], key: K, value: V) -> None:
    """Put it there, and drop the oldest where there are too many: anybody may bring new ones."""
    found[key] = value
    while len(found) > MAX_RECENT:
        del found[next(iter(found))]


def _told_apart(address: StoreAddress) -> tuple[str, str]:
    """What tells addresses apart, without the keys themselves."""
    return address.url, address.credentials.scope if address.credentials else ""


async def _was_named(catalog: Catalog, name: str | None, digest: Digest) -> bool:
    """Whether a reference of this name points to the digest, or did so."""
    for state in await catalog.store.list_references():
        record = state.record
        if record.name == name and record.target is not None:
            targets = {record.target, *(past.target for past in record.history)}
            if digest in targets:
                return True
    return False


async def data_bytes(catalog: Catalog, tree: Digest) -> int:
    """Bytes of a tree that are not zero, as it claims itself. Raises NotFound."""
    logical, zero = await catalog.tree_totals(tree)
    return logical - zero
