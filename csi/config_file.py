"""Reading the driver's configuration, strictly: what is wrong is named by its key, in one line."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

from csi.config import (
    ALL,
    DRIVER_NAME,
    CacheConfig,
    CsiConfig,
    FetchConfig,
    KubernetesConfig,
    LogLevel,
    MountConfig,
    MountMode,
    PolicyConfig,
    StoreConfig,
    check_node_name,
)
from csi.json_keys import Keys, absolute, choice, load, match
from csi.stores import check_url
from imgfmt.errors import ImageError, InvalidInput, NotFound
from imgfmt.reference import parse_reference
from transfer.cache.evict import Watermarks
from transfer.oserrors import printable, translate

MAX_CONFIG_BYTES = 1 << 20

_STORE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_DRIVER = re.compile(r"[a-z](?:[a-z0-9.-]{0,61}[a-z])?")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_TAINT = re.compile(
    rf"(?:(?=[^/]{{1,253}}/){_LABEL}(?:\.{_LABEL})*/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
)
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})")
_MIN_MEMORY_BYTES = 6 << 20


def read_config(path: str) -> CsiConfig:
    """Read the file at `path`. Raises NotFound, AccessDenied, or InvalidInput naming the key."""
    what = f"configuration {printable(path)}"
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise translate(error, what) from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise InvalidInput(f"{what} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        return parse_config(raw)
    except ImageError as error:
        if isinstance(error, NotFound):
            raise
        raise InvalidInput(f"{what}: {error}") from None


def parse_config(raw: bytes | str) -> CsiConfig:
    """Read the JSON text of a configuration. Raises InvalidInput naming the key."""
    keys = Keys(load(raw), "")
    stores = keys.mapping("stores", _store)
    if not stores:
        raise InvalidInput("stores: name at least one store")
    default = keys.optional_text("defaultStore")
    if default is None and len(stores) == 1:
        default = next(iter(stores))
    if default is not None and default not in stores:
        raise InvalidInput(f"defaultStore: {default!r} is not one of stores")
    for name in stores:
        match(_STORE_NAME, name, f"stores.{name}", "lower-case letters, digits and -, at most 32")
    config = CsiConfig(
        stores=MappingProxyType(stores),
        default_store=default,
        node_name=check_node_name(keys.optional_text("nodeName")),
        allow_pod_stores=keys.flag("allowPodStores", False),
        kubelet_dir=absolute(keys.text("kubeletDir", "/var/lib/kubelet"), "kubeletDir"),
        driver_name=match(
            _DRIVER,
            keys.text("driverName", DRIVER_NAME),
            "driverName",
            "at most 63 lower-case letters, digits, . and -, with a letter first and last",
        ),
        metrics_address=_address(keys.optional_text("metricsAddress"), "metricsAddress"),
        log_level=keys.choice("logLevel", LogLevel, LogLevel.INFO),
        policy=_policy(keys.below("policy")),
        cache=_cache(keys.below("cache")),
        mount=_mount(keys.below("mount")),
        fetch=_fetch(keys.below("fetch")),
        kubernetes=_kubernetes(keys.below("kubernetes")),
    )
    keys.done()
    _check_apart(config)
    return config


def _check_apart(config: CsiConfig) -> None:
    """Raise InvalidInput where the cache would hold kubelet's folder."""
    disks = [("cache.disks", disk) for disk in config.cache.disks]
    for where, path in [("cache.path", config.cache.path), *disks]:
        if f"{config.kubelet_dir}/".startswith(f"{path}/"):
            raise InvalidInput(f"{where}: {path[:80]!r} holds kubeletDir; name another folder")


def _store(value: Any, where: str) -> StoreConfig:
    keys = Keys(value, where)
    url = keys.text("url", "")
    keys.done()
    if not url:
        raise InvalidInput(f"{where}.url is missing")
    if not url.isprintable():
        raise InvalidInput(f"{where}.url has characters that can't be printed")
    try:
        check_url(url)
    except ImageError as error:
        raise InvalidInput(f"{where}.url: {error}") from None
    return StoreConfig(url)


