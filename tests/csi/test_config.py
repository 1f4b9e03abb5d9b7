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
from csi.endpoint import Endpoint
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
    assert config.cache.disks == ()
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
                "stores": {"a": {"url": "/x"}, "b-1": {"url": "s3://yyy?endpoint=http://h:1"}},
                "defaultStore": "b-1",
                "allowPodStores": True,
                "nodeName": "n",
                "kubeletDir": "/data/kubelet",
                "driverName": "csi.example.org",
                "metricsAddress": "[::1]:9810",
                "logLevel": "debug",
                "policy": {"namespaces": {"team": ["models/llama", "x-*", "m:v3"], "*": ["*"]}},
                "cache": {"path": "/c", "disks": ["/d/1", "/d/2"], "maxBytes": 5,
                          "beginFree": 0.1, "endFree": 0.2,
                          "allowRootFilesystem": True,
                          "scrubIntervalHours": 1, "scrubBytesPerSecond": 1 << 20},
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
    assert config.cache.disks == ("/d/1", "/d/2")
    assert (config.cache.scrub_interval_s, config.cache.scrub_bytes_per_s) == (3600, 1 << 20)
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
        ("stores.main.url", "rel/dir", "stores.main.url: store rel/dir"),
        ("stores.main.url", "http://x/y", "stores.main.url: store http://x/y"),
        ("stores.main.url", "s3://bucket/y?foo=1", "stores.main.url: store s3://bucket/y?foo=1"),
        ("stores.main.url", "s3://bucket/y?connections=0", "connections is at least 1"),
        ("stores.main.url", "s3://bucket/y?endpoint=minio:9000", "endpoint 'minio:9000'"),
        ("stores.main.url", "s3://B!", "'B!'"),
        ("stores.main.url", "s3://bucket/../y", "stores.main.url"),
        ("stores.main.url", "file://host/y", "stores.main.url"),
        ("stores.main.url", "file://", "stores.main.url"),
        ("stores", {}, "stores"),
        ("stores", [], "stores"),
        ("defaultStore", "other", "defaultStore"),
        ("nodeName", "x" * 257, "nodeName is not a string of 1 to 256 bytes"),
        ("nodeName", "a b\n", "nodeName 'a b\\n' has characters that can't be printed"),
        ("nodeName", "\ud800", "nodeName '\\ud800' has characters"),
        ("kubeletDir", "var/lib/kubelet", "kubeletDir"),
        ("kubeletDir", "/var/lib/kubelet/", "kubeletDir"),
        ("kubeletDir", "/var/../x", "kubeletDir"),
        ("cache.path", "cache", "cache.path"),
        ("cache.disks", "/d", "cache.disks"),
        ("cache.disks", ["/d", 1], "cache.disks: '1'"),
        ("cache.disks", ["/d", "d"], "cache.disks: 'd'"),
        ("cache.disks", ["/d", "/d"], "cache.disks"),
        ("cache", {"path": "/c", "disks": ["/c"]}, "cache.disks"),
        ("cache", {"path": "/c", "disks": ["/c/d"]}, "cache.disks"),
        ("cache.path", "/var/lib/kubelet", "cache.path: '/var/lib/kubelet' holds kubeletDir"),
        ("cache.path", "/var/lib", "cache.path: '/var/lib' holds kubeletDir"),
        ("cache.disks", ["/var"], "cache.disks: '/var' holds kubeletDir"),
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
        ("mount.namespaces", {"Team": "bind"}, "mount.namespaces.Team"),
        ("mount.namespaces", {"*": "bind"}, "mount.namespaces.*"),
        ("policy.namespaces", {"a": "models"}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["/models"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["Models"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["models/llama-"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["models/llama:v*"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": ["m*s"]}, "policy.namespaces.a"),
        ("policy.namespaces", {"a": [""]}, "policy.namespaces.a"),
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
        ("kubernetes.removeTaint", "bad key!", "kubernetes.removeTaint"),
        ("kubernetes.removeTaint", "a.b/c:NoSchedule", "kubernetes.removeTaint"),
        ("kubernetes.removeTaint", "a.b/c=x:NoSchedule", "the key of a taint: a.b/c"),
        ("kubernetes.removeTaint", "a/b/c", "kubernetes.removeTaint"),
        ("kubernetes.removeTaint", "x" * 64, "kubernetes.removeTaint"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_config(json.dumps(with_key(path, value)))
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["/mnt/store", "/mnt/store/", "/", "file:///mnt/a%20b", "file://localhost/mnt", "s3://bucket",
     "S3://bucket/a?endpoint=https://h:9000/x&sign=no&verify-tls=no&ca-bundle=/nosuch"],
)  # fmt: skip
def test_a_store_s_url_is_looked_at_and_nothing_else(url: str) -> None:
    assert parse_config(json.dumps(with_key("stores.main.url", url))).stores["main"].url == url


@pytest.mark.parametrize("key", ["csi.snapcask.dev/agent-not-ready", "starting", "a-1.b/C_d.e"])
def test_the_key_of_a_taint_may_have_a_prefix(key: str) -> None:
    parsed = parse_config(json.dumps(with_key("kubernetes.removeTaint", key)))
    assert parsed.kubernetes.remove_taint == key


@pytest.mark.parametrize("prefix", ["models/llama/", "models/llama-*", "models/*", "m", "*", "m:v"])
def test_prefixes_of_every_kind_can_be_given(prefix: str) -> None:
    parsed = parse_config(json.dumps(with_key("policy.namespaces", {"a": [prefix]})))
    assert parsed.policy.namespaces["a"] == (prefix,)


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


def started(tmp_path: Path, endpoint: str = "", **settings: Any) -> str:
    """What a driver says that ends at once, in one line."""
    config = tmp_path / "c.json"
    given = {**LEAST, "kubeletDir": "/nonexistent", **settings}
    config.write_text(json.dumps(given))
    done = subprocess.run(
        [sys.executable, "-m", "snapcask", "csi", "--endpoint",
         endpoint or f"unix://{tmp_path}/c.sock", "--config", str(config),
         "--service", "controller"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    assert "internal" not in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("option", "word"),
    [("ca-bundle=/nosuch.crt", "the CA bundle /nosuch.crt"), ("profile=nosuch", "profile nosuch")],
)
def test_what_a_url_names_has_to_be_there_at_the_start(
    tmp_path: Path, option: str, word: str
) -> None:
    line = started(tmp_path, stores={"main": {"url": f"s3://bucket/prefix?{option}"}})
    assert "stores.main.url" in line
    assert word in line


def test_a_socket_whose_folder_is_not_there_is_told_of(tmp_path: Path) -> None:
    line = started(tmp_path, endpoint="unix:///nosuch/x.sock")
    assert "endpoint /nosuch/x.sock: its folder is not there" in line


def test_a_metrics_address_that_nobody_can_listen_at_is_told_of(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = started(tmp_path, metricsAddress=f"127.0.0.1:{taken.getsockname()[1]}")
    assert "metricsAddress" in line
    assert "another process does" in line
    assert "metricsAddress" in started(tmp_path, metricsAddress="192.0.2.1:9810")
