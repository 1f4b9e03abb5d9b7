"""The driver's configuration: read strictly, refused with one line that names the key."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from csi.config import LogLevel, MountMode
from csi.config_file import parse_config, read_config
from csi.server import Endpoint
from imgfmt.errors import Conflict, InvalidInput, NotFound

LEAST: dict[str, Any] = {"stores": {"main": {"url": "s3://bucket/prefix"}}}


def with_key(path: str, value: Any) -> dict[str, Any]:
    """The least configuration with one key more, dots between levels."""
    found: dict[str, Any] = json.loads(json.dumps(LEAST))
    at = found
    *above, last = path.split(".")
    for key in above:
        at = at.setdefault(key, {})
    at[last] = value
    return found


def test_the_least_configuration_has_the_defaults_of_the_documentation() -> None:
    config = parse_config(json.dumps(LEAST))
    assert config.default_store == "main"
    assert config.kubelet_dir == "/var/lib/kubelet"
    assert config.cache.path == "/var/lib/snapcask"
    assert config.fetch.wait_limit_s == 90
    assert config.mount.mode is MountMode.OVERLAY
    assert config.log_level is LogLevel.INFO
    assert not config.policy.single_tenant
    assert not config.policy.namespaces
    assert config.node_name is None
    assert config.metrics_address is None


def test_every_key_can_be_given() -> None:
    config = parse_config(
        json.dumps(
            {
                "stores": {"a": {"url": "/x"}, "b-1": {"url": "s3://y?endpoint=http://h:1"}},
                "defaultStore": "b-1",
                "allowPodStores": True,
                "nodeName": "n",
                "kubeletDir": "/data/kubelet",
                "driverName": "csi.example.org",
                "metricsAddress": "[::1]:9810",
                "logLevel": "debug",
                "policy": {"namespaces": {"team": ["models/llama", "x-*", "m:v3"], "*": ["*"]}},
                "cache": {"path": "/c", "maxBytes": 5, "beginFree": 0.1, "endFree": 0.2,
                          "allowRootFilesystem": True},
                "mount": {"mode": "bind", "namespaces": {"t": "overlay"}, "requireShared": False},
                "fetch": {"waitLimitSeconds": 30, "idleCancelSeconds": 0, "maxParallel": 2,
                          "maxMemoryBytes": 8 << 20, "buffered": True},
                "kubernetes": {"events": True, "removeTaint": "csi.snapcask.dev/not-ready"},
            }
        )
    )  # fmt: skip
    assert config.metrics_address == ("::1", 9810)
    assert config.mount.mode_of("t") is MountMode.OVERLAY
    assert config.mount.mode_of("u") is MountMode.BIND
    assert config.cache.watermarks.max_bytes == 5
    assert config.kubernetes.events
    assert parse_config(json.dumps(with_key("defaultStore", None))).default_store == "main"


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("typo", 1, "typo"),
        ("cache.typo", 1, "cache.typo"),
        ("stores.main.typo", 1, "stores.main.typo"),
        ("stores.main", "s3://x", "stores.main"),
        ("stores.main.url", "", "stores.main.url"),
        ("stores.main.url", 5, "stores.main.url"),
        ("stores.Main", {"url": "/x"}, "stores.Main"),
        ("stores", {}, "stores"),
        ("stores", [], "stores"),
        ("defaultStore", "other", "defaultStore"),
        ("nodeName", "x" * 257, "nodeName"),
        ("kubeletDir", "var/lib/kubelet", "kubeletDir"),
        ("kubeletDir", "/var/lib/kubelet/", "kubeletDir"),
        ("kubeletDir", "/var/../x", "kubeletDir"),
        ("cache.path", "cache", "cache.path"),
        ("cache.maxBytes", 0, "cache.maxBytes"),
        ("cache.maxBytes", 1.5, "cache.maxBytes"),
        ("cache.maxBytes", True, "cache.maxBytes"),
        ("cache.beginFree", 1.5, "cache.beginFree"),
        ("cache", {"beginFree": 0.5, "endFree": 0.4}, "cache.endFree"),
        ("fetch.waitLimitSeconds", 0, "fetch.waitLimitSeconds"),
        ("fetch.waitLimitSeconds", 119, "fetch.waitLimitSeconds"),
        ("fetch.waitLimitSeconds", "90", "fetch.waitLimitSeconds"),
        ("fetch.maxMemoryBytes", 1000, "fetch.maxMemoryBytes"),
        ("fetch.maxParallel", 0, "fetch.maxParallel"),
        ("mount.mode", "fuse", "mount.mode"),
        ("mount.namespaces", {"a": "x"}, "mount.namespaces.a"),
        ("policy.namespaces", {"a": "models"}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["/models"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["Models"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["blake3:" + "0" * 64]}, "policy.namespaces.a"),
        ("policy.namespaces", {"Team": ["*"]}, "policy.namespaces.Team"),
        ("policy", {"singleTenant": True, "namespaces": {"a": ["*"]}}, "singleTenant"),
        ("policy.singleTenant", "yes", "policy.singleTenant"),
        ("driverName", "Csi", "driverName"),
        ("driverName", "x" * 64, "driverName"),
        ("metricsAddress", "9810", "metricsAddress"),
        ("metricsAddress", ":99999", "metricsAddress"),
        ("logLevel", "trace", "logLevel"),
        ("kubernetes.events", 1, "kubernetes.events"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_config(json.dumps(with_key(path, value)))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"stores": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, b"\xff\xfe"],
)
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidInput):
        parse_config(text)


def test_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nothing\.json"):
        read_config(str(tmp_path / "nothing.json"))
    path = tmp_path / "c.json"
    path.write_text("{}")
    with pytest.raises(InvalidInput, match=r"c\.json: stores"):
        read_config(str(path))
    path.write_text(" " * (2 << 20))
    with pytest.raises(InvalidInput, match="bytes"):
        read_config(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "tcp://1.2.3.4:5",
        "unix://relative.sock",
        "/x.sock",
        "unix:///x",
        "unix:///" + "x" * 200 + ".sock",
    ],
)
def test_an_endpoint_is_a_socket_s_path(text: str) -> None:
    with pytest.raises(InvalidInput):
        Endpoint.parse(text)


def test_a_stale_socket_goes_and_anything_else_stays(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "csi.sock"
    endpoint = Endpoint.parse(f"unix://{path}")
    endpoint.prepare()  # nothing there
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    endpoint.prepare()
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        one.listen()
        with pytest.raises(Conflict, match="listens"):
            endpoint.prepare()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(Conflict, match="no socket"):
        endpoint.prepare()
    assert path.read_text() == "mine"


def test_a_cache_on_the_disk_of_kubelet_is_refused_unless_allowed(tmp_path: Path) -> None:
    (tmp_path / "kubelet").mkdir()
    config = tmp_path / "c.json"
    cache = {"path": str(tmp_path / "cache")}
    text = {**LEAST, "kubeletDir": str(tmp_path / "kubelet"), "cache": cache}
    config.write_text(json.dumps(text))
    done = subprocess.run(
        [sys.executable, "-m", "snapcask", "csi", "--endpoint", f"unix://{tmp_path}/c.sock",
         "--config", str(config), "--service", "node", "--node-name", "n"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    for word in (str(tmp_path / "cache"), "disk of kubelet's folder", "cache.maxBytes"):
        assert word in done.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("arguments", [[], ["--service", "node"]])
def test_the_command_says_in_one_line_what_is_missing(tmp_path: Path, arguments: list[str]) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({**LEAST, "kubeletDir": str(tmp_path)}))
    done = subprocess.run(
        [sys.executable, "-m", "snapcask", "csi", "--endpoint", f"unix://{tmp_path}/c.sock",
         "--config", str(config), *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stderr.count("\n") == 1
    assert "--node-name" in done.stderr
