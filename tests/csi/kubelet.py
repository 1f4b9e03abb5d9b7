"""A fake kubelet that keeps to the rules that were measured of the real one.

Order: folder and `vol_data.json`, NodeGetCapabilities twice, NodePublishVolume with 120 s; after a
failure again after 0.5, 1, 2, 4 ... s. A code that is not final leaves the volume uncertain: when
the Pod goes, NodeUnpublishVolume comes, but not before the call under way has ended. After a final
code it never does. The folder goes when nothing is mounted in it. A restart reads `vol_data.json`
and publishes everything once more. Times are divided by `haste`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import grpc

from csi.errors import NOT_FINAL
from csi.proto import csi_pb2 as pb
from tests.csi.driver import Caller
from tests.csi.pods import PodVolume
from transfer.mounts import mount_table

PUBLISH_S = 120.0
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 122.0


class Seen(Enum):
    """What kubelet takes to be so."""

    NOT_MOUNTED = "not mounted"
    UNCERTAIN = "uncertain"
    MOUNTED = "mounted"


@dataclass
class KubeletPod:
    """A Pod and its one volume. `wanted` turns False when the Pod is deleted."""

    volume: PodVolume
    wanted: bool = True
    seen: Seen = Seen.NOT_MOUNTED
    call: Any = None
    method: str = ""
    pause_s: float = FIRST_PAUSE_S
    due_s: float = 0.0
    republish: bool = False
    errors: list[tuple[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)


class FakeKubelet:
    """Brings Pods and their volumes together through one driver's socket."""

    def __init__(self, socket: Path, *, haste: float = 1.0, publish_s: float = PUBLISH_S) -> None:
        self._socket = socket
        self._haste = haste
        self._publish_s = publish_s
        self._caller = Caller(socket)
        self.pods: dict[str, KubeletPod] = {}

    def add(self, volume: PodVolume) -> KubeletPod:
        """A Pod is scheduled here."""
        self.pods[volume.uid] = pod = KubeletPod(volume)
        return pod

    def delete(self, uid: str) -> None:
        """A Pod is deleted."""
        self.pods[uid].wanted = False
        self.pods[uid].due_s = 0.0

    def reconnect(self) -> None:
        """Talk to a driver that was started anew; what is under way fails as it may."""
        self._caller.close()
        self._caller = Caller(self._socket)

    def restart(self) -> None:
        """Forget everything but what is on the disk."""
        for pod in self.pods.values():
            if pod.call is not None:
                pod.call.cancel()
        self.reconnect()
        before, self.pods = self.pods, {}
        for uid, pod in before.items():
            found = pod.volume.folder / "vol_data.json"
            again = self.add(pod.volume)
            again.wanted = pod.wanted
            if found.exists():
                told = json.loads(found.read_text())
                assert told["volumeHandle"] == pod.volume.volume_id
                again.seen = Seen.UNCERTAIN
                again.republish = True
            elif not pod.wanted:
                del self.pods[uid]

    def close(self) -> None:
        """End the connection."""
        self._caller.close()

    def sync(self) -> None:
        """One round: what has ended is noted, what is due is begun."""
        now_s = time.monotonic()
        for uid, pod in list(self.pods.items()):
            if pod.call is not None:
                if pod.call.done():
                    self._ended(pod)
                else:
                    continue  # deletion waits for it too
            if pod.due_s > now_s:
                continue
            if pod.wanted and (pod.seen is not Seen.MOUNTED or pod.republish):
                self._publish(pod)
            elif not pod.wanted and pod.seen is Seen.NOT_MOUNTED:
                self._clean(pod)
                del self.pods[uid]
            elif not pod.wanted:
                self._begin(pod, "NodeUnpublishVolume", pod.volume.unpublish())

    def settled(self) -> bool:
        """Whether every Pod that is wanted runs, and no other is left."""
        return all(
            pod.wanted and pod.seen is Seen.MOUNTED and not pod.republish and pod.call is None
            for pod in self.pods.values()
        )

    def run(self, until: Callable[[], bool], timeout_s: float) -> None:
        """Go on until something holds. Raises AssertionError naming the Pods that are stuck."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.sync()
            if until():
                return
            if time.monotonic() > end_s:
                stuck = {uid: (p.seen, p.method, p.errors[-3:]) for uid, p in self.pods.items()}
                raise AssertionError(f"stuck: {stuck}")
            time.sleep(0.001)

    def _publish(self, pod: KubeletPod) -> None:
        volume = pod.volume
        volume.folder.mkdir(parents=True, exist_ok=True)
        (volume.folder / "vol_data.json").write_text(
            json.dumps({"driverName": "csi.snapcask.dev", "volumeHandle": volume.volume_id})
        )
        try:
            for _ in range(2):
                self._caller.call("NodeGetCapabilities", pb.NodeGetCapabilitiesRequest(), 5.0)
        except grpc.RpcError as error:
            self._failed(pod, error)
            return
        self._begin(pod, "NodePublishVolume", volume.publish())

    def _begin(self, pod: KubeletPod, method: str, message: Any) -> None:
        pod.method = method
        pod.calls.append(method)
        pod.call = self._caller.begin(method, message, self._publish_s)

    def _ended(self, pod: KubeletPod) -> None:
        call, pod.call = pod.call, None
        try:
            call.result()
        except grpc.RpcError as error:
            self._failed(pod, error)
            return
        except grpc.FutureCancelledError:
            pod.seen = Seen.UNCERTAIN
            return
        pod.pause_s, pod.due_s = FIRST_PAUSE_S, 0.0
        if pod.method == "NodePublishVolume":
            pod.seen, pod.republish = Seen.MOUNTED, False
        else:
            pod.seen = Seen.NOT_MOUNTED

    def _failed(self, pod: KubeletPod, error: Any) -> None:
        code = error.code()
        pod.errors.append((code.name, error.details()))
        pod.due_s = time.monotonic() + pod.pause_s / self._haste
        pod.pause_s = min(2 * pod.pause_s, MAX_PAUSE_S)
        if pod.method != "NodePublishVolume" or not pod.calls:
            return
        if pod.seen is not Seen.MOUNTED:
            pod.seen = Seen.UNCERTAIN if code in NOT_FINAL else Seen.NOT_MOUNTED

    def _clean(self, pod: KubeletPod) -> None:
        """Remove what is kubelet's own; only where nothing is mounted."""
        folder = pod.volume.folder
        here = [e.directory for e in mount_table() if e.directory.startswith(f"{folder}/")]
        assert here == [], f"nobody will unmount {here}"
        if folder.exists():
            if pod.volume.target.exists():
                os.rmdir(pod.volume.target)
            (folder / "vol_data.json").unlink(missing_ok=True)
            for above in (folder, *folder.parents):
                if above == pod.volume.kubelet:
                    break
                try:
                    os.rmdir(above)
                except OSError:
                    break
