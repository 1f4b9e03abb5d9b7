"""The driver as a process: one event loop, one socket, one cache. Unmounts nothing when it ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from enum import StrEnum
from typing import Any

import grpc.aio

from csi import logs
from csi.compat import Judge, facts_of_node, judge_by
from csi.config import CsiConfig
from csi.controller import ControllerServicer
from csi.endpoint import SCHEME, Endpoint
from csi.events import Events, NoEvents
from csi.fetches import Fetches
from csi.http import Page, serving
from csi.images import Images
from csi.interceptor import Calls
from csi.kept import KeptVariants
from csi.kubernetes import Api, PodEvents, helping, remove_taint
from csi.metrics import Metrics
from csi.mounting import Mounter
from csi.names import VolumeNames
from csi.node_cache import alone, open_cache
from csi.preparing import Preparing
from csi.records import Records
from csi.scrubbing import Scrubber
from csi.services import IdentityServicer, NodeServicer, handlers_of
from csi.stores import Stores, check_buckets
from csi.targets import KubeletFolder
from csi.trial import why_no_mounts
from csi.volumes import VolumeService
from imgfmt.errors import Conflict, InvalidInput
from transfer.cache.evict import free_bytes, size_bytes
from transfer.cache.layout import CacheRoot
from transfer.cache.warm import WarmReport
from transfer.threads import Threads

STATE_FOLDER = "csi"
"""Of the cache: the driver's records."""

_GRACE_S = 5.0
_N_THREADS = 8

_PageMaker = Callable[[], Awaitable[Page]]

_log = logging.getLogger(__name__)


class Service(StrEnum):
    """Which services a process offers beside Identity."""

    NODE = "node"
    CONTROLLER = "controller"
    ALL = "all"


