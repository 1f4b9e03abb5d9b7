"""What is done before a volume can be mounted: its image is found, judged and fetched.

Judging asks whether the image is for this node; the volume says what is done if it is not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from csi.attributes import OnMismatch
from csi.compat import FactsOf, Judge, Mismatch
from csi.config import CsiConfig
from csi.errors import Unmet
from csi.events import Events
from csi.fetches import Fetches
from csi.images import Found, Images
from csi.metrics import Metrics
from csi.requests import PublishRequest
from csi.stores import StoreAddress, Stores
from imgfmt.digest import Digest
from imgfmt.errors import StoreUnavailable
from imgfmt.image import Member
from imgfmt.reference import ImageRef
from transfer.cache.layout import CacheRoot, DomainPaths
from transfer.cache.warm import WarmConfig, WarmReport, warm
from transfer.config import transfer_config
from transfer.progress import Progress
from transfer.pull import choose_members
from transfer.threads import Threads

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a volume is to show: these members of an image, or in their place `status` alone."""

    paths: DomainPaths
    digest: Digest
    members: tuple[Member, ...] = ()
    status: bytes | None = None


class Preparing:
    """Prepares volumes of one node. What `facts_of` gives is of the node."""

    def __init__(
        self,
        config: CsiConfig,
        cache: CacheRoot,
        stores: Stores,
        images: Images,
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
        self._stores = stores
        self._images = images
        self._fetches = fetches
        self._threads = threads
        self._facts_of = facts_of
        self._judge = judge
        self._metrics = metrics
        self._events = events
        self._now_s = now_s

    async def prepare(
        self, request: PublishRequest, address: StoreAddress, until_s: float
    ) -> Ready | None:
        """Have in the cache what a volume shows. None if it was evicted meanwhile.

        Raises InProgress while it is being fetched, Unmet where the image refuses this node and
        the volume says `fail`, StoreUnavailable at `until_s`, and the errors of fetching.
        """
        left_s, what = until_s - self._now_s(), f"the store of image {request.attributes.image}"
        found, judged = await within(left_s, what, self._find(request, address))
        if isinstance(judged, bytes):
            return Ready(found.paths, found.digest, status=judged)
        member = request.attributes.member
        if found.image is None:
            await self._fetch(request, found, judged, until_s)
            image = await self._threads.run(self._images.complete, found.paths, judged, member)
            if image is None:
                return None
            found = Found(found.address, found.paths, judged, image)
        return Ready(found.paths, found.digest, found.members(member))

    async def _find(
        self, request: PublishRequest, address: StoreAddress
    ) -> tuple[Found, Digest | bytes]:
        """The image, and what of it is to be mounted; see `_judged`."""
        attributes, pod = request.attributes, request.pod
        found = await self._images.find(
            attributes, address, namespace=pod.namespace, inline=pod.ephemeral
        )
        if found.image is None:
            digest, image, mismatches = await self._images.chosen(found)
        else:
            digest, image, mismatches = found.digest, found.image, []
        members = choose_members(image, digest, attributes.member)
        mismatches += await self._threads.run(self._judge, image, members)
        judged = self._judged(request, digest, mismatches)
        if found.image is None and isinstance(judged, Digest):
            async with self._stores.held(found.address) as opened:
                await self._images.check_room(await opened.catalog(), members)
        return found, judged

    def _judged(
        self, request: PublishRequest, digest: Digest, mismatches: list[Mismatch]
    ) -> Digest | bytes:
        """The image to mount, or the status file of an empty volume in its place.

        Raises Unmet if the image refuses this node and the volume says `fail`.
        """
        if not mismatches:
            return digest
        reference = request.attributes.image
        told = f"image {reference} is not for this node: {'; '.join(map(str, mismatches))}"
        match request.attributes.on_mismatch:
            case OnMismatch.FAIL:
                raise Unmet(
                    f"{told}; use a node that fits, or set the volume attribute onMismatch to empty"
                    " (starts without the snapshot) or mount (at your own risk)"
                )
            case OnMismatch.EMPTY:
                self._warn(request, f"{told}; the volume is empty")
                return _status(reference, digest, mismatches)
            case OnMismatch.MOUNT:
                self._warn(request, f"{told}; mounted all the same")
                return digest

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

    def _warn(self, request: PublishRequest, message: str) -> None:
        _log.warning(message, extra={"volume": request.volume_id, "pod": request.pod.name})
        self._events.warning(request.pod, "SnapshotMismatch", message)


async def within(timeout_s: float, what: str, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises StoreUnavailable if it takes longer."""
    if timeout_s <= 0:
        work.close()
        raise StoreUnavailable(f"{what}: the call leaves no time to ask it; it is tried again")
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise StoreUnavailable(
            f"{what}: no answer within {max(0.1, round(timeout_s, 1)):g} s; it is tried again"
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
