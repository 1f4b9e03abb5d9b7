"""Values that the chart has to refuse, and what it then says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLASS = {"name": "a", "parameters": {"image": "m:v1"}}

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    # By values.schema.json.
    "an unknown key": ({"colour": "blue"}, "colour"),
    "an unknown key below": ({"cache": {"maxSize": "1Gi"}}, "maxSize"),
    "a relative kubelet folder": ({"kubeletDir": "var/lib/kubelet"}, "/kubeletDir"),
    "a kubelet folder with a slash at its end": ({"kubeletDir": "/var/lib/"}, "/kubeletDir"),
    "a relative cache": ({"cache": {"path": "cache"}}, "/cache/path"),
    "a cache with ..": ({"cache": {"path": "/var/../etc"}}, "/cache/path"),
    "a cache with .": ({"cache": {"path": "/var/./cache"}}, "/cache/path"),
    "a cache at the root": ({"cache": {"path": "/"}}, "/cache/path"),
    "a cache in a file": ({"cache": {"hostPathType": "File"}}, "/cache/hostPathType"),
    "a size with a blank": ({"cache": {"maxBytes": "10 GB"}}, "/cache/maxBytes"),
    "a share above one": ({"cache": {"beginFree": 20}}, "/cache/beginFree"),
    "the tag latest": ({"image": {"tag": "latest"}}, "/image/tag"),
    "a sidecar's tag latest": (
        {"sidecars": {"registrar": {"image": {"tag": "latest"}}}},
        "/sidecars/registrar/image/tag",
    ),
    "an image that is no digest": ({"image": {"digest": "abc"}}, "/image/digest"),
    "an unknown mount mode": ({"mount": {"mode": "fuse"}}, "/mount/mode"),
    "a wait that kubelet would end": ({"fetch": {"waitLimitSeconds": 115}}, "/fetch/wait"),
    "a store without a url": ({"stores": {"main": {"uri": "s3://b"}}}, "/stores/main"),
    "a store with an odd name": (
        {"stores": {"Main/1": {"url": "s3://b"}}},
        "'Main/1' does not match",
    ),
    "a namespace with an odd name": ({"policy": {"namespaces": {"A": []}}}, "'A' does not match"),
    "a prefix that is no list": ({"policy": {"namespaces": {"a": "m"}}}, "/policy/namespaces/a"),
    "single tenant and namespaces": (
        {"policy": {"singleTenant": True, "namespaces": {"a": ["m"]}}},
        "/policy",
    ),
    "a second driver beside the first": (
        {"node": {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}},
        "maxSurge",
    ),
    "a variable that is the driver's own": (
        {"env": [{"name": "CSI_ENDPOINT", "value": "unix:///x.sock"}]},
        "/env/0/name",
    ),
    "a port that is none": ({"metrics": {"port": 70000}}, "/metrics/port"),
    "an unknown lifecycle mode": (
        {"csiDriver": {"volumeLifecycleModes": ["Shared"]}},
        "/csiDriver",
    ),
    "no lifecycle mode": ({"csiDriver": {"volumeLifecycleModes": []}}, "/csiDriver"),
    "a controller as root": ({"controller": {"runAsUser": 0}}, "/controller/runAsUser"),
    "an attribute that is not known": (
        {"storageClasses": [{"name": "a", "parameters": {"image": "m", "colour": "blue"}}]},
        "colour",
    ),
    "an attribute that is a number": (
        {"storageClasses": [{"name": "a", "parameters": {"image": "m", "uid": 1000}}]},
        "/storageClasses/0/parameters/uid",
    ),
    # By the templates.
    "no store": ({"stores": {"main": None}}, "stores: name at least one"),
    "no image": ({"image": {"repository": ""}}, "image.repository: name where"),
    "a default store that is none": ({"defaultStore": "other"}, "defaultStore: other is not"),
    "an end before the begin": (
        {"cache": {"beginFree": 0.3, "endFree": 0.2}},
        "cache.endFree is less than cache.beginFree",
    ),
    "a monitor of nothing": (
        {"metrics": {"enabled": False, "podMonitor": {"enabled": True}}},
        "metrics.podMonitor needs metrics.enabled",
    ),
    "classes without a controller": (
        {"storageClasses": [_CLASS]},
        "storageClasses need the controller",
    ),
    "a snapshot class without a snapshotter": (
        {"controller": {"enabled": True}, "volumeSnapshotClass": {"create": True}},
        "volumeSnapshotClass needs the snapshotter",
    ),
    "an account that is not named": (
        {"node": {"serviceAccount": {"create": False}}},
        "node.serviceAccount.name",
    ),
}
