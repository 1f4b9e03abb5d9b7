"""Thin servicers: parse a message, call a service, build the answer. No logic of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import BoolValue

from csi.checks import MAX_PATH_BYTES, checked_id, checked_text
from csi.proto import csi_pb2 as pb
from csi.requests import publish_request, unpublish_request
from csi.volumes import VolumeService
from imgfmt.errors import StoreUnavailable

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

    Context = ServicerContext[Any, Any]

_MARGIN_S = 5.0
_NO_DEADLINE_S = 3600.0


class IdentityServicer:
    """Who the driver is. `why_not_ready` says why it can't work yet, or nothing."""

    def __init__(
        self, name: str, version: str, *, controller: bool, why_not_ready: Callable[[], str]
    ) -> None:
        self._name = name
        self._version = version
        self._controller = controller
        self._why_not_ready = why_not_ready

    async def GetPluginInfo(
        self, message: pb.GetPluginInfoRequest, context: Context
    ) -> pb.GetPluginInfoResponse:
        """Name and version."""
        return pb.GetPluginInfoResponse(name=self._name, vendor_version=self._version)

    async def GetPluginCapabilities(
        self, message: pb.GetPluginCapabilitiesRequest, context: Context
    ) -> pb.GetPluginCapabilitiesResponse:
        """The services that are offered beside this and the node's."""
        service = pb.PluginCapability.Service
        offered = [service.CONTROLLER_SERVICE] if self._controller else []
        return pb.GetPluginCapabilitiesResponse(
            capabilities=[pb.PluginCapability(service=service(type=kind)) for kind in offered]
        )

    async def Probe(self, message: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        """Whether it is ready."""
        return pb.ProbeResponse(ready=BoolValue(value=not self._why_not_ready()))


class NodeServicer:
    """Volumes of this node. `why_not_ready` says why none can be mounted yet, or nothing."""

    def __init__(
        self, node_name: str, volumes: VolumeService, *, why_not_ready: Callable[[], str]
    ) -> None:
        self._node_name = node_name
        self._volumes = volumes
        self._why_not_ready = why_not_ready

    async def NodePublishVolume(
        self, message: pb.NodePublishVolumeRequest, context: Context
    ) -> pb.NodePublishVolumeResponse:
        """Mount an image."""
        request = publish_request(message)
        if why := self._why_not_ready():
            raise StoreUnavailable(why)
        await self._volumes.publish(request, timeout_s=timeout_of(context))
        return pb.NodePublishVolumeResponse()

    async def NodeUnpublishVolume(
        self, message: pb.NodeUnpublishVolumeRequest, context: Context
    ) -> pb.NodeUnpublishVolumeResponse:
        """Undo it."""
        await self._volumes.unpublish(unpublish_request(message))
        return pb.NodeUnpublishVolumeResponse()

    async def NodeGetVolumeStats(
        self, message: pb.NodeGetVolumeStatsRequest, context: Context
    ) -> pb.NodeGetVolumeStatsResponse:
        """What a volume has, by the records of its image."""
        volume_id = checked_id(message.volume_id)
        path = checked_text(message.volume_path, "volume_path", MAX_PATH_BYTES)
        usage = await self._volumes.usage(volume_id, path)
        return pb.NodeGetVolumeStatsResponse(
            usage=[
                pb.VolumeUsage(unit=unit, total=total, used=total)
                for unit, total in (
                    (pb.VolumeUsage.BYTES, usage.size_bytes),
                    (pb.VolumeUsage.INODES, usage.entries),
                )
            ]
        )

    async def NodeGetCapabilities(
        self, message: pb.NodeGetCapabilitiesRequest, context: Context
    ) -> pb.NodeGetCapabilitiesResponse:
        """Statistics; no staging."""
        rpc = pb.NodeServiceCapability.RPC
        return pb.NodeGetCapabilitiesResponse(
            capabilities=[pb.NodeServiceCapability(rpc=rpc(type=rpc.GET_VOLUME_STATS))]
        )

    async def NodeGetInfo(
        self, message: pb.NodeGetInfoRequest, context: Context
    ) -> pb.NodeGetInfoResponse:
        """The node; any number of volumes."""
        return pb.NodeGetInfoResponse(node_id=self._node_name)


def timeout_of(context: Context) -> float:
    """Seconds in which to answer, so that the caller still hears it."""
    left_s = context.time_remaining()
    if left_s is None:
        return _NO_DEADLINE_S
    return max(0.0, left_s - min(_MARGIN_S, left_s / 4))


def handlers_of(service: str, servicer: object) -> grpc.GenericRpcHandler:
    """The handlers of one service of the interface, by the names of its methods."""
    described = pb.DESCRIPTOR.services_by_name[service]
    package: Any = pb
    methods = {}
    for method in described.methods:
        request: type[Message] = getattr(package, method.input_type.name)
        answer: type[Message] = getattr(package, method.output_type.name)
        methods[method.name] = grpc.unary_unary_rpc_method_handler(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=answer.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(described.full_name, methods)