async def serve(
    config: CsiConfig,
    endpoint: Endpoint,
    *,
    version: str,
    service: Service = Service.ALL,
    node_name: str | None = None,
    judge: Judge | None = None,
    api: Api | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, or until cancelled.

    Raises InvalidInput, Conflict or AccessDenied where it can't begin. Mounts stay.
    """
    logs.start(config.log_level)
    async with AsyncExitStack() as stack:
        node = node_name or config.node_name or ""
        events = await _help(stack, config, service, node, api)
        driver = _Driver(config, version, service, node)
        await driver.open(stack, judge, events)
        endpoint.prepare()
        server = driver.server
        before = os.umask(0o177)
        try:
            server.add_insecure_port(f"{SCHEME}{endpoint.path}")
            await server.start()
        finally:
            os.umask(before)
        try:
            if config.metrics_address is not None:
                await _watch(stack, config.metrics_address, driver.pages())
            _log.info("serving", extra={"endpoint": endpoint.path, "version": version})
            await _until_signal()
        finally:
            await asyncio.shield(server.stop(_GRACE_S))
    _log.info("ended; what is mounted stays")


async def _help(
    stack: AsyncExitStack, config: CsiConfig, service: Service, node: str, api: Api | None
) -> Events:
    """Begin what the Kubernetes API is wanted for; returns who takes events."""
    wanted = config.kubernetes
    if service is Service.CONTROLLER or not (wanted.events or wanted.remove_taint):
        return NoEvents()
    api = api or Api.in_cluster()
    work: list[Callable[[], Any]] = []
    events: Events = NoEvents()
    if wanted.events:
        written = PodEvents(api, config.driver_name, node)
        work.append(written.run)
        events = written
    if (taint := wanted.remove_taint) is not None:
        work.append(lambda: remove_taint(api, taint, config.driver_name, node))
    await stack.enter_async_context(helping(*work))
    return events


async def _watch(
    stack: AsyncExitStack, address: tuple[str, int], pages: dict[str, _PageMaker]
) -> None:
    """Serve the pages. Raises InvalidInput where nobody could listen, Conflict if somebody does."""
    try:
        await stack.enter_async_context(serving(address, pages))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        kind, why = (Conflict, "another process does") if taken else (InvalidInput, error.strerror)
        where = f"{address[0]}:{address[1]}"
        raise kind(f"metricsAddress: can't listen at {where}: {why}; name another one") from error


class _Driver:
    """All parts of one driver."""

    def __init__(self, config: CsiConfig, version: str, service: Service, node_name: str) -> None:
        self._config = config
        self._version = version
        self._service = service
        self._node_name = node_name
        self._metrics = Metrics()
        self._kubelet: KubeletFolder | None = None
        self._reaches_host = False
        self._no_mounts = ""
        self._cache: CacheRoot | None = None
        self.server = grpc.aio.server(interceptors=[Calls(self._metrics)])

    async def open(self, stack: AsyncExitStack, judge: Judge | None, events: Events) -> None:
        """Make the services that are asked for; `stack` ends them."""
        check_buckets(self._config)
        stores = Stores(self._config)
        stack.callback(stores.close)
        with_controller = self._service is not Service.NODE
        identity = IdentityServicer(
            self._config.driver_name,
            self._version,
            controller=with_controller,
            why_not_ready=self.why_not_ready,
        )
        handlers = [handlers_of("Identity", identity)]
        if with_controller:
            names = VolumeNames(self._config, stores)
            handlers.append(handlers_of("Controller", ControllerServicer(names)))
        if self._service is not Service.CONTROLLER:
            if not self._node_name:
                raise InvalidInput("the node has no name: use --node-name or set NODE_NAME")
            volumes = await self._open_node(stack, stores, judge, events)
            node = NodeServicer(self._node_name, volumes, why_not_ready=self.why_not_ready)
            handlers.append(handlers_of("Node", node))
        self.server.add_generic_rpc_handlers(handlers)

    async def _open_node(
        self, stack: AsyncExitStack, stores: Stores, judge: Judge | None, events: Events
    ) -> VolumeService:
        config = self._config
        kubelet = self._kubelet = KubeletFolder.find(config.kubelet_dir)
        cache = self._cache = open_cache(config.cache, kubelet.real)
        records = Records(os.path.join(cache.path, STATE_FOLDER))
        stack.enter_context(alone(os.path.join(records.folder, "driver.lock")))
        mounter = Mounter(cache, records, kubelet)
        threads = stack.enter_context(Threads("csi", _N_THREADS))
        trial, modes = os.path.join(records.folder, "trial"), config.mount.modes
        self._no_mounts = await threads.run(why_no_mounts, trial, modes)
        if not self.why_not_ready():
            for line in await threads.run(mounter.reconcile):
                _log.warning(line)
        fetches: Fetches[WarmReport] = await stack.enter_async_context(
            Fetches(
                max_parallel=config.fetch.max_parallel, idle_cancel_s=config.fetch.idle_cancel_s
            )
        )
        self._metrics.watch_fetches(lambda: fetches.n_running, lambda: fetches.n_queued)
        self._metrics.watch_cache(lambda: _sizes(cache, records))
        await stack.enter_async_context(
            helping(Scrubber(config, cache, stores, records.folder).run)
        )
        kept = KeptVariants(os.path.join(records.folder, "variants"))
        await threads.run(kept.sweep)
        images = Images(config, cache, stores, records, kept, threads, facts_of_node)
        preparing = Preparing(
            config, cache, stores, images, fetches, threads, facts_of=facts_of_node,
            judge=judge or judge_by(facts_of_node), metrics=self._metrics, events=events,
        )  # fmt: skip
        return VolumeService(
            config, cache, mounter, stores, images, preparing, threads, events=events
        )

    def why_not_ready(self) -> str:
        """Why no volume could be mounted so that its Pod sees it, or nothing."""
        if self._no_mounts:
            return self._no_mounts
        try:
            if self._cache is not None:
                self._cache.check_there()
        except Conflict as error:
            return str(error)
        if self._kubelet is None or self._reaches_host:
            return ""
        if not self._config.mount.require_shared or self._kubelet.is_shared():
            self._reaches_host = True
            return ""
        return (
            f"mounts in {self._kubelet.given} stay in this container; mount it with"
            " mountPropagation: Bidirectional"
        )

    def pages(self) -> dict[str, _PageMaker]:
        """What is served over HTTP."""

        async def metrics() -> Page:
            text = await asyncio.to_thread(self._metrics.text)
            return Page(200, text, "text/plain; version=0.0.4; charset=utf-8")

        async def alive() -> Page:
            return Page(200, b"ok\n")

        async def ready() -> Page:
            why = self.why_not_ready()
            return Page(503, f"{why}\n".encode()) if why else Page(200, b"ok\n")

        return {"/metrics": metrics, "/healthz": alive, "/readyz": ready}


def _sizes(cache: CacheRoot, records: Records) -> tuple[int, int, int]:
    return size_bytes(cache), free_bytes(cache)[0], sum(1 for _ in records.names())


async def _until_signal() -> None:
    """Return at the first SIGTERM or SIGINT."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    try:
        await ended.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
