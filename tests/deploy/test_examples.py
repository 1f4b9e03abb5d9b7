"""The examples: Kubernetes takes them, the driver takes what they say, and they fit together."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from csi.attributes import VolumeAttributes, read_attributes
from csi.config import CsiConfig, MountMode
from csi.mountable import check_image
from csi.policy import check_allowed
from csi.proto import csi_pb2 as pb
from csi.requests import create_request, publish_request, read_credentials
from csi.stores import Stores
from imgfmt.reference import parse_reference
from snapcask.commands import verbs
from tests.deploy.chart import EXAMPLES, ROOT, Object, Rendered, complaints
from tests.transfer.fixture_store import run
from transfer.catalog import open_catalog
from transfer.store.posix import PosixStore

_DRIVER = "csi.snapcask.dev"
_TOLD = "csi.storage.k8s.io/"
_MODES = pb.VolumeCapability.AccessMode
_AS_KUBELET_SAYS = {"ReadOnlyMany": _MODES.MULTI_NODE_READER_ONLY}
FILES = sorted(path.name for path in EXAMPLES.glob("*.yaml") if "values" not in path.name)


def _documents(name: str) -> list[Object]:
    return [d for d in yaml.safe_load_all((EXAMPLES / name).read_text()) if d]


ALL = [found for name in FILES for found in _documents(name)]


@pytest.fixture
def config(charts: Mapping[str, Rendered]) -> CsiConfig:
    """The driver's configuration with the values that lie beside the examples."""
    return charts["the example"].config()


def _kind(kind: str) -> list[Object]:
    return [found for found in ALL if found["kind"] == kind]


def _named(kind: str, name: str, namespace: str | None = None) -> Object:
    (found,) = [
        item
        for item in _kind(kind)
        if item["metadata"]["name"] == name
        and namespace in (None, item["metadata"].get("namespace"))
    ]
    return found


def _pods() -> Iterator[tuple[str, Object]]:
    """Namespaces and Pod specs, those in templates too."""
    for found in ALL:
        if found["kind"] in ("Pod", "Deployment", "DaemonSet"):
            spec = found["spec"] if found["kind"] == "Pod" else found["spec"]["template"]["spec"]
            yield found["metadata"]["namespace"], spec


def _volumes(key: str) -> Iterator[tuple[str, Object, Object]]:
    """Namespace, Pod spec and source of volumes of one kind."""
    for namespace, spec in _pods():
        for volume in spec["volumes"]:
            if key in volume:
                yield namespace, spec, volume[key]


def _publish(given: Mapping[str, str], mode: int, *, inline: bool) -> VolumeAttributes:
    """What the driver reads when kubelet mounts it."""
    told = {f"{_TOLD}ephemeral": str(inline).lower(), f"{_TOLD}pod.namespace": "a"}
    capability = pb.VolumeCapability(
        mount=pb.VolumeCapability.MountVolume(),
        access_mode=_MODES(mode=mode),  # type: ignore[arg-type]
    )
    message = pb.NodePublishVolumeRequest(
        volume_id="a", target_path="/p/mount", volume_capability=capability, readonly=True,
        volume_context={**given, **told},
    )  # fmt: skip
    return publish_request(message).attributes


def test_there_is_an_example_for_each_way_and_the_readme_lists_them() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.yaml"):
        assert f"`{path.name}`" in listed
    assert len(list(_volumes("csi"))) >= 4
    assert _kind("PersistentVolume")
    assert _kind("StorageClass")
    assert [
        s for s in _kind("VolumeSnapshot") if "volumeSnapshotContentName" in s["spec"]["source"]
    ]
    assert [
        s for s in _kind("VolumeSnapshot") if "persistentVolumeClaimName" in s["spec"]["source"]
    ]
    assert [spec for _, spec in _pods() if spec.get("hostUsers") is False]


@pytest.mark.parametrize("name", FILES)
def test_kubernetes_takes_them_strictly_in_every_version(name: str) -> None:
    documents = _documents(name)
    assert documents
    assert [line for found in documents for line in complaints(found)] == []


