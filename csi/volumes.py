"""What happens to a volume: absent, fetched, published at targets, absent again.

`VolumeService` is all the state machine there is (docs/csi.md draws it). Each step may be repeated,
and a process that is killed at any point leaves what the next one can finish or take down. Locks
are by volume and target: a second call meanwhile is told to come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from csi.attributes import OnMismatch
from csi.compat import FactsOf, Judge, Mismatch
from csi.config import CsiConfig, MountMode
from csi.errors import InProgress, Unmet
from csi.events import Events
from csi.fetches import Fetches
from csi.images import Found, Images
from csi.metrics import Metrics
from csi.mounting import Mounter, Plan
from csi.ownership import Owner
from csi.requests import PublishRequest, UnpublishRequest
from csi.stores import StoreAddress, Stores
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound, StoreUnavailable
from imgfmt.image import Image, Variants
from imgfmt.reference import ImageRef
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.owners import read_object
from transfer.cache.warm import WarmConfig, WarmReport, warm
from transfer.config import transfer_config
from transfer.progress import Progress
from transfer.pull import choose_image, choose_members
from transfer.threads import Threads

T = TypeVar("T")

_TRIES = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """What a volume has: bytes of its files, holes too, and entries."""

    size_bytes: int
    entries: int


class VolumeService:
    """Volumes of one node. What `facts_of` gives is of the node, and chooses among variants."""

    def __init__(
        self,
        config: CsiConfig,
        cache: CacheRoot,
        mounter: Mounter,
        stores: Stores,
        fetches: Fetches[WarmReport],
        threads: Threads,
        *,
        facts_of: FactsOf,
        judge: Judge,
        metrics: Metrics,
        events: Events,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._mounter = mounter
        self._stores = stores
        self._fetches = fetches
        self._threads = threads
        self._facts_of = facts_of
        self._judge = judge
        self._metrics = metrics
        self._events = events
        self._now_s = now_s
        self._images = Images(config, cache, stores, mounter.records, threads)
        self._busy: set[tuple[str, str]] = set()
        self._entries: dict[str, int] = {}

    async def publish(self, request: PublishRequest, *, timeout_s: float) -> None:
        """Have the image at the target when this returns, within `timeout_s`.

        What is there already with the same attributes is left alone, and no store is asked. Raises
        InProgress while the image is being fetched, AlreadyExists, Unmet, AccessDenied and the
        errors of fetching; nothing of the volume is on the node then, but for what is fetched.
        """
        until_s = self._now_s() + timeout_s
        target = self._mounter.kubelet.resolve(request.target)
        with self._alone(request.volume_id, target):
            run, fingerprint = self._threads.run, request.fingerprint()
            if await run(self._mounter.is_published, request.volume_id, target, fingerprint):
                return
            try:
                await self._publish(request, target, until_s)
            except InProgress:
                raise
            except ImageError as error:
                self._events.warning(request.pod, "FailedMountSnapshot", str(error))
                raise

    async def _publish(self, request: PublishRequest, target: str, until_s: float) -> None:
        attributes, pod = request.attributes, request.pod
        self._images.check_policy(pod.namespace, attributes)
        address = self._stores.address(attributes.store, request.credentials, inline=pod.ephemeral)
        for _ in range(_TRIES):
            left_s, what = until_s - self._now_s(), f"the store of image {attributes.image}"
            found, judged = await _within(left_s, what, self._find(request, address))
            if isinstance(judged, bytes):
                plan = self._plan(request, target, found.paths, found.digest, None, judged)
            else:
                if found.image is None:
                    await self._fetch(request, found, judged, until_s)
                    found = await self._with_image(found, attributes.member, judged)
                    if found.image is None:
                        continue
                plan = self._plan(request, target, found.paths, found.digest, found, None)
            try:
                await self._threads.run(self._mounter.publish, plan)
            except NotFound:
                if attributes.sub_path and found.image is not None:
                    raise
                continue  # it was evicted meanwhile
            return
        raise StoreUnavailable(f"image {attributes.image} leaves the cache as soon as it is there")

    async def _find(
        self, request: PublishRequest, address: StoreAddress
    ) -> tuple[Found, Digest | bytes]:
        attributes, pod = request.attributes, request.pod
        found = await self._images.find(
            attributes, address, namespace=pod.namespace, inline=pod.ephemeral
        )
        return found, await self._judged(request, found)

    async def _judged(self, request: PublishRequest, found: Found) -> Digest | bytes:
        """The image to mount, or the status file of an empty volume in its place.

        Raises Unmet if the image refuses this node and the volume says `fail`.
        """
        reference, wish = request.attributes.image, request.attributes.on_mismatch
        if found.image is None:
            digest, image, mismatches = await self._chosen(found)
        else:
            digest, image, mismatches = found.digest, found.image, []
        members = choose_members(image, digest, request.attributes.member)
        mismatches += await self._threads.run(self._judge, image, members)
        if found.image is None:
            async with self._stores.held(found.address) as opened:
                await self._images.check_room(await opened.catalog(), members)
        if not mismatches:
            return digest
        told = f"image {reference} is not for this node: {'; '.join(map(str, mismatches))}"
        match wish:
            case OnMismatch.FAIL:
                raise Unmet(
                    f"{told}; use a node that fits, or set the volume attribute onMismatch to empty"
                    " (starts without the snapshot) or mount (at your own risk)"
                )
            case OnMismatch.EMPTY:
                self._warn(request, "SnapshotMismatch", f"{told}; the volume is empty")
                return _status(reference, digest, mismatches)
            case OnMismatch.MOUNT:
                self._warn(request, "SnapshotMismatch", f"{told}; mounted all the same")
                return digest

    async def _chosen(self, found: Found) -> tuple[Digest, Image, list[Mismatch]]:
        """The image itself, or of variants the one that fits; the preferred one if none does."""
        async with self._stores.held(found.address) as opened:
            catalog = await opened.catalog()
            try:
                return *await choose_image(catalog, found.digest, self._facts_of()), []
            except InvalidInput as error:
                record = await catalog.image(found.digest)
                if not isinstance(record, Variants):
                    raise
                digest = record.images[0].digest
                image = await catalog.image(digest)
                if not isinstance(image, Image):
                    raise
                return digest, image, [Mismatch("variants", "one that fits", str(error))]

    async def _fetch(
        self, request: PublishRequest, found: Found, digest: Digest, until_s: float
    ) -> None:
        """Wait for the one fetch of this image, as long as the call may."""
        member = request.attributes.member
        config = self._config.fetch
        settings = WarmConfig(
            transfer=transfer_config(config.max_memory_bytes, buffered=config.buffered),
            direct=not config.buffered,
            watermarks=self._config.cache.watermarks,
        )

        async def work(progress: Progress) -> WarmReport:
            async with self._stores.held(found.address) as opened:
                report = await warm(
                    self._cache,
                    found.paths,
                    await opened.catalog(),
                    digest,
                    member=member,
                    config=settings,
                    facts=self._facts_of(),
                    progress=progress,
                )
            self._metrics.fetched(report)
            _log.info("fetched", extra={"image": str(report.digest), "bytes": report.fetched_bytes})
            return report

        await self._fetches.wait(
            (found.paths.name, digest, member),
            f"image {request.attributes.image}",
            work,
            timeout_s=max(0.0, min(config.wait_limit_s, until_s - self._now_s())),
        )

    async def _with_image(self, found: Found, member: str | None, digest: Digest) -> Found:
        image = await self._threads.run(self._images.complete, found.paths, digest, member)
        return Found(found.address, found.paths, digest, image)

    def _plan(
        self,
        request: PublishRequest,
        target: str,
        paths: DomainPaths,
        digest: Digest,
        found: Found | None,
        status: bytes | None,
    ) -> Plan:
        attributes, pod = request.attributes, request.pod
        mode = attributes.mount_mode or self._config.mount.mode_of(pod.namespace)
        return Plan(
            volume_id=request.volume_id,
            target=target,
            fingerprint=request.fingerprint(),
            mode=MountMode.OVERLAY if status is not None else mode,
            image=digest,
            paths=paths,
            members=() if found is None else found.members(attributes.member),
            sub_path="" if status is not None else attributes.sub_path,
            owner=Owner(attributes.uid, attributes.gid, attributes.mode),
            options=request.contexts,
            status=status,
            namespace=pod.namespace,
            pod=pod.name,
        )

    async def unpublish(self, request: UnpublishRequest) -> None:
        """Have nothing of the volume at the target when this returns. Needs no store."""
        target = self._mounter.kubelet.resolve(request.target)
        with self._alone(request.volume_id, target):
            await self._threads.run(self._mounter.unpublish, request.volume_id, target)

    async def usage(self, volume_id: str, path: str) -> VolumeUsage:
        """What a published volume has, by the cache's records. Raises NotFound."""
        try:
            target = self._mounter.kubelet.resolve(path)
        except InvalidInput as error:
            raise NotFound(f"volume {volume_id} is not published at {path}: {error}") from None
        return await self._threads.run(self._usage, volume_id, target)

    def _usage(self, volume_id: str, target: str) -> VolumeUsage:
        record = self._mounter.find(volume_id, target)
        if record is None or not self._mounter.is_published(volume_id, target, record.fingerprint):
            raise NotFound(f"volume {volume_id} is not published at {target}")
        entries = 0
        paths = DomainPaths(self._cache.path, record.domain)
        for mount in record.mounts:
            if mount.tree not in self._entries:
                with contextlib.suppress(ImageError):
                    tree = read_object(paths, Digest.parse(f"blake3:{mount.tree}"))
                    self._entries[mount.tree] = len(tree.columns["type"])
            entries += self._entries.get(mount.tree, 1)
        return VolumeUsage(record.size_bytes, entries)

    @contextlib.contextmanager
    def _alone(self, volume_id: str, target: str) -> Iterator[None]:
        key = volume_id, target
        if key in self._busy:
            raise InProgress(f"another call for volume {volume_id} at {target} is under way")
        self._busy.add(key)
        try:
            yield
        finally:
            self._busy.discard(key)

    def _warn(self, request: PublishRequest, reason: str, message: str) -> None:
        _log.warning(message, extra={"volume": request.volume_id, "pod": request.pod.name})
        self._events.warning(request.pod, reason, message)


async def _within(timeout_s: float, what: str, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises StoreUnavailable if it takes longer."""
    scope = asyncio.timeout(max(0.0, timeout_s))
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise StoreUnavailable(
            f"{what}: no answer within {timeout_s:.0f} s; it is tried again"
        ) from error


def _status(reference: ImageRef, digest: Digest, mismatches: list[Mismatch]) -> bytes:
    """The status file of an empty volume."""
    return json.dumps(
        {
            "state": "empty",
            "image": str(reference),
            "digest": str(digest),
            "mismatches": [
                {"check": m.check, "wanted": m.wanted, "found": m.found} for m in mismatches
            ],
        },
        indent=1,
    ).encode()
