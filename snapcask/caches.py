"""Opening the node's cache for one call, and the security domain that a store gives access to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from imgfmt.compat import check_overrides
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound, StoreUnavailable
from imgfmt.reference import ImageRef, parse_reference
from restore.compat import OnMismatch, enforce, pick_image
from restore.host_facts import MachineFacts
from snapcask.stores import opened
from transfer.cache.disks import NewDisk
from transfer.cache.domains import domain_of, domains_of_url
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.warm import local_image
from transfer.catalog import Catalog
from transfer.pull import choose_members
from transfer.store.url import open_store


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Which cache, whether it may fill the root filesystem, and disks that are to be added to it.

    `allow_root_disk` lets one of these disks lie on the root filesystem.
    """

    directory: str
    allow_root_filesystem: bool = False
    disks: tuple[str, ...] = ()
    allow_root_disk: bool = False

    def open(self, *, create: bool = False) -> CacheRoot:
        """The cache; with `create` it is made if it is new. Raises NotFound, InvalidInput.

        Where it lies matters only to who may fill it.
        """
        return CacheRoot(
            self.directory,
            allow_root_filesystem=self.allow_root_filesystem or not create,
            disks=[NewDisk(path, self.allow_root_disk) for path in self.disks],
            create=create,
        )


@asynccontextmanager
async def opened_both(
    options: CacheOptions, store: str | None
) -> AsyncIterator[tuple[CacheRoot, Catalog, DomainPaths]]:
    """The cache, a store, and its security domain."""
    cache = options.open(create=True)
    async with opened(store) as catalog:
        yield cache, catalog, domain_of(cache, catalog)


async def find_cached(
    cache: CacheRoot, reference: str, store: str | None
) -> list[tuple[DomainPaths, Digest]]:
    """Cached images that a reference means, for who looks after the cache: in any domain.

    A digest is looked up in the cache alone; a name in the store. Raises NotFound, InvalidInput.
    """
    parsed = parse_reference(reference)
    if parsed.digest is None and parsed.digest_prefix is None:
        if store is None:
            raise InvalidInput(f"{reference} is a name; give its store with --store, or a digest")
        async with opened(store) as catalog:
            found = [(domain_of(cache, catalog), await catalog.resolve(parsed))]
    else:
        found = [
            (paths, image) for paths, _ in cache.domains() for image in _fitting(paths, parsed)
        ]
    found = [(paths, image) for paths, image in found if image in paths.listed("images")]
    if not found:
        raise NotFound(f"{reference} is not in cache {cache.shown}; `snapcask cache ls` lists it")
    if len({image for _, image in found}) > 1:
        raise InvalidInput(f"{reference} is ambiguous in cache {cache.shown}; give more digits")
    return found


def _fitting(paths: DomainPaths, reference: ImageRef) -> Sequence[Digest]:
    prefix = reference.digest.hex if reference.digest else reference.digest_prefix or ""
    return [image for image in paths.listed("images") if image.hex.startswith(prefix)]


async def locate_fitting(
    cache: CacheRoot,
    reference: str,
    store: str | None,
    *,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    on_mismatch: OnMismatch = OnMismatch.FAIL,
    override: Sequence[str] = (),
) -> tuple[DomainPaths, Digest, tuple[str, ...]]:
    """The domain of a store, the image there that a reference means here, and warnings.

    The image must be in the cache, and fit this machine or `on_mismatch` say that it need not. Of
    variants it is the one that a prefetch takes. Where the store does not answer, a digest is
    looked up in the domain it had. Raises NotFound, DoesNotFit, InvalidInput.
    """
    here, picked = MachineFacts(facts), None
    parsed = parse_reference(reference)
    try:
        async with opened(store) as catalog:
            paths, digest = domain_of(cache, catalog), await catalog.resolve(parsed)
            if digest not in paths.listed("images"):  # it may be variants
                picked = await pick_image(
                    catalog, digest, here, override=override, on_mismatch=on_mismatch
                )
                digest = picked.digest
    except (NotFound, StoreUnavailable) as error:
        if store is None or (parsed.digest is None and parsed.digest_prefix is None):
            raise
        paths, digest = without_store(cache, parsed, store, error)
    image = local_image(paths, digest)
    members = choose_members(image, digest, member)
    if picked is None:
        check_overrides(override, [image], ())
    warnings = enforce(
        image, here, what=reference, when=picked.when if picked else (), members=members,
        override=override, on_mismatch=on_mismatch,
    )  # fmt: skip
    return paths, digest, warnings


def without_store(
    cache: CacheRoot, reference: ImageRef, url: str, error: ImageError
) -> tuple[DomainPaths, Digest]:
    """The one image of a digest in the domain that a store at `url` had; else raises `error`."""
    store = open_store(url)
    try:
        domains = domains_of_url(cache, store)
    finally:
        store.close()
    for paths in domains:
        images = _fitting(paths, reference)
        if len(images) == 1:
            return paths, images[0]
    raise error
