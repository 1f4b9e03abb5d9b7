"""From messages to frozen types: everything that a call says is checked here, once.

All strings are hostile: attributes of inline volumes come from whoever may create a Pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from csi.attributes import VolumeAttributes, read_attributes
from csi.checks import MAX_NAME_BYTES, checked_id, checked_path, checked_text
from csi.errors import Unauthenticated
from csi.proto import csi_pb2 as pb
from imgfmt.digest import digest_of
from imgfmt.errors import InvalidInput
from transfer.oserrors import printable
from transfer.store.s3.config import Credentials

MAX_MAP_BYTES = 4096

_POD_PREFIX = "csi.storage.k8s.io/"
_PROVISIONER = "storage.kubernetes.io/csiProvisionerIdentity"
_CONTEXT = re.compile(
    r'(context|rootcontext|fscontext|defcontext)=(?:"([^"\\]{1,256})"|([^",\\]{1,256}))'
)
_HARMLESS_FLAGS = ("ro", "nosuid", "nodev", "noatime", "relatime")
_SECRET_KEYS = {
    "accessKeyId": "access_key_id",
    "secretAccessKey": "secret_access_key",
    "sessionToken": "session_token",
    "AWS_ACCESS_KEY_ID": "access_key_id",
    "AWS_SECRET_ACCESS_KEY": "secret_access_key",
    "AWS_SESSION_TOKEN": "session_token",
}


@dataclass(frozen=True, slots=True)
class Pod:
    """The Pod of a call, as kubelet tells. `ephemeral` is not False for inline volumes."""

    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    ephemeral: bool = True


@dataclass(frozen=True, slots=True)
class PublishRequest:
    """One NodePublishVolume. `contexts` are SELinux mount options by name."""

    volume_id: str
    target: str
    attributes: VolumeAttributes
    pod: Pod
    contexts: tuple[tuple[str, str], ...] = ()
    credentials: Credentials | None = None

    def fingerprint(self) -> str:
        """Tells whether a later call asks for the same. Says nothing of credentials."""
        found = self.attributes
        said = [(f.name, str(getattr(found, f.name))) for f in fields(found)]
        text = repr((said, self.contexts))
        return digest_of(b"snapcask publish 1\0", text.encode()).hex[:32]


@dataclass(frozen=True, slots=True)
class UnpublishRequest:
    """One NodeUnpublishVolume."""

    volume_id: str
    target: str


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """One CreateVolume. `snapshot_id` goes before what the parameter `image` names.

    `contexts` says whether there are SELinux mount options.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    required_bytes: int
    limit_bytes: int
    snapshot_id: str | None
    credentials: Credentials | None
    contexts: bool = False


def publish_request(message: pb.NodePublishVolumeRequest) -> PublishRequest:
    """Read a NodePublishVolume. Raises InvalidInput, Unauthenticated."""
    volume_id = checked_id(message.volume_id)
    target = checked_path(message.target_path, "target_path")
    if not message.HasField("volume_capability"):
        raise InvalidInput(f"volume {volume_id}: volume_capability is missing")
    check_capability(message.volume_capability, readonly=message.readonly)
    _check_map(message.volume_context, "volume_context")
    pod, given = split_context(message.volume_context)
    attributes = read_attributes(given, inline=pod.ephemeral)
    return PublishRequest(
        volume_id,
        target,
        attributes,
        pod,
        tuple(mount_options(message.volume_capability.mount.mount_flags)),
        read_credentials(message.secrets),
    )


def unpublish_request(message: pb.NodeUnpublishVolumeRequest) -> UnpublishRequest:
    """Read a NodeUnpublishVolume. Raises InvalidInput."""
    volume_id = checked_id(message.volume_id)
    return UnpublishRequest(volume_id, checked_path(message.target_path, "target_path"))


def create_request(message: pb.CreateVolumeRequest) -> CreateRequest:
    """Read a CreateVolume. Raises InvalidInput, Unauthenticated."""
    name = checked_text(message.name, "name", MAX_NAME_BYTES)
    check_capabilities(message.volume_capabilities)
    _check_map(message.parameters, "parameters")
    wanted = message.capacity_range
    if wanted.required_bytes < 0 or wanted.limit_bytes < 0:
        raise InvalidInput(f"volume {name}: capacity_range is negative")
    snapshot_id = None
    if message.HasField("volume_content_source"):
        if not message.volume_content_source.HasField("snapshot"):
            raise InvalidInput(f"volume {name}: only a snapshot can be its source, no other volume")
        found = message.volume_content_source.snapshot.snapshot_id
        snapshot_id = checked_text(found, "snapshot_id", MAX_NAME_BYTES * 4)
    parameters = {k: v for k, v in message.parameters.items() if not k.startswith(_POD_PREFIX)}
    if snapshot_id is None and "image" not in parameters:
        raise InvalidInput(
            f"volume {name}: no image is named; give the StorageClass the parameter image, or the"
            " claim a VolumeSnapshot as its dataSource"
        )
    return CreateRequest(
        name,
        tuple(sorted(parameters.items())),
        wanted.required_bytes,
        wanted.limit_bytes,
        snapshot_id,
        read_credentials(message.secrets),
        any([list(mount_options(c.mount.mount_flags)) for c in message.volume_capabilities]),
    )


