"""The chart as Helm renders it, for a matrix of values; and what is wrong with an object."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import yaml

from csi.config import CsiConfig
from csi.config_file import parse_config

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "snapcask"
EXAMPLES = ROOT / "deploy" / "examples"
VERSIONS = tuple(f"1.{minor}" for minor in range(29, 37))

Object = dict[str, Any]
Values = dict[str, Any]

BASE: Values = {
    "image": {"repository": "registry.example.com/snapcask"},
    "stores": {"main": {"url": "s3://snapshots/prod"}},
}
"""The least that has to be said."""

WITH_CONTROLLER: Values = {"controller": {"enabled": True}}
WITH_SNAPSHOTS: Values = {**WITH_CONTROLLER, "sidecars": {"snapshotter": {"enabled": True}}}
_DIGEST = f"sha256:{'0' * 64}"

MATRIX: Mapping[str, Values] = {
    "least": {},
    "controller": WITH_CONTROLLER,
    "snapshots": {
        **WITH_SNAPSHOTS,
        "volumeSnapshotClass": {"create": True, "annotations": {"example.com/a": "b"}},
    },
    "policy": {
        "policy": {"namespaces": {"team-a": ["models/llama-*", "m:v3"], "*": ["shared"]}},
        "stores": {
            "main": {"url": 's3://bbb/p?endpoint=https://x:9000&region="<eu>"'},
            "nfs-2": {"url": "/mnt/store"},
        },
        "defaultStore": "nfs-2",
        "allowPodStores": True,
    },
    "stores without a default": {"stores": {"main": {"url": "s3://bbb"}, "nfs": {"url": "/x"}}},
    "single tenant": {"policy": {"singleTenant": True}},
    "bind": {"mount": {"mode": "bind", "namespaces": {"team-b": "overlay"}}},
    "bind for a namespace": {"mount": {"namespaces": {"team-b": "bind"}}},
    "another kubelet folder": {"kubeletDir": "/var/snap/microk8s/common/var/lib/kubelet"},
    "paths with blanks": {"kubeletDir": "/var lib/kubelet", "cache": {"path": "/mnt/a disk/..c"}},
    "sizes as text": {
        "cache": {
            "maxBytes": "2Ti",
            "beginFree": 0,
            "endFree": 0,
            "hostPathType": "Directory",
            "scrubIntervalHours": 0,
            "scrubBytesPerSecond": "8Mi",
        },
        "fetch": {"maxMemoryBytes": "64Mi", "maxParallel": 1, "waitLimitSeconds": 0.5},
    },
    "sizes as numbers": {
        "cache": {"maxBytes": 3_000_000_000_000, "allowRootFilesystem": True},
        "fetch": {"maxMemoryBytes": 6 << 20, "idleCancelSeconds": 0, "buffered": True},
    },
    "further disks": {
        **WITH_CONTROLLER,
        "cache": {
            "path": "/mnt/nvme0/snapcask",
            "disks": ["/mnt/nvme1/snapcask", "/mnt/nvme0/snapcask-2", "/mnt/a disk"],
            "disksHostPathType": "DirectoryOrCreate",
        },
    },
    "no kubernetes api": {"kubernetes": {"events": False}},
    "taint": {"kubernetes": {"events": False, "removeTaint": "csi.snapcask.dev/agent-not-ready"}},
    "events and taint": {"kubernetes": {"removeTaint": "csi.snapcask.dev/agent-not-ready"}},
    "keys": {
        **WITH_CONTROLLER,
        "credentials": {"existingSecret": "reader"},
        "controller": {"enabled": True, "credentials": {"existingSecret": "writer"}},
    },
    "credentials file": {
        **WITH_CONTROLLER,
        "credentials": {"file": {"existingSecret": "files", "key": "aws"}},
        "caBundle": {"existingConfigMap": "trust", "key": "own.crt"},
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    },
    "without metrics": {**WITH_CONTROLLER, "metrics": {"enabled": False}},
    "monitored": {
        **WITH_CONTROLLER,
        "metrics": {"port": 19810, "podMonitor": {"enabled": True, "labels": {"release": "p"}}},
        "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
        "ports": {"liveness": 19808, "registrar": 19809},
    },
    "closed": {"networkPolicy": {"enabled": True}},
    "csidriver": {
        "csiDriver": {
            "keep": True,
            "volumeLifecycleModes": ["Persistent"],
            "seLinuxMount": False,
            "labels": {"security.openshift.io/csi-ephemeral-volume-profile": "restricted"},
            "annotations": {"example.com/a": "b"},
        }
    },
    "no csidriver": {"csiDriver": {"create": False}},
    "another name": {
        "driverName": "snapshots.example.com",
        "nameOverride": "snaps",
        "commonLabels": {"example.com/team": "platform"},
    },
    "labels over labels": {
        "commonLabels": {"example.com/team": "platform", "a": "b"},
        **WITH_CONTROLLER,
        "node": {"podLabels": {"example.com/team": "nodes"}},
        "csiDriver": {"labels": {"a": ""}},
        "metrics": {"podMonitor": {"enabled": True, "labels": {"a": "c"}}},
    },
    "a long name": {**WITH_CONTROLLER, "fullnameOverride": "a-name-that-is-too-long-" * 3},
    "images by digest": {
        **WITH_CONTROLLER,
        "image": {**BASE["image"], "digest": _DIGEST, "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "sidecars": {
            name: {"image": {"digest": _DIGEST}}
            for name in ("registrar", "livenessProbe", "provisioner", "snapshotter")
        },
    },
    "host network": {
        "node": {
            "hostNetwork": True,
            "seLinuxOptions": {"type": "spc_t"},
            "tolerations": [],
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "nodeSelector": {"example.com/gpu": "true"},
            "affinity": {"nodeAffinity": {}},
            "podLabels": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "resources": {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        }
    },
    "accounts of others": {
        "node": {"serviceAccount": {"create": False, "name": "node-account"}},
        "controller": {
            "enabled": True,
            "replicas": 2,
            "serviceAccount": {"create": False, "name": "controller-account"},
        },
    },
    "workload identity": {
        "node": {"serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:r"}}},
        "controller": {
            "enabled": True,
            "runAsUser": 1234,
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"a": "b"},
            "affinity": {"podAntiAffinity": {}},
            "podLabels": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:w"}},
        },
    },
    "store in a directory": {
        "stores": {"main": {"url": "/mnt/store"}},
        **{
            component: {
                "extraVolumes": [
                    {"name": "store", "nfs": {"server": "nfs.example.com", "path": "/store"}}
                ],
                "extraVolumeMounts": [{"name": "store", "mountPath": "/mnt/store"}],
                **({"enabled": True} if component == "controller" else {}),
            }
            for component in ("node", "controller")
        },
    },
    "classes": {
        **WITH_CONTROLLER,
        "storageClasses": [
            {"name": "llama", "parameters": {"image": "models/llama-70b:v3"}},
            {
                "name": "all",
                "parameters": {
                    "image": "m@blake3:" + "0" * 64,
                    "store": "main",
                    "member": "rank-0",
                    "subPath": "a/b",
                    "pullPolicy": "Always",
                    "onMismatch": "empty",
                    "uid": "1000",
                    "gid": "1000",
                    "mode": "0444",
                    "mountMode": "overlay",
                },
                "nodePublishSecret": {"name": "reader", "namespace": "${pvc.namespace}"},
                "reclaimPolicy": "Retain",
                "mountOptions": ['context="system_u:object_r:container_file_t:s0:c1,c2"'],
                "annotations": {"storageclass.kubernetes.io/is-default-class": "false"},
            },
            {"name": "of-snapshots", "nodePublishSecret": {"name": "a", "namespace": "b"}},
            {"name": "of-snapshots-too"},
        ],
    },
    "the example": yaml.safe_load((EXAMPLES / "values-policy.yaml").read_text()),
}
"""Values by name; each is laid over BASE."""


def merged(below: Values, above: Values) -> Values:
    """Values laid over others as Helm does: objects are merged, null removes, else replaced."""
    found = dict(below)
    for key, value in above.items():
        if value is None and key in found:
            del found[key]
            continue
        old = found.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        found[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Rendered:
    """One rendering: the objects, and the notes that Helm prints."""

    objects: Sequence[Object]
    notes: str

    def all(self, kind: str) -> list[Object]:
        """Objects of a kind."""
        return [found for found in self.objects if found["kind"] == kind]

    def one(self, kind: str) -> Object:
        """The only object of a kind."""
        (found,) = self.all(kind)
        return found

    def workloads(self) -> list[Object]:
        """What has Pods."""
        return self.all("DaemonSet") + self.all("Deployment")

    def config_text(self) -> str:
        """The driver's file."""
        return str(self.one("ConfigMap")["data"]["csi.json"])

    def config(self) -> CsiConfig:
        """The driver's file, as it reads it."""
        return parse_config(self.config_text())


