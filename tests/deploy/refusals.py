"""Values that the chart has to refuse, and what it then says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CLASS = {"name": "a", "parameters": {"image": "m:v1"}}


def _with_class(parameters: dict[str, str], **values: Any) -> dict[str, Any]:
    """Values with one class of these parameters."""
    classes = [{"name": "a", "parameters": parameters}]
    return {"controller": {"enabled": True}, "storageClasses": classes, **values}


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
    "a disk that is no path": ({"cache": {"disks": ["nvme1"]}}, "/cache/disks/0"),
    "a disk twice": ({"cache": {"disks": ["/mnt/a", "/mnt/a"]}}, "/cache/disks"),
    "a disk in a file": ({"cache": {"disksHostPathType": "File"}}, "/cache/disksHostPathType"),
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
    "a label that is the chart's own": (
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        "propertyName 'app.kubernetes.io/name'",
    ),
    "a label of Pods that is the chart's own": (
        {"node": {"podLabels": {"app.kubernetes.io/component": "x"}}},
        "propertyName 'app.kubernetes.io/component'",
    ),
    "a label that is none": ({"commonLabels": {"a": "b c"}}, "/commonLabels/a"),
    "an annotation that is the chart's own": (
        {"controller": {"podAnnotations": {"checksum/config": "x"}}},
        "propertyName 'checksum/config'",
    ),
    "another system": (
        {"node": {"nodeSelector": {"kubernetes.io/os": "x"}}},
        "propertyName 'kubernetes.io/os'",
    ),
    "a keep by hand": (
        {"csiDriver": {"annotations": {"helm.sh/resource-policy": "keep"}}},
        "propertyName 'helm.sh/resource-policy'",
    ),
    "a name in capitals": ({"fullnameOverride": "UPPER"}, "/fullnameOverride"),
    "a name with a dash first": ({"nameOverride": "-a"}, "/nameOverride"),
    "a repository with a tag": ({"image": {"repository": "x/y:1"}}, "/image/repository"),
    "a sidecar's repository with a tag": (
        {"sidecars": {"registrar": {"image": {"repository": "x/y@sha256:1"}}}},
        "/sidecars/registrar/image/repository",
    ),
    "a variable that is a number": ({"env": [{"name": "A", "value": 5}]}, "/env/0/value"),
    "a store that is no store": ({"stores": {"main": {"url": "http://x"}}}, "/stores/main/url"),
    "a store in no place": ({"stores": {"main": {"url": "rel/dir"}}}, "/stores/main/url"),
    "a store with an unknown option": (
        {"stores": {"main": {"url": "s3://bucket?foo=1"}}},
        "/stores/main/url",
    ),
    "a store without a bucket": ({"stores": {"main": {"url": "s3:///x"}}}, "/stores/main/url"),
    "a prefix in capitals": (
        {"policy": {"namespaces": {"a": ["Models/X"]}}},
        "/policy/namespaces/a/0",
    ),
    "a prefix with a star within": (
        {"policy": {"namespaces": {"a": ["a*b"]}}},
        "/policy/namespaces/a/0",
    ),
    "a prefix of a digest": (
        {"policy": {"namespaces": {"a": ["blake3:" + "0" * 64]}}},
        "/policy/namespaces/a/0",
    ),
    "a prefix that ends with a dash": (
        {"policy": {"namespaces": {"a": ["models/llama-"]}}},
        "/policy/namespaces/a/0",
    ),
    "a mode for a namespace that is none": (
        {"mount": {"namespaces": {"*": "bind"}}},
        "'*' does not match",
    ),
    "a taint that is none": ({"kubernetes": {"removeTaint": "bad key!"}}, "/kubernetes/removeT"),
    "an image of a class that is none": (
        {"storageClasses": [{"name": "a", "parameters": {"image": "Models:v1"}}]},
        "/storageClasses/0/parameters/image",
    ),
    "a path of a class that leads elsewhere": (
        {"storageClasses": [{"name": "a", "parameters": {"image": "m", "subPath": "a/../b"}}]},
        "/storageClasses/0/parameters/subPath",
    ),
    # By the templates.
    "a taint with its effect": (
        {"kubernetes": {"removeTaint": "csi.snapcask.dev/agent-not-ready:NoSchedule"}},
        "kubernetes.removeTaint: give the key of the taint alone, csi.snapcask.dev/agent-not-ready"
        " without :NoSchedule",
    ),
    "a cache that overflows": (
        {"cache": {"maxBytes": "99999999Ti"}},
        "cache.maxBytes: 99999999Ti is too large",
    ),
    "a cache that overflows as a number": (
        {"cache": {"maxBytes": 10**19}},
        "cache.maxBytes: 10000000000000000000 is too large",
    ),
    "too little memory": (
        {"fetch": {"maxMemoryBytes": "1Mi"}},
        "fetch.maxMemoryBytes: 1Mi is less than 6Mi",
    ),
    "too slow a scrub": (
        {"cache": {"scrubBytesPerSecond": 1000}},
        "cache.scrubBytesPerSecond: 1000 is less than 1Mi",
    ),
    "metrics at the port of a sidecar": (
        {"metrics": {"port": 9808}},
        "ports.liveness and metrics.port are both 9808",
    ),
    "two sidecars at one port": (
        {"ports": {"registrar": 9808}},
        "ports.liveness and ports.registrar are both 9808",
    ),
    "two sidecars of the controller at one port": (
        {"controller": {"enabled": True}, "ports": {"provisioner": 9810}},
        "metrics.port and ports.provisioner are both 9810",
    ),
    **{
        f"a cache at {path}": (
            {"cache": {"path": path}},
            f"cache.path: {path} holds {held}, which the driver needs",
        )
        for path, held in (
            ("/usr", "/usr"),
            ("/etc", "/etc/snapcask"),
            ("/tmp", "/tmp"),
            ("/csi", "/csi"),
            ("/opt", "/opt/snapcask"),
            ("/var/lib/kubelet", "/var/lib/kubelet/pods"),
        )
    },
    "a cache among Pods": (
        {"cache": {"path": "/var/lib/kubelet/pods/x"}},
        "cache.path: /var/lib/kubelet/pods/x is within /var/lib/kubelet/pods",
    ),
    "a cache where the configuration is": (
        {"cache": {"path": "/etc/snapcask/config"}},
        "cache.path: /etc/snapcask/config is within /etc/snapcask",
    ),
    "a disk at the container's own": (
        {"cache": {"disks": ["/opt/snapcask"]}},
        "cache.disks: /opt/snapcask holds",
    ),
    "a snapshotter without a controller": (
        {"sidecars": {"snapshotter": {"enabled": True}}},
        "sidecars.snapshotter needs the controller",
    ),
    "a volume of one name": (
        {"node": {"extraVolumes": [{"name": "cache", "emptyDir": {}}]}},
        "a volume of the chart and node.extraVolumes[0].name are both cache",
    ),
    "a mount at one path": (
        {"controller": {"extraVolumeMounts": [{"name": "a", "mountPath": "/tmp"}]}},
        "controller.extraVolumeMounts[0].mountPath are both /tmp",
    ),
    "classes of one name": (
        {"controller": {"enabled": True}, "storageClasses": [_CLASS, _CLASS]},
        "storageClasses[0].name and storageClasses[1].name are both a",
    ),
    "a class of a store that is none": (
        _with_class({"image": "m", "store": "nosuch"}),
        "storageClasses[0].parameters.store: nosuch is not one of stores",
    ),
    "a class of no store": (
        _with_class({"image": "m"}, stores={"other": {"url": "/x"}}),
        "storageClasses[0].parameters.store: name one",
    ),
    "a class with an owner and bind": (
        _with_class({"image": "m", "mountMode": "bind", "uid": "3"}),
        "storageClasses[0].parameters: uid, gid and mode need the mount mode overlay",
    ),
    "a class with an owner where all is bind": (
        _with_class({"image": "m", "mode": "0444"}, mount={"mode": "bind"}),
        "storageClasses[0].parameters: uid, gid and mode need the mount mode overlay",
    ),
    "a class with a Secret for a directory": (
        {
            "controller": {"enabled": True},
            "stores": {"main": {"url": "/x"}},
            "storageClasses": [{**_CLASS, "nodePublishSecret": {"name": "a", "namespace": "b"}}],
        },
        "storageClasses[0].nodePublishSecret: store main takes no Secret",
    ),
    "classes where volumes may not be persistent": (
        {
            "controller": {"enabled": True},
            "storageClasses": [_CLASS],
            "csiDriver": {"volumeLifecycleModes": ["Ephemeral"]},
        },
        "storageClasses need Persistent",
    ),
    "no store": ({"stores": {"main": None}}, "stores: name at least one"),
    "no image": ({"image": {"repository": ""}}, "image.repository: name where"),
    "a default store that is none": ({"defaultStore": "other"}, "defaultStore: other is not"),
    "a disk within the cache": (
        {"cache": {"path": "/mnt/a", "disks": ["/mnt/ab", "/mnt/a/b"]}},
        "cache.disks: /mnt/a/b is within the cache itself",
    ),
    "a disk that is the cache": (
        {"cache": {"path": "/mnt/a", "disks": ["/mnt/a"]}},
        "cache.disks: /mnt/a is within the cache itself",
    ),
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
