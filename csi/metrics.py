"""Figures for Prometheus. Names begin with `snapcask_`; units are in the names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from transfer.cache.warm import WarmReport

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 90, 120)
_FETCH_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_SIZES_EVERY_S = 30.0


class Metrics:
    """The figures of one driver, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._operations = Counter(
            "snapcask_csi_operations",
            "Calls by method and gRPC code.",
            ("method", "code"),
            registry=self.registry,
        )
        self._operation_seconds = Histogram(
            "snapcask_csi_operation_seconds",
            "How long calls took.",
            ("method",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._bytes = Counter(
            "snapcask_cache_bytes_moved",
            "Bytes fetched from stores, reused from images of the node, and evicted.",
            ("how",),
            registry=self.registry,
        )
        for how in ("fetched", "reused", "evicted"):
            self._bytes.labels(how)
        self._fetch_seconds = Histogram(
            "snapcask_fetch_seconds",
            "How long fetches took, by phase.",
            ("phase",),
            buckets=_FETCH_SECONDS,
            registry=self.registry,
        )
        self._sizes_s = float("-inf")
        self._guard = threading.Lock()

    def called(self, method: str, code: str, seconds: float) -> None:
        """A call ended."""
        self._operations.labels(method, code).inc()
        self._operation_seconds.labels(method).observe(seconds)

    def fetched(self, report: WarmReport) -> None:
        """A fetch ended well."""
        self._bytes.labels("fetched").inc(report.fetched_bytes)
        self._bytes.labels("reused").inc(report.shared_bytes + report.copied_bytes)
        self._bytes.labels("evicted").inc(report.evicted_bytes)
        for phase, seconds in report.seconds.items():
            self._fetch_seconds.labels(phase).observe(seconds)

    def watch_fetches(self, running: Callable[[], int], queued: Callable[[], int]) -> None:
        """Show how many fetches run and wait, as these tell when somebody looks."""
        name, text = "snapcask_fetches_running", "Fetches begun and not ended."
        Gauge(name, text, registry=self.registry).set_function(running)
        name, text = "snapcask_fetches_queued", "Fetches that wait for their turn."
        Gauge(name, text, registry=self.registry).set_function(queued)

    def watch_cache(self, sizes: Callable[[], tuple[int, int, int]]) -> None:
        """Show cache bytes, free bytes and volumes, looked up twice a minute at most."""
        own = Gauge("snapcask_cache_bytes", "Bytes that the cache holds.", registry=self.registry)
        free = Gauge("snapcask_cache_free_bytes", "Free bytes beside it.", registry=self.registry)
        volumes = Gauge("snapcask_csi_volumes", "Volumes published.", registry=self.registry)
        found = (0, 0, 0)

        def look(index: int) -> Callable[[], float]:
            def value() -> float:
                nonlocal found
                with self._guard:
                    if time.monotonic() - self._sizes_s > _SIZES_EVERY_S:
                        self._sizes_s = time.monotonic()
                        found = sizes()
                return float(found[index])

            return value

        own.set_function(look(0))
        free.set_function(look(1))
        volumes.set_function(look(2))

    def text(self) -> bytes:
        """All figures, in the text format. Blocks."""
        return generate_latest(self.registry)