def split_context(context: Mapping[str, str]) -> tuple[Pod, dict[str, str]]:
    """What kubelet says of the Pod, and what is left. Kubelet's words go before a Pod author's."""
    known = {key: value for key, value in context.items() if key.startswith(_POD_PREFIX)}
    left = {k: v for k, v in context.items() if k not in known and k != _PROVISIONER}

    def said(key: str) -> str | None:
        return known.get(_POD_PREFIX + key) or None

    pod = Pod(
        said("pod.namespace"), said("pod.name"), said("pod.uid"), said("ephemeral") != "false"
    )
    for value in (pod.namespace, pod.name, pod.uid):
        checked_text(value or "-", "name of the Pod", 256)
    return pod, left


def read_credentials(secrets: Mapping[str, str]) -> Credentials | None:
    """Read the keys of a Secret; None if there is none. Raises Unauthenticated, which quotes none.

    The keys of the Secret are `accessKeyId`, `secretAccessKey` and, where they are temporary,
    `sessionToken`, or the same as the AWS variables are called.
    """
    if not secrets:
        return None
    found: dict[str, str] = {}
    for key, value in secrets.items():
        field = _SECRET_KEYS.get(key)
        if field is None:
            raise Unauthenticated(
                f"the Secret has a key {printable(key[:80])!r}; it may have accessKeyId,"
                " secretAccessKey and sessionToken"
            )
        found[field] = value.strip()
    if not found.get("access_key_id") or not found.get("secret_access_key"):
        raise Unauthenticated("the Secret lacks accessKeyId or secretAccessKey")
    return Credentials(
        found["access_key_id"], found["secret_access_key"], found.get("session_token") or None
    )


def check_capabilities(capabilities: Sequence[pb.VolumeCapability]) -> None:
    """Raise InvalidInput unless all of these, and at least one, can be had."""
    if not capabilities:
        raise InvalidInput("volume_capabilities are missing")
    for capability in capabilities:
        check_capability(capability, readonly=False)


def check_capability(capability: pb.VolumeCapability, *, readonly: bool) -> None:
    """Raise InvalidInput for block access, and for writers on several nodes unless read-only."""
    if capability.HasField("block"):
        raise InvalidInput("block access: an image is a directory; set volumeMode: Filesystem")
    if not capability.HasField("mount"):
        raise InvalidInput("volume_capability has no access_type")
    modes = pb.VolumeCapability.AccessMode
    mode = capability.access_mode.mode
    if mode in (modes.MULTI_NODE_SINGLE_WRITER, modes.MULTI_NODE_MULTI_WRITER):
        if not readonly:
            raise InvalidInput(
                f"access mode {modes.Mode.Name(mode)}: images can't be written to; use"
                " ReadOnlyMany, or readOnly: true in the Pod"
            )
    elif mode == modes.UNKNOWN or mode not in modes.Mode.values():
        raise InvalidInput(f"access mode {mode} is missing or not known here")


def mount_options(flags: Iterable[str]) -> Iterable[tuple[str, str]]:
    """SELinux options among mount flags, in order. Raises InvalidInput for flags not known here.

    A flag may hold several, joined by commas; commas within quotes are part of a label.
    """
    for flag in flags:
        for part in re.findall(r'(?:[^,"]|"[^"]*"?)+', flag):
            if part in _HARMLESS_FLAGS:
                continue
            found = _CONTEXT.fullmatch(part)
            if found is None:
                raise InvalidInput(f"mount option {printable(part[:80])!r} is not known here")
            yield found[1], found[2] or found[3]


def _check_map(found: Mapping[str, str], what: str) -> None:
    if sum(len(k.encode()) + len(v.encode()) for k, v in found.items()) > MAX_MAP_BYTES:
        raise InvalidInput(f"{what} has more than {MAX_MAP_BYTES} bytes")
    for key, value in found.items():
        if not key.isprintable() or not value.isprintable():
            raise InvalidInput(f"{what} has characters that can't be printed in {printable(key)!r}")
