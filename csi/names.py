"""Names for images: volumes that pin them, and snapshots. All are references of a store.

A provisioned volume is the reference `_volumes/<32 digits>`, made by compare-and-swap: it is the
record that a call was made before, and it keeps the image from collection until it is deleted. A
snapshot is one called `_volumes/snap-<32 digits>`, or any other reference that an administrator
names: its id is `<store>/<reference>`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from csi.attributes import VolumeAttributes, read_attributes
from csi.claims import SNAPSHOTS, VOLUME_ID, VOLUMES, Claim, renew
from csi.config import CsiConfig
from csi.errors import AlreadyExists, OutOfRange, Unmet
from csi.images import data_bytes
from csi.mountable import check_attributes, check_image
from csi.requests import CreateRequest
from csi.stores import Stores
from imgfmt.digest import Digest, digest_of
from imgfmt.errors import (
    AccessDenied,
    Conflict,
    CorruptData,
    ImageError,
    InvalidImage,
    InvalidInput,
    NotFound,
    StoreUnavailable,
)
from imgfmt.image import Image
from imgfmt.reference import DEFAULT_TAG, ImageRef, ReferenceRecord, parse_reference
from transfer import naming
from transfer.catalog import Catalog
from transfer.config import TransferConfig
from transfer.store.s3.config import Credentials

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CreatedVolume:
    """A provisioned volume. `context` are its volume attributes."""

    volume_id: str
    size_bytes: int
    context: dict[str, str]


@dataclass(frozen=True, slots=True)
class SnapshotEntry:
    """A snapshot. `source` is the id of the volume it was made of, or empty."""

    snapshot_id: str
    source: str
    size_bytes: int
    time_ns: int


class VolumeNames:
    """Makes and removes volume and snapshot references."""

    def __init__(self, config: CsiConfig, stores: Stores) -> None:
        self._config = config
        self._stores = stores

    async def create_volume(self, request: CreateRequest) -> CreatedVolume:
        """Pin an image under a volume's name; the same call again gives the same volume.

        Raises AlreadyExists for the same name with another request, OutOfRange, and NotFound or
        InvalidInput for what no node could mount.
        """
        parameters = dict(request.parameters)
        store, wanted = self._source(request, parameters)
        given = {**parameters, "image": str(wanted)}
        attributes = read_attributes(given, inline=False)
        check_attributes(self._config.mount, attributes, contexts=request.contexts)
        asked = repr((request.parameters, request.snapshot_id, request.required_bytes,
                      request.limit_bytes))  # fmt: skip
        fingerprint = digest_of(b"snapcask create 1\0", asked.encode()).hex[:32]
        digits = digest_of(b"snapcask volume name 1\0", request.name.encode()).hex[:32]
        name = f"{VOLUMES}{digits}"
        async with self._catalog(store, request.credentials) as catalog:
            seen = await catalog.store.reference_to_change(name, DEFAULT_TAG)
            if seen is not None and seen.record.target is not None:
                record = seen.record
            else:
                target = await self._fitting(catalog, wanted, attributes, request)
                image = await self._image_name(catalog, wanted)
                record = await self._claim(catalog, target, name, Claim(fingerprint, image))
            found, pinned = Claim.of(record), record.target
            assert pinned is not None
            if found.request != fingerprint:
                raise AlreadyExists(
                    f"volume {request.name} exists with other parameters, source or size; delete it"
                    " first, or use another name"
                )
            await renew(catalog, record)
            size = await self._size(catalog, pinned, attributes.member)
        shown = f"{found.image}@{pinned}" if found.image else str(pinned)
        context = {**parameters, "image": shown, "store": store}
        return CreatedVolume(f"vol-{store}-{digits}", max(size, request.required_bytes), context)

    async def delete_volume(self, volume_id: str, credentials: Credentials | None) -> None:
        """Let go of a volume's image. One that is not known is deleted already."""
        found = VOLUME_ID.fullmatch(volume_id)
        if found is None or found[1] not in self._config.stores:
            return
        async with self._catalog(found[1], credentials) as catalog:
            await self._forget(catalog, f"{VOLUMES}{found[2]}")

    async def check_volume(self, volume_id: str, credentials: Credentials | None) -> None:
        """Raise NotFound unless the volume exists."""
        await self._volume_target(volume_id, credentials)

    async def create_snapshot(
        self, name: str, volume_id: str, credentials: Credentials | None
    ) -> SnapshotEntry:
        """Give a volume's image another name. Raises NotFound, AlreadyExists."""
        store, target, image = await self._volume_target(volume_id, credentials)
        digits = digest_of(b"snapcask snapshot name 1\0", name.encode()).hex[:32]
        async with self._catalog(store, credentials) as catalog:
            claim = Claim("", image, volume_id)
            record = await self._claim(catalog, target, f"{SNAPSHOTS}{digits}", claim)
            if Claim.of(record).source != volume_id:
                raise AlreadyExists(
                    f"snapshot {name} exists already, of volume {Claim.of(record).source}"
                )
            await renew(catalog, record)
            return await self._entry(catalog, store, record)

    async def delete_snapshot(self, snapshot_id: str, credentials: Credentials | None) -> None:
        """Remove the name that CreateSnapshot made. Raises Unmet for names of others."""
        try:
            store, reference = self._parse(snapshot_id)
        except ImageError:
            return
        name = reference.name or ""
        if not name.startswith(SNAPSHOTS):
            raise Unmet(
                f"snapshot {snapshot_id} was not made by CreateSnapshot; set deletionPolicy:"
                " Retain, or delete the reference with `snapcask rm`"
            )
        async with self._catalog(store, credentials) as catalog:
            await self._forget(catalog, name)

    async def list_snapshots(
        self, snapshot_id: str, source: str, credentials: Credentials | None
    ) -> list[SnapshotEntry]:
        """The snapshot of this id, those of this volume, or all that were made.

        Of several stores those that can't be asked are left out, with a warning.
        """
        if snapshot_id:
            found = await self._by_id(snapshot_id, credentials)
            return [entry for entry in found if source in ("", entry.source)]
        volume = VOLUME_ID.fullmatch(source) if source else None
        if source and volume is None:
            return []
        stores = [volume[1]] if volume else sorted(self._config.stores)
        entries: list[SnapshotEntry] = []
        failed: list[ImageError] = []
        for store in stores:
            if store not in self._config.stores:
                continue
            try:
                entries += await self._snapshots_of(store, source, credentials)
            except (NotFound, AccessDenied, StoreUnavailable) as error:
                _log.warning("snapshots of store %s are not listed: %s", store, error)
                failed.append(error)
        if failed and len(failed) == len(stores):
            raise failed[0]
        return entries

    async def _snapshots_of(
        self, store: str, source: str, credentials: Credentials | None
    ) -> list[SnapshotEntry]:
        entries = []
        async with self._catalog(store, credentials, write=False) as catalog:
            for state in await catalog.store.list_references():
                record = state.record
                if not record.name.startswith(SNAPSHOTS) or record.target is None:
                    continue
                if source in ("", Claim.of(record).source):
                    entries.append(await self._entry(catalog, store, record))
        return entries

    async def _by_id(
        self, snapshot_id: str, credentials: Credentials | None
    ) -> Sequence[SnapshotEntry]:
        try:
            store, reference = self._parse(snapshot_id)
            async with self._catalog(store, credentials, write=False) as catalog:
                target = await catalog.resolve(reference)
                state = None
                if reference.name is not None and not reference.by_digest:
                    tag = reference.effective_tag
                    state = await catalog.store.read_reference(reference.name, tag)
                source = Claim.of(state.record).source if state else ""
                time_ns = state.record.time_ns if state else 0
                size = await self._size(catalog, target, None)
                return [SnapshotEntry(snapshot_id, source, size, time_ns)]
        except (NotFound, InvalidInput):
            return []

    def _source(self, request: CreateRequest, parameters: dict[str, str]) -> tuple[str, ImageRef]:
        """The store and the image that a volume is to be made of."""
        named = parameters.pop("store", None)
        if request.snapshot_id is not None:
            store, reference = self._parse(request.snapshot_id)
            if named not in (None, store):
                raise InvalidInput(
                    f"snapshot {request.snapshot_id} is in store {store}, not in {named}"
                )
            parameters.pop("image", None)
            return store, reference
        reference = read_attributes({"image": parameters.pop("image")}, inline=False).image
        store = named or self._config.default_store or ""
        self._stores.address(store or None, None, inline=False)
        return store, reference

    def _parse(self, snapshot_id: str) -> tuple[str, ImageRef]:
        """`<store>/<reference>`. Raises NotFound for anything else."""
        store, slash, text = snapshot_id.partition("/")
        if not slash or store not in self._config.stores:
            raise NotFound(
                f"snapshot {snapshot_id} does not exist; an id is STORE/REF, with STORE one of"
                f" {', '.join(sorted(self._config.stores))}"
            )
        try:
            return store, parse_reference(text)
        except InvalidInput as error:
            raise NotFound(f"snapshot {snapshot_id} does not exist: {error}") from None

    async def _volume_target(
        self, volume_id: str, credentials: Credentials | None
    ) -> tuple[str, Digest, str]:
        found = VOLUME_ID.fullmatch(volume_id)
        if found is not None and found[1] in self._config.stores:
            async with self._catalog(found[1], credentials, write=False) as catalog:
                name = f"{VOLUMES}{found[2]}"
                try:
                    state = await catalog.store.read_reference(name, DEFAULT_TAG)
                except (CorruptData, InvalidImage) as error:
                    raise CorruptData(
                        f"volume {volume_id}: its record in the store is damaged ({error}); make"
                        " a new claim of the same image, and delete this one"
                    ) from error
                if state is not None and state.record.target is not None:
                    return found[1], state.record.target, Claim.of(state.record).image
        raise NotFound(f"volume {volume_id} does not exist, or was not made by CreateVolume")

    async def _image_name(self, catalog: Catalog, reference: ImageRef) -> str:
        """The name under which the policy knows the image: that of a snapshot's source."""
        name = reference.name or ""
        if not name.startswith("_"):
            return name
        state = await catalog.store.read_reference(name, reference.effective_tag)
        return Claim.of(state.record).image if state is not None else ""

    async def _fitting(
        self,
        catalog: Catalog,
        wanted: ImageRef,
        attributes: VolumeAttributes,
        request: CreateRequest,
    ) -> Digest:
        """What a new volume is to pin. Raises NotFound, InvalidInput and OutOfRange.

        All that may be against it is found out before there is a reference: one that is there may
        be in use, and is removed by DeleteVolume alone.
        """
        target = await catalog.resolve(wanted)
        await check_image(catalog, target, attributes)
        if request.limit_bytes:
            size = await self._size(catalog, target, attributes.member)
            if size > request.limit_bytes:
                raise OutOfRange(
                    f"volume {request.name}: the image has {size} bytes, more than the limit of"
                    f" {request.limit_bytes}"
                )
        return target

    async def _claim(
        self, catalog: Catalog, target: Digest, name: str, claim: Claim
    ) -> ReferenceRecord:
        """Make a reference, if there is none of this name; returns what is there then."""
        return await naming.claim(
            catalog, ImageRef(digest=target), name, DEFAULT_TAG,
            who=claim.text(self._config.driver_name), config=TransferConfig(),
        )  # fmt: skip

    async def _forget(self, catalog: Catalog, name: str) -> None:
        for _ in range(3):
            try:
                await naming.remove(catalog, name, DEFAULT_TAG)
                return
            except NotFound:
                return
            except Conflict:
                continue
        await naming.remove(catalog, name, DEFAULT_TAG)

    async def _size(self, catalog: Catalog, target: Digest, member: str | None) -> int:
        """Bytes of data that an image has; 0 for variants, which differ."""
        found = await catalog.image(target)
        if not isinstance(found, Image):
            return 0
        members = [m for m in found.members if member in (None, m.name)]
        return sum([await data_bytes(catalog, m.tree) for m in members])

    async def _entry(self, catalog: Catalog, store: str, record: ReferenceRecord) -> SnapshotEntry:
        assert record.target is not None
        size = await self._size(catalog, record.target, None)
        source = Claim.of(record).source
        return SnapshotEntry(f"{store}/{record.name}", source, size, record.time_ns)

    @asynccontextmanager
    async def _catalog(
        self, store: str, credentials: Credentials | None, *, write: bool = True
    ) -> AsyncIterator[Catalog]:
        address = self._stores.address(store, credentials, inline=False)
        async with self._stores.held(address) as opened:
            catalog = await opened.catalog()
            if write:
                catalog.record.check_writable()
            yield catalog