def _policy(keys: Keys) -> PolicyConfig:
    single = keys.flag("singleTenant", False)
    namespaces = keys.mapping("namespaces", _prefixes)
    keys.done()
    for name in namespaces:
        if name != ALL:
            match(_NAMESPACE, name, f"policy.namespaces.{name}", "a namespace, or *")
    if single and namespaces:
        raise InvalidInput("policy: singleTenant allows everything, so leave namespaces out")
    return PolicyConfig(single, MappingProxyType(namespaces))


def _prefixes(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidInput(f"{where} is not an array of strings")
    for prefix in value:
        _check_prefix(prefix, where)
    return tuple(value)


def _check_prefix(prefix: str, where: str) -> None:
    open_ended = prefix.endswith(ALL)
    stem = prefix[:-1].rstrip("/._-") if open_ended else prefix.rstrip("/")
    try:
        found = parse_reference("any" if prefix == ALL else stem)
        if found.by_digest:
            raise InvalidInput("a digest can't be a prefix")
        if open_ended and found.tag is not None:
            raise InvalidInput("a tag has no * at its end")
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}: {prefix[:80]!r} is not a prefix of references ({error}); write models/llama,"
            " models/llama-*, models/llama:v3 or *"
        ) from None


def _cache(keys: Keys) -> CacheConfig:
    path = absolute(keys.text("path", "/var/lib/snapcask"), keys.path("path"))
    begin = keys.number("beginFree", 0.20, 0.0, 0.99)
    end = keys.number("endFree", max(0.25, begin), 0.0, 0.99)
    if end < begin:
        raise InvalidInput(f"{keys.path('endFree')}: {end:g} is less than beginFree, {begin:g}")
    marks = Watermarks(begin, end, keys.integer("maxBytes", None, 1))
    allow = keys.flag("allowRootFilesystem", False)
    interval_h = keys.number("scrubIntervalHours", 168.0, 0.0, 87_600.0)
    rate = keys.integer("scrubBytesPerSecond", 64 << 20, 1 << 20)
    disks = keys.paths("disks")
    keys.done()
    for disk in disks:
        if disk == path or disk.startswith(f"{path}/"):
            raise InvalidInput(f"{keys.path('disks')}: {disk[:80]!r} is within the cache itself")
    return CacheConfig(path, disks, marks, allow, 3600.0 * interval_h, rate or 0)


def _mount(keys: Keys) -> MountConfig:
    mode = keys.choice("mode", MountMode, MountMode.OVERLAY)
    namespaces = keys.mapping("namespaces", lambda v, where: choice(v, MountMode, where))
    for name in namespaces:
        match(_NAMESPACE, name, f"{keys.path('namespaces')}.{name}", "a namespace")
    shared = keys.flag("requireShared", True)
    keys.done()
    return MountConfig(mode, MappingProxyType(namespaces), shared)


def _fetch(keys: Keys) -> FetchConfig:
    config = FetchConfig(
        wait_limit_s=keys.number("waitLimitSeconds", 90.0, 0.1, 110.0),
        idle_cancel_s=keys.number("idleCancelSeconds", 300.0, 0.0, 86400.0),
        max_memory_bytes=keys.integer("maxMemoryBytes", 128 << 20, _MIN_MEMORY_BYTES) or 0,
        max_parallel=keys.integer("maxParallel", 4, 1) or 1,
        buffered=keys.flag("buffered", False),
    )
    keys.done()
    return config


def _kubernetes(keys: Keys) -> KubernetesConfig:
    events, taint = keys.flag("events", False), keys.optional_text("removeTaint")
    keys.done()
    if taint is not None:
        where, key = keys.path("removeTaint"), re.split("[:=]", taint)[0]
        if key != taint:
            raise InvalidInput(
                f"{where}: {taint[:80]!r} is more than the key of a taint: {key[:80]}"
            )
        match(_TAINT, taint, where, "the key of a taint, such as csi.snapcask.dev/agent-not-ready")
    return KubernetesConfig(events, taint)


def _address(text: str | None, where: str) -> tuple[str, int] | None:
    if text is None:
        return None
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 <= int(found[2]) < 65536:
        raise InvalidInput(f"{where}: {text[:80]!r} is not host:port or :port")
    return found[1].strip("[]"), int(found[2])