class _Strict(yaml.SafeLoader):
    """Refuses a key that is there twice, of which others take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"twice among {keys}"
        return super().construct_mapping(node, deep)


def helm(jobs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What Helm makes of the jobs, by their names; see helm_worker.py."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("helm_worker.py"))],
        input=json.dumps({"chart": str(CHART), "jobs": list(jobs)}),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {found["name"]: found for found in json.loads(done.stdout)}


def rendered(found: Mapping[str, Any]) -> Rendered:
    """A rendering that has to have worked."""
    assert "error" not in found, found["error"]
    objects: list[Object] = []
    notes = ""
    for path, text in sorted(found["files"].items()):
        if path.endswith("NOTES.txt"):
            notes = text
        else:
            objects += [document for document in yaml.load_all(text, _Strict) if document]
    return Rendered(objects, notes)


def containers(workload: Object) -> Iterator[Object]:
    """The containers of what has Pods, those that run first too."""
    spec = workload["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def container(workload: Object, name: str) -> Object:
    """A container by its name."""
    (found,) = [item for item in containers(workload) if item["name"] == name]
    return found


def mount(of: Object, volume: str) -> Object:
    """Where a container has a volume."""
    (found,) = [item for item in of["volumeMounts"] if item["name"] == volume]
    return dict(found)


def volume(workload: Object, name: str) -> Object:
    """A volume of what has Pods."""
    volumes = workload["spec"]["template"]["spec"]["volumes"]
    (found,) = [item for item in volumes if item["name"] == name]
    return dict(found)


def complaints(found: Object) -> list[str]:
    """What Kubernetes 1.29 to 1.36, or the owner of its kind, would not take of an object."""
    named = f"{found['kind']} {found['metadata']['name']}"
    by_hand = _BY_HAND.get((found["apiVersion"], found["kind"]))
    if by_hand is not None:
        errors = jsonschema.Draft202012Validator(by_hand).iter_errors(found)
        return [f"{named}: {error.json_path}: {error.message}" for error in errors]
    told = []
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(found, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            told.append(f"{named}, Kubernetes {version}: {error.json_path}: {error.message}")
    return told


# It reads half a megabyte of schemas for each object otherwise.
kubernetes_validate.utils.schema_contents = functools.cache(
    kubernetes_validate.utils.schema_contents
)


def _closed(properties: Object, required: Sequence[str], **more: Any) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def _custom(spec: Object, **more: Object) -> Object:
    top = {"apiVersion": {}, "kind": {}, "metadata": {"required": ["name"]}, **more}
    return _closed({**top, **spec}, [*top, *spec])


_TEXT = {"type": "string", "minLength": 1}
_DELETION = {"enum": ["Delete", "Retain"]}
_SNAPSHOTS = "snapshot.storage.k8s.io/v1"
_BY_HAND: Mapping[tuple[str, str], Object] = {
    (_SNAPSHOTS, "VolumeSnapshotClass"): _custom({"driver": _TEXT, "deletionPolicy": _DELETION}),
    (_SNAPSHOTS, "VolumeSnapshot"): _custom(
        {
            "spec": _closed(
                {
                    "volumeSnapshotClassName": _TEXT,
                    "source": _closed(
                        {"volumeSnapshotContentName": _TEXT, "persistentVolumeClaimName": _TEXT},
                        [],
                        minProperties=1,
                        maxProperties=1,
                    ),
                },
                ["source"],
            )
        }
    ),
    (_SNAPSHOTS, "VolumeSnapshotContent"): _custom(
        {
            "spec": _closed(
                {
                    "driver": _TEXT,
                    "deletionPolicy": _DELETION,
                    "source": _closed({"snapshotHandle": _TEXT}, ["snapshotHandle"]),
                    "sourceVolumeMode": {"const": "Filesystem"},
                    "volumeSnapshotRef": _closed(
                        {"name": _TEXT, "namespace": _TEXT}, ["name", "namespace"]
                    ),
                },
                ["driver", "deletionPolicy", "source", "volumeSnapshotRef"],
            )
        }
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _custom(
        {
            "spec": _closed(
                {
                    "selector": _closed({"matchLabels": {"minProperties": 1}}, ["matchLabels"]),
                    "podMetricsEndpoints": {
                        "type": "array",
                        "minItems": 1,
                        "items": _closed(
                            {
                                "port": _TEXT,
                                "path": _TEXT,
                                "interval": {"pattern": "^[0-9]+(ms|s|m)$"},
                                "relabelings": {"type": "array"},
                            },
                            ["port"],
                        ),
                    },
                },
                ["selector", "podMetricsEndpoints"],
            )
        }
    ),
}
"""Kinds of others, as far as the chart and the examples use them."""
