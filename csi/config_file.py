"""Reading the driver's configuration, strictly: what is wrong is named by its key, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeVar

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
from imgfmt.errors import ImageError, InvalidInput, NotFound
from imgfmt.reference import parse_reference
from transfer.cache.evict import Watermarks
from transfer.oserrors import printable, translate

MAX_CONFIG_BYTES = 1 << 20

_STORE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_DRIVER = re.compile(r"[a-z](?:[a-z0-9.-]{0,61}[a-z])?")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})")
_MIN_MEMORY_BYTES = 6 << 20

T = TypeVar("T")


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
    try:
        document = json.loads(raw, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidInput("it is nested too deeply") from None
    except ValueError as error:
        raise InvalidInput(f"it is not JSON: {error}") from None
    keys = _Keys(document, "")
    stores = keys.mapping("stores", _store)
    if not stores:
        raise InvalidInput("stores: name at least one store")
    default = keys.optional_text("defaultStore")
    if default is None and len(stores) == 1:
        default = next(iter(stores))
    if default is not None and default not in stores:
        raise InvalidInput(f"defaultStore: {default!r} is not one of stores")
    for name in stores:
        _match(_STORE_NAME, name, f"stores.{name}", "lower-case letters, digits and -, at most 32")
    config = CsiConfig(
        stores=MappingProxyType(stores),
        default_store=default,
        node_name=check_node_name(keys.optional_text("nodeName")),
        allow_pod_stores=keys.flag("allowPodStores", False),
        kubelet_dir=_absolute(keys.text("kubeletDir", "/var/lib/kubelet"), "kubeletDir"),
        driver_name=_match(
            _DRIVER,
            keys.text("driverName", DRIVER_NAME),
            "driverName",
            "at most 63 letters, digits, . and -, with a letter first and last",
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
    return config


class _Keys:
    """One object of the file; each key is taken once, and none may be left."""

    def __init__(self, found: object, where: str) -> None:
        if not isinstance(found, dict):
            raise InvalidInput(f"{where or 'the document'} is not a JSON object")
        self._left: dict[str, Any] = dict(found)
        self._where = where

    def path(self, key: str) -> str:
        """The key with those above it."""
        return f"{self._where}.{key}" if self._where else key

    def _take(self, key: str, kind: type[T] | tuple[type, ...], default: T, shown: str) -> T:
        if key not in self._left:
            return default
        value = self._left.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise InvalidInput(f"{self.path(key)}: {str(value)[:80]!r} is not {shown}")
        return value  # type: ignore[return-value]

    def text(self, key: str, default: str) -> str:
        """A string that is not empty, unless that is the default."""
        value = self._take(key, str, default, "a string")
        if not value and value != default:
            raise InvalidInput(f"{self.path(key)} is empty")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None for null, an empty one, and for what is not there."""
        if self._left.get(key, "") is None:
            del self._left[key]
        return self.text(key, "") or None

    def flag(self, key: str, default: bool) -> bool:
        """A bool."""
        return self._take(key, bool, default, "true or false")

    def number(self, key: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = float(self._take(key, (int, float), default, "a number"))
        if not low <= value <= high:
            raise InvalidInput(f"{self.path(key)}: {value:g} is not from {low:g} to {high:g}")
        return value

    def integer(self, key: str, default: int | None, low: int) -> int | None:
        """An integer of at least `low`; null is None where that is the default."""
        if default is None and self._left.get(key, 0) is None:
            del self._left[key]
        value = self._take(key, int, default, "an integer")
        if value is not None and not low <= value < 2**63:
            raise InvalidInput(f"{self.path(key)}: {value} is less than {low}, or too large")
        return value

    def choice(self, key: str, kind: type[T], default: T) -> T:
        """One of an enumeration."""
        return _choice(self._take(key, str, str(default), "a string"), kind, self.path(key))

    def below(self, key: str) -> _Keys:
        """The object under a key, an empty one if there is none."""
        return _Keys(self._left.pop(key, {}), self.path(key))

    def mapping(self, key: str, read: Callable[[Any, str], T]) -> dict[str, T]:
        """An object whose keys are names."""
        found = self.below(key)
        return {name: read(value, found.path(name)) for name, value in found._left.items()}

    def done(self) -> None:
        """Raise InvalidInput if a key is left."""
        for key in self._left:
            raise InvalidInput(f"{self.path(key[:80])} is not a key that is known here")


def _store(value: Any, where: str) -> StoreConfig:
    keys = _Keys(value, where)
    url = keys.text("url", "")
    keys.done()
    if not url:
        raise InvalidInput(f"{where}.url is missing")
    if not url.isprintable():
        raise InvalidInput(f"{where}.url has characters that can't be printed")
    return StoreConfig(url)


def _policy(keys: _Keys) -> PolicyConfig:
    single = keys.flag("singleTenant", False)
    namespaces = keys.mapping("namespaces", _prefixes)
    keys.done()
    for name in namespaces:
        if name != ALL:
            _match(_NAMESPACE, name, f"policy.namespaces.{name}", "a namespace, or *")
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
    stem = prefix.removesuffix(ALL).rstrip("/._-") if prefix != ALL else "any"
    try:
        if parse_reference(stem).by_digest:
            raise InvalidInput("a digest can't be a prefix")
    except InvalidInput as error:
        raise InvalidInput(
            f"{where}: {prefix[:80]!r} is not a prefix of references ({error}); write models/llama,"
            " models/llama-*, models/llama:v3 or *"
        ) from None


def _cache(keys: _Keys) -> CacheConfig:
    path = _absolute(keys.text("path", "/var/lib/snapcask"), keys.path("path"))
    begin = keys.number("beginFree", 0.20, 0.0, 0.99)
    end = keys.number("endFree", max(0.25, begin), 0.0, 0.99)
    if end < begin:
        raise InvalidInput(f"{keys.path('endFree')}: {end:g} is less than beginFree, {begin:g}")
    marks = Watermarks(begin, end, keys.integer("maxBytes", None, 1))
    allow = keys.flag("allowRootFilesystem", False)
    interval_h = keys.number("scrubIntervalHours", 168.0, 0.0, 87_600.0)
    rate = keys.integer("scrubBytesPerSecond", 64 << 20, 1 << 20)
    keys.done()
    return CacheConfig(path, marks, allow, 3600.0 * interval_h, rate or 0)


def _mount(keys: _Keys) -> MountConfig:
    mode = keys.choice("mode", MountMode, MountMode.OVERLAY)
    namespaces = keys.mapping("namespaces", lambda v, where: _choice(v, MountMode, where))
    shared = keys.flag("requireShared", True)
    keys.done()
    return MountConfig(mode, MappingProxyType(namespaces), shared)


def _fetch(keys: _Keys) -> FetchConfig:
    config = FetchConfig(
        wait_limit_s=keys.number("waitLimitSeconds", 90.0, 0.1, 110.0),
        idle_cancel_s=keys.number("idleCancelSeconds", 300.0, 0.0, 86400.0),
        max_memory_bytes=keys.integer("maxMemoryBytes", 128 << 20, _MIN_MEMORY_BYTES) or 0,
        max_parallel=keys.integer("maxParallel", 4, 1) or 1,
        buffered=keys.flag("buffered", False),
    )
    keys.done()
    return config


def _kubernetes(keys: _Keys) -> KubernetesConfig:
    config = KubernetesConfig(keys.flag("events", False), keys.optional_text("removeTaint"))
    keys.done()
    return config


def _absolute(path: str, where: str) -> str:
    parts = path.split("/")[1:]
    if not path.startswith("/") or not path.isprintable() or {"", ".", ".."} & set(parts):
        raise InvalidInput(f"{where}: {path[:80]!r} is not an absolute path in its shortest form")
    return path


def _address(text: str | None, where: str) -> tuple[str, int] | None:
    if text is None:
        return None
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 <= int(found[2]) < 65536:
        raise InvalidInput(f"{where}: {text[:80]!r} is not host:port or :port")
    return found[1].strip("[]"), int(found[2])


def _choice(value: Any, kind: type[T], where: str) -> T:
    allowed = [str(item) for item in kind]  # type: ignore[attr-defined]
    if value not in allowed:
        raise InvalidInput(f"{where}: {str(value)[:80]!r} is not one of {', '.join(allowed)}")
    return kind(value)  # type: ignore[call-arg]


def _match(pattern: re.Pattern[str], value: str, where: str, shown: str) -> str:
    if not pattern.fullmatch(value):
        raise InvalidInput(f"{where}: {value[:80]!r} is not {shown}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key[:80]!r} is there twice")
        found[key] = value
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON knows")