def test_the_driver_takes_inline_volumes_and_the_policy_allows_them(config: CsiConfig) -> None:
    stores = Stores(config)
    for namespace, _, source in _volumes("csi"):
        assert source["driver"] == _DRIVER
        assert source["readOnly"] is True
        found = _publish(source["volumeAttributes"], _MODES.SINGLE_NODE_WRITER, inline=True)
        check_allowed(config.policy, namespace, found.image)
        stores.address(found.store, None)
        mode = config.mount.mode_of(namespace)
        assert not (found.changes_owner and mode is MountMode.BIND)
        if "nodePublishSecretRef" in source:
            secret = _named("Secret", source["nodePublishSecretRef"]["name"], namespace)
            credentials = read_credentials(secret["stringData"])
            assert credentials is not None
            assert stores.address(found.store, credentials).url.startswith("s3://")


def test_what_the_runbook_pushes_is_what_the_examples_can_mount(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "file").write_bytes(b"x")
    runbook = (ROOT / "docs" / "kubernetes.md").read_text().partition("\n## Create\n")[2]
    commands = re.findall(r"^snapcask ([^#\n]+)", runbook.partition("\n## ")[0], re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["init", "push"]
    for command in commands:
        told = command.replace("DIR", str(tmp_path / "dir"))
        told = told.replace("s3://snapshots/prod", str(tmp_path / "store"))
        words = [sys.executable, "-m", "snapcask", *told.split()]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    mounted = [found["volumeAttributes"] for _, _, found in _volumes("csi")]
    mounted += [v["spec"]["csi"]["volumeAttributes"] for v in _kind("PersistentVolume")]
    mounted += [of["parameters"] for of in _kind("StorageClass") if of.get("parameters")]
    pushed = [a for a in mounted if a["image"] == commands[1].split()[2]]
    assert len(pushed) >= 5
    store = PosixStore(str(tmp_path / "store"))
    catalog = run(open_catalog(store))
    digest = run(catalog.resolve(parse_reference(pushed[0]["image"])))
    for attributes in pushed:
        run(check_image(catalog, digest, read_attributes(attributes, inline=False)))
    store.close()


def test_the_values_beside_the_examples_say_how_the_runbook_installs() -> None:
    said = (EXAMPLES / "values-policy.yaml").read_text()
    commands = [line[2:] for line in said.splitlines() if re.match("# (helm|kubectl) ", line)]
    runbook = (ROOT / "docs" / "kubernetes.md").read_text()
    assert len(commands) == 3
    for command in commands:
        assert (
            f"   {command.replace('deploy/examples/values-policy.yaml', 'my-values.yaml')}\n"
            in (runbook)
        )


def test_pods_in_user_namespaces_get_bind_mounts(config: CsiConfig) -> None:
    found = [
        (namespace, spec)
        for namespace, spec, _ in _volumes("csi")
        if spec.get("hostUsers") is False
    ]
    assert found
    for namespace, _ in found:
        assert config.mount.mode_of(namespace) is MountMode.BIND


def test_the_driver_takes_persistent_volumes_and_claims_bind_them(config: CsiConfig) -> None:
    handles = [found["spec"]["csi"]["volumeHandle"] for found in _kind("PersistentVolume")]
    assert len(handles) == len(set(handles)) > 0
    for found in _kind("PersistentVolume"):
        spec = found["spec"]
        (mode,) = spec["accessModes"]
        attributes = _publish(spec["csi"]["volumeAttributes"], _AS_KUBELET_SAYS[mode], inline=False)
        namespace = spec["claimRef"]["namespace"]
        check_allowed(config.policy, namespace, attributes.image)
        claim = _named("PersistentVolumeClaim", spec["claimRef"]["name"], namespace)["spec"]
        assert spec["csi"]["driver"] == _DRIVER
        assert spec["persistentVolumeReclaimPolicy"] == "Retain"
        assert claim["volumeName"] == found["metadata"]["name"]
        assert claim["storageClassName"] == spec["storageClassName"] == ""
        assert claim["accessModes"] == spec["accessModes"]
        assert claim["resources"]["requests"]["storage"] == spec["capacity"]["storage"]


def _handle(claim: Object) -> str | None:
    """The snapshot that the provisioner names for a claim."""
    source = claim["spec"].get("dataSource")
    if source is None:
        return None
    assert (source["apiGroup"], source["kind"]) == ("snapshot.storage.k8s.io", "VolumeSnapshot")
    snapshot = _named("VolumeSnapshot", source["name"], claim["metadata"]["namespace"])
    content = snapshot["spec"]["source"].get("volumeSnapshotContentName")
    if content is None:
        return "main/_volumes/snap-" + "0" * 32  # as CreateSnapshot names it
    handle: str = _named("VolumeSnapshotContent", content)["spec"]["source"]["snapshotHandle"]
    return handle


def test_the_driver_provisions_the_claims(config: CsiConfig) -> None:
    claims = [c for c in _kind("PersistentVolumeClaim") if c["spec"]["storageClassName"]]
    assert len(claims) >= 3
    for claim in claims:
        of = _named("StorageClass", claim["spec"]["storageClassName"])
        assert of["provisioner"] == _DRIVER
        (mode,) = claim["spec"]["accessModes"]
        parameters: dict[str, Any] = of.get("parameters", {})
        message = pb.CreateVolumeRequest(name="pvc-a", parameters=parameters)
        capability = message.volume_capabilities.add()
        capability.mount.SetInParent()
        capability.access_mode.mode = _AS_KUBELET_SAYS[mode]
        handle = _handle(claim)
        if handle is not None:
            message.volume_content_source.snapshot.snapshot_id = handle
        assert create_request(message).snapshot_id == handle
        namespace = claim["metadata"]["namespace"]
        if handle is None:
            image = read_attributes(parameters, inline=False).image
        else:
            store, _, reference = handle.partition("/")
            assert store in config.stores
            image = parse_reference(reference)
        if not str(image).startswith("_volumes/"):
            check_allowed(config.policy, namespace, image)


def test_pods_use_claims_that_are_there_read_only() -> None:
    found = list(_volumes("persistentVolumeClaim"))
    assert len(found) >= 3
    for namespace, _, source in found:
        _named("PersistentVolumeClaim", source["claimName"], namespace)
        assert source["readOnly"] is True


def test_snapshots_name_contents_claims_and_classes_that_are_there() -> None:
    for found in _kind("VolumeSnapshot"):
        source, namespace = found["spec"]["source"], found["metadata"]["namespace"]
        if "volumeSnapshotContentName" in source:
            content = _named("VolumeSnapshotContent", source["volumeSnapshotContentName"])
            assert content["spec"]["volumeSnapshotRef"] == {
                "name": found["metadata"]["name"],
                "namespace": namespace,
            }
            assert content["spec"]["driver"] == _DRIVER
            # DeleteSnapshot refuses names that CreateSnapshot did not make.
            assert content["spec"]["deletionPolicy"] == "Retain"
        else:
            of = _named("VolumeSnapshotClass", found["spec"]["volumeSnapshotClassName"])
            assert of["driver"] == _DRIVER
            claim = _named("PersistentVolumeClaim", source["persistentVolumeClaimName"], namespace)
            assert claim["spec"]["storageClassName"]  # only what was provisioned can be named


def test_containers_see_the_volume_read_only_and_images_are_pinned() -> None:
    for _, spec in _pods():
        names = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert ":" in container["image"].rpartition("/")[2]
            assert not container["image"].endswith(":latest")
            for mount in container["volumeMounts"]:
                assert mount["name"] in names
                assert mount["readOnly"] is True


def test_no_example_holds_a_real_key() -> None:
    for found in _kind("Secret"):
        assert set(found["stringData"].values()) == {"replace-me"}


def test_the_values_that_the_readme_asks_for_are_set(charts: Mapping[str, Rendered]) -> None:
    made = charts["the example"]
    assert made.all("Deployment")
    names = [c["name"] for c in made.one("Deployment")["spec"]["template"]["spec"]["containers"]]
    assert {"provisioner", "snapshotter"} <= set(names)
    assert made.config().kubernetes.remove_taint
    assert Path(made.config().cache.path) != Path("/var/lib/snapcask")


def test_the_job_that_collects_garbage_is_a_command_that_there_is() -> None:
    """Its arguments are parsed as the command does, and its keys and store are the example's."""
    spec = _named("CronJob", "collect-garbage")["spec"]
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    group, *arguments = container["args"]
    command = verbs.get_command(click.Context(verbs), group)
    assert command is not None
    parsed = command.make_context(group, list(arguments)).params
    values = yaml.safe_load((EXAMPLES / "values-policy.yaml").read_text())
    assert parsed["store"] == values["stores"]["main"]["url"]
    (source,) = container["envFrom"]
    secret = _named("Secret", source["secretRef"]["name"], "snapcask")
    assert set(secret["stringData"]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert spec["concurrencyPolicy"] == "Forbid"
