"""Classes that the chart makes: the driver takes what they say."""

from __future__ import annotations

from collections.abc import Mapping

from csi.attributes import read_attributes
from csi.requests import mount_options
from tests.deploy.chart import Rendered

_OF_SIDECARS = "csi.storage.k8s.io/"


def test_the_driver_takes_the_parameters_of_storage_classes(
    charts: Mapping[str, Rendered],
) -> None:
    found = charts["classes"].all("StorageClass")
    assert len(found) == 4
    for item in found:
        told = item.get("parameters", {})
        given = {k: v for k, v in told.items() if not k.startswith(_OF_SIDECARS)}
        read_attributes({"image": "of:a-snapshot", **given}, inline=False)
        for option in item.get("mountOptions", []):
            assert list(mount_options([option]))
        assert item["provisioner"] == "csi.snapcask.dev"
        assert item["allowVolumeExpansion"] is False


def test_a_storage_class_says_which_secret_kubelet_hands_over(
    charts: Mapping[str, Rendered],
) -> None:
    parameters = charts["classes"].all("StorageClass")[1]["parameters"]
    told = {k: v for k, v in parameters.items() if k.startswith(_OF_SIDECARS)}
    assert told == {
        "csi.storage.k8s.io/node-publish-secret-name": "reader",
        "csi.storage.k8s.io/node-publish-secret-namespace": "${pvc.namespace}",
    }


def test_the_snapshot_class_is_of_the_driver(charts: Mapping[str, Rendered]) -> None:
    found = charts["snapshots"].one("VolumeSnapshotClass")
    assert (found["driver"], found["deletionPolicy"]) == ("csi.snapcask.dev", "Delete")
