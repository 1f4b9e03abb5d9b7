"""The controller's servicer: thin, as those of `csi.services`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.timestamp_pb2 import Timestamp

from csi.checks import MAX_ID_BYTES, MAX_NAME_BYTES, checked_text
from csi.errors import InProgress
from csi.names import SnapshotEntry, VolumeNames
from csi.proto import csi_pb2 as pb
from csi.requests import check_capabilities, create_request, read_credentials
from imgfmt.errors import InvalidInput

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    Context = ServicerContext[Any, Any]


class ControllerServicer:
    """Names for images."""

    def __init__(self, names: VolumeNames) -> None:
        self._names = names

    async def CreateVolume(
        self, message: pb.CreateVolumeRequest, context: Context
    ) -> pb.CreateVolumeResponse:
        """Pin an image."""
        created = await self._names.create_volume(create_request(message))
        volume = pb.Volume(
            capacity_bytes=created.size_bytes,
            volume_id=created.volume_id,
            volume_context=created.context,
        )
        if message.HasField("volume_content_source"):
            volume.content_source.CopyFrom(message.volume_content_source)
        return pb.CreateVolumeResponse(volume=volume)

    async def DeleteVolume(
        self, message: pb.DeleteVolumeRequest, context: Context
    ) -> pb.DeleteVolumeResponse:
        """Let it go."""
        volume_id = checked_text(message.volume_id, "volume_id", MAX_ID_BYTES)
        await self._names.delete_volume(volume_id, read_credentials(message.secrets))
        return pb.DeleteVolumeResponse()

    async def ValidateVolumeCapabilities(
        self, message: pb.ValidateVolumeCapabilitiesRequest, context: Context
    ) -> pb.ValidateVolumeCapabilitiesResponse:
        """Say whether a volume can be used so."""
        volume_id = checked_text(message.volume_id, "volume_id", MAX_ID_BYTES)
        if not message.volume_capabilities:
            raise InvalidInput("volume_capabilities are missing")
        await self._names.check_volume(volume_id, read_credentials(message.secrets))
        try:
            check_capabilities(message.volume_capabilities)
        except InvalidInput as error:
            return pb.ValidateVolumeCapabilitiesResponse(message=str(error))
        confirmed = pb.ValidateVolumeCapabilitiesResponse.Confirmed(
            volume_context=message.volume_context,
            volume_capabilities=message.volume_capabilities,
            parameters=message.parameters,
        )
        return pb.ValidateVolumeCapabilitiesResponse(confirmed=confirmed)

    async def ControllerGetCapabilities(
        self, message: pb.ControllerGetCapabilitiesRequest, context: Context
    ) -> pb.ControllerGetCapabilitiesResponse:
        """What is offered."""
        rpc = pb.ControllerServiceCapability.RPC
        offered = (rpc.CREATE_DELETE_VOLUME, rpc.CREATE_DELETE_SNAPSHOT, rpc.LIST_SNAPSHOTS)
        return pb.ControllerGetCapabilitiesResponse(
            capabilities=[pb.ControllerServiceCapability(rpc=rpc(type=kind)) for kind in offered]
        )

    async def CreateSnapshot(
        self, message: pb.CreateSnapshotRequest, context: Context
    ) -> pb.CreateSnapshotResponse:
        """Another name for a volume's image."""
        name = checked_text(message.name, "name", MAX_NAME_BYTES)
        volume_id = checked_text(message.source_volume_id, "source_volume_id", MAX_ID_BYTES)
        for key in message.parameters:
            if not key.startswith("csi.storage.k8s.io/"):
                raise InvalidInput(f"{key[:80]!r} is no parameter of snapshots; there are none")
        credentials = read_credentials(message.secrets)
        entry = await self._names.create_snapshot(name, volume_id, credentials)
        return pb.CreateSnapshotResponse(snapshot=_snapshot(entry))

    async def DeleteSnapshot(
        self, message: pb.DeleteSnapshotRequest, context: Context
    ) -> pb.DeleteSnapshotResponse:
        """Remove that name."""
        snapshot_id = checked_text(message.snapshot_id, "snapshot_id", 4 * MAX_ID_BYTES)
        await self._names.delete_snapshot(snapshot_id, read_credentials(message.secrets))
        return pb.DeleteSnapshotResponse()

    async def ListSnapshots(
        self, message: pb.ListSnapshotsRequest, context: Context
    ) -> pb.ListSnapshotsResponse:
        """One page of snapshots. A token is how many were listed before."""
        start = _start_of(message.starting_token)
        if message.max_entries < 0:
            raise InvalidInput("max_entries is negative")
        found = await self._names.list_snapshots(
            message.snapshot_id, message.source_volume_id, read_credentials(message.secrets)
        )
        end = start + message.max_entries if message.max_entries else len(found)
        return pb.ListSnapshotsResponse(
            entries=[
                pb.ListSnapshotsResponse.Entry(snapshot=_snapshot(entry))
                for entry in found[start:end]
            ],
            next_token=str(end) if end < len(found) else "",
        )


def _start_of(token: str) -> int:
    if not token:
        return 0
    if not token.isascii() or not token.isdigit() or len(token) > 9:
        raise InProgress(f"starting_token {token[:40]!r} is none of ours; begin anew")
    return int(token)


def _snapshot(entry: SnapshotEntry) -> pb.Snapshot:
    made = Timestamp()
    made.FromNanoseconds(entry.time_ns)
    return pb.Snapshot(
        size_bytes=entry.size_bytes,
        snapshot_id=entry.snapshot_id,
        source_volume_id=entry.source,
        creation_time=made,
        ready_to_use=True,
    )
