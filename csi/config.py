"""The driver's configuration: one JSON file. docs/csi.md has an example.

It is read by `csi.config_file`, once and strictly. Keys are written as in Kubernetes objects
(camelCase); the docstring of each class lists its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from imgfmt.errors import InvalidInput
from transfer.cache.evict import Watermarks

DRIVER_NAME = "csi.snapcask.dev"

ALL = "*"
"""A policy entry that allows every reference, and digests without a name."""


class MountMode(StrEnum):
    """How a volume is mounted.

    `overlay`: an overlayfs of lower layers only, read-only at the superblock, for everybody.
    `bind`: a read-only bind mount of the cached tree, the only one that works for Pods with
    `hostUsers: false`; a privileged container could make it writable, so it is for
    administrators to choose, never for Pod authors.
    """

    OVERLAY = "overlay"
    BIND = "bind"


class LogLevel(StrEnum):
    """The least severe lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store that Pods may name.

    Keys: `url` (required: a directory, `file://` or `s3://bucket/prefix?option=value` URL; the
    options of docs/cli.md, section Buckets, apply).
    """

    url: str


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Which namespace may mount which references. What is not listed is refused.

    Keys: `singleTenant` (bool, default false: every namespace may mount everything; `namespaces`
    must be empty then), `namespaces` (object: namespace -> array of prefixes; the namespace `*`
    stands for all of them). A prefix `models/llama` allows the name `models/llama` and all below
    `models/llama/`; `models/llama-*` every name that begins with `models/llama-`;
    `models/llama:v3` one tag; `store:` and `/` never begin a prefix; `*` allows all, digests
    without a name too.
    """

    single_tenant: bool = False
    namespaces: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The node's cache. The same path on the host and in the driver's container.

    Keys: `path` (default `/var/lib/snapcask`), `disks` (array of directories, default none: on
    further disks, over which the files of each image are spread; one that the cache was given once
    it keeps), `maxBytes` (integer or null, default null: bounded by the watermarks only),
    `beginFree` and `endFree` (shares of the filesystem, default 0.20 and 0.25: eviction begins when
    less than the first is free, and ends at the second), `allowRootFilesystem` (bool, default
    false: a cache or a further disk of it on the disk of `kubeletDir`, or of `/`, is refused),
    `scrubIntervalHours` (number >= 0, default 168: the whole cache is read back and mended that
    often; 0 for never), `scrubBytesPerSecond` (integer >= 1048576, default 67108864: on average,
    with a rest after each tree).
    """

    path: str = "/var/lib/snapcask"
    disks: tuple[str, ...] = ()
    watermarks: Watermarks = field(default_factory=Watermarks)
    allow_root_filesystem: bool = False
    scrub_interval_s: float = 168 * 3600.0
    scrub_bytes_per_s: int = 64 << 20


@dataclass(frozen=True, slots=True)
class MountConfig:
    """How volumes are mounted.

    Keys: `mode` (`overlay` or `bind`, default `overlay`), `namespaces` (object: namespace ->
    mode, for Pods of that namespace, default none). A persistent volume may say its own in the
    volume attribute `mountMode`; an inline volume may not. `requireShared` (bool, default true):
    the driver is not ready while mounts below `kubeletDir` do not reach the host.
    """

    mode: MountMode = MountMode.OVERLAY
    namespaces: Mapping[str, MountMode] = field(default_factory=lambda: MappingProxyType({}))
    require_shared: bool = True

    @property
    def modes(self) -> frozenset[MountMode]:
        """All that may be needed of what is written here."""
        return frozenset({self.mode, *self.namespaces.values()})

    def mode_of(self, namespace: str | None) -> MountMode:
        """The mode for Pods of a namespace."""
        return self.namespaces.get(namespace or "", self.mode)


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How images are brought to the node.

    Keys: `waitLimitSeconds` (number > 0 and <= 110, default 90: a publish that waits longer
    answers ABORTED with the progress), `idleCancelSeconds` (number >= 0, default 300: a fetch that
    nobody waits for is cancelled after it), `maxMemoryBytes` (integer >= 6291456, default
    134217728: all buffers of one fetch), `maxParallel` (integer >= 1, default 4: fetches at a
    time, the others queue), `buffered` (bool, default false: leave what is fetched in the page
    cache).
    """

    wait_limit_s: float = 90.0
    idle_cancel_s: float = 300.0
    max_memory_bytes: int = 128 << 20
    max_parallel: int = 4
    buffered: bool = False


@dataclass(frozen=True, slots=True)
class KubernetesConfig:
    """What the driver does with the Kubernetes API. Nothing by default.

    Keys: `events` (bool, default false: write events to the Pods of volumes that fail or warn;
    needs create on events), `removeTaint` (string or null, default null: key of a taint
    to remove from the own node once CSINode shows the driver; needs get and patch on nodes and
    get on csinodes).
    """

    events: bool = False
    remove_taint: str | None = None


@dataclass(frozen=True, slots=True)
class CsiConfig:
    """All of it.

    Keys: `stores` (required, object: name of lower-case letters, digits and `-` -> StoreConfig; at
    least one), `defaultStore` (default: the only store, where there is one), `allowPodStores`
    (bool, default false: inline volumes may give a `store` that is a URL instead of a name),
    `nodeName` (string of 1 to 256 bytes or null, default null; since one file serves all nodes,
    the option `--node-name` or the variable NODE_NAME of the command go before it), `kubeletDir`
    (default `/var/lib/kubelet`; targets outside are refused), `driverName` (default
    `csi.snapcask.dev`), `metricsAddress` (string `host:port` or `:port`, or null for none, default
    null: serves /metrics, /healthz and /readyz), `logLevel` (`debug`, `info`, `warning` or
    `error`, default `info`), `policy`, `cache`, `mount`, `fetch`, `kubernetes`.

    Which services are offered (node, controller or both) is not said here but by the option
    `--service` of the command, so that a DaemonSet and a Deployment can share one file.
    """

    stores: Mapping[str, StoreConfig]
    default_store: str | None
    node_name: str | None = None
    allow_pod_stores: bool = False
    kubelet_dir: str = "/var/lib/kubelet"
    driver_name: str = DRIVER_NAME
    metrics_address: tuple[str, int] | None = None
    log_level: LogLevel = LogLevel.INFO
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    mount: MountConfig = field(default_factory=MountConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


def check_node_name(name: str | None) -> str | None:
    """The name of a node, or None. Raises InvalidInput."""
    if name is None:
        return None
    if not name.isprintable():
        raise InvalidInput(f"nodeName {name[:80]!a} has characters that can't be printed")
    if not 0 < len(name.encode()) <= 256:
        raise InvalidInput("nodeName is not a string of 1 to 256 bytes")
    return name
