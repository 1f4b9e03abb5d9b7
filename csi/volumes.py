"""What happens to a volume: absent, fetched, published at targets, absent again.

`VolumeService` is all the state machine there is (docs/csi.md draws it). Each step may be repeated,
and a process that is killed at any point leaves what the next one can finish or take down. Locks
are by volume and target: a second call meanwhile is told to come again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from csi.config import CsiConfig, MountMode
from csi.errors import InProgress
from csi.events import Events
from csi.images import Images
from csi.mounting import Mounter, Plan
from csi.ownership import Owner
from csi.preparing import Preparing, Ready
from csi.requests import PublishRequest, UnpublishRequest
from csi.stores import Stores
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound, StoreUnavailable
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.owners import read_object
from transfer.threads import Threads

_TRIES = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeUsage:
    """What a volume has: bytes of its files, holes too, and entries."""

    size_bytes: int
    entries: int


class VolumeService:
    """Volumes of one node."""

    def __init__(
        self,
        config: CsiConfig,
        cache: CacheRoot,
        mounter: Mounter,
        stores: Stores,
        images: Images,
        preparing: Preparing,
        threads: Threads,
        *,
        events: Events,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._cache = cache
        self._mounter = mounter
        self._stores = stores
        self._images = images
        self._preparing = preparing
        self._threads = threads
        self._events = events
        self._now_s = now_s
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
                await self._publish(request, target, fingerprint, until_s)
            except InProgress:
                raise
            except ImageError as error:
                self._events.warning(request.pod, "FailedMountSnapshot", str(error))
                raise

    async def _publish(
        self, request: PublishRequest, target: str, fingerprint: str, until_s: float
    ) -> None:
        reference = request.attributes.image
        self._images.check_policy(request.pod.namespace, request.attributes)
        address = self._stores.address(
            request.attributes.store, request.credentials, inline=request.pod.ephemeral
        )
        for _ in range(_TRIES):
            ready = await self._preparing.prepare(request, address, until_s)
            if ready is None:
                continue
            plan = self._plan(request, target, fingerprint, ready)
            try:
                await self._threads.run(self._mounter.publish, plan)
            except NotFound:
                if request.attributes.sub_path and ready.status is None:
                    raise
                continue  # it was evicted meanwhile
            return
        raise StoreUnavailable(f"image {reference} leaves the cache as soon as it is there")

    def _plan(self, request: PublishRequest, target: str, fingerprint: str, ready: Ready) -> Plan:
        attributes, pod = request.attributes, request.pod
        mode = attributes.mount_mode or self._config.mount.mode_of(pod.namespace)
        is_empty = ready.status is not None
        return Plan(
            volume_id=request.volume_id,
            target=target,
            fingerprint=fingerprint,
            mode=MountMode.OVERLAY if is_empty else mode,
            image=ready.digest,
            paths=ready.paths,
            members=ready.members,
            sub_path="" if is_empty else attributes.sub_path,
            owner=Owner(attributes.uid, attributes.gid, attributes.mode),
            options=request.contexts,
            status=ready.status,
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
