"""Pods as kubelet tells of them, images for them, and what is mounted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from csi.proto import csi_pb2 as pb
from imgfmt.digest import Digest
from imgfmt.reference import TargetKind
from tests.transfer.fixture_store import FixtureStore, run
from transfer.mounts import MountEntry, mount_table
from transfer.references import next_record
from transfer.store.base import Store

MODES = pb.VolumeCapability.AccessMode
_POD = "csi.storage.k8s.io/"


def point(store: Store, name: str, tag: str, image: Digest) -> None:
    """Point a reference at an image."""

    async def change() -> None:
        seen = await store.read_reference(name, tag)
        await store.change_reference(next_record(name, tag, seen, TargetKind.IMAGE, image), seen)

    run(change())


@dataclass(frozen=True)
class PodVolume:
    """One inline volume of one Pod, unless it is `persistent`; then `volume_id` is the PV's."""

    kubelet: Path
    uid: str
    attributes: Mapping[str, str]
    namespace: str = "team-a"
    secrets: Mapping[str, str] = field(default_factory=dict)
    persistent: str = ""

    @property
    def volume_id(self) -> str:
        """As kubelet makes it."""
        if self.persistent:
            return self.persistent
        return f"csi-{hashlib.sha256(f'{self.uid}/snap'.encode()).hexdigest()}"

    @property
    def folder(self) -> Path:
        """What kubelet makes for the volume."""
        return self.kubelet / "pods" / self.uid / "volumes" / "kubernetes.io~csi" / "snap"

    @property
    def target(self) -> Path:
        """Where it is mounted."""
        return self.folder / "mount"

    def publish(
        self,
        *,
        mode: Any = MODES.SINGLE_NODE_WRITER,
        readonly: bool = True,
        flags: Sequence[str] = (),
        make_folder: bool = True,
    ) -> pb.NodePublishVolumeRequest:
        """NodePublishVolume of it."""
        if make_folder:
            self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            f"{_POD}pod.name": f"pod-{self.uid}",
            f"{_POD}pod.namespace": self.namespace,
            f"{_POD}pod.uid": self.uid,
            f"{_POD}serviceAccount.name": "default",
            f"{_POD}ephemeral": "false" if self.persistent else "true",
        }
        return pb.NodePublishVolumeRequest(
            volume_id=self.volume_id,
            target_path=str(self.target),
            volume_capability=pb.VolumeCapability(
                mount=pb.VolumeCapability.MountVolume(mount_flags=flags),
                access_mode=MODES(mode=mode),
            ),
            readonly=readonly,
            secrets=self.secrets,
            volume_context={**self.attributes, **told},
        )

    def unpublish(self) -> pb.NodeUnpublishVolumeRequest:
        """NodeUnpublishVolume of it."""
        return pb.NodeUnpublishVolumeRequest(volume_id=self.volume_id, target_path=str(self.target))

    def stats(self) -> pb.NodeGetVolumeStatsRequest:
        """NodeGetVolumeStats of it."""
        return pb.NodeGetVolumeStatsRequest(volume_id=self.volume_id, volume_path=str(self.target))


def ours(below: Path) -> list[MountEntry]:
    """Mounts at or below a folder, but for the folder itself."""
    return [e for e in mount_table() if e.directory.startswith(f"{below}/")]


def code_of(error: grpc.RpcError) -> str:
    """The name of the code that a call failed with."""
    return str(error.code().name)


def leftovers(cache: Path) -> list[str]:
    """Records, folders and pins of the driver in a cache: none when nothing is published."""
    found = []
    for name in ("volumes", "parts"):
        found += [f"{name}/{item}" for item in os.listdir(cache / "csi" / name)]
    for pins in cache.glob("domains/*/pins/*"):
        found += [f"{pins}/{item}" for item in os.listdir(pins)]
    return found


def tagged(store: FixtureStore, name: str, image: Digest, tag: str = "v1") -> str:
    """Give an image of a store a name; returns the reference."""
    point(store.store, name, tag, image)
    return f"{name}:{tag}"
