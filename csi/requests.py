"""From messages to frozen types: everything that a call says is checked here, once.

All strings are hostile: attributes of inline volumes come from whoever may create a Pod.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypeVar

from csi.config import MountMode
from csi.errors import Unauthenticated
from csi.proto import csi_pb2 as pb
from imgfmt.digest import digest_of
from imgfmt.errors import InvalidInput
from imgfmt.reference import ImageRef, check_name, parse_reference
from transfer.oserrors import printable
from transfer.store.s3.config import Credentials

MAX_ID_BYTES = 128
MAX_NAME_BYTES = 128
MAX_PATH_BYTES = 4095
MAX_MAP_BYTES = 4096
MAX_UID = 2**32 - 2

_POD_PREFIX = "csi.storage.k8s.io/"
_PROVISIONER = "storage.kubernetes.io/csiProvisionerIdentity"
_OCTAL = re.compile(r"0?[0-7]{3}")
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

Choice = TypeVar("Choice", bound=StrEnum)
T = TypeVar("T")


class PullPolicy(StrEnum):
    """When the store is asked what a reference means: if the node does not know, or each time."""

    IF_NOT_PRESENT = "IfNotPresent"
    ALWAYS = "Always"


class OnMismatch(StrEnum):
    """What is done with an image whose rules refuse this node."""

    FAIL = "fail"
    EMPTY = "empty"
    MOUNT = "mount"


@dataclass(frozen=True, slots=True)
class VolumeAttributes:
    """What a volume shows of an image. `uid`, `gid` and `mode` replace those of all its files."""

    image: ImageRef
    store: str | None = None
    member: str | None = None
    sub_path: str = ""
    pull_policy: PullPolicy = PullPolicy.IF_NOT_PRESENT
    on_mismatch: OnMismatch = OnMismatch.FAIL
    uid: int | None = None
    gid: int | None = None
    mode: int | None = None
    mount_mode: MountMode | None = None

    @property
    def changes_owner(self) -> bool:
        """Whether files are to look other than they are in the image."""
        return (self.uid, self.gid, self.mode) != (None, None, None)


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
    """One CreateVolume. `snapshot_id` goes before what the parameter `image` names."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    required_bytes: int
    limit_bytes: int
    snapshot_id: str | None
    credentials: Credentials | None


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


def read_attributes(given: Mapping[str, str], *, inline: bool) -> VolumeAttributes:
    """Read volume attributes, or the parameters of a StorageClass. Raises InvalidInput."""
    left = dict(given)
    text = left.pop("image", "")
    if not text:
        raise InvalidInput("the volume attribute image is missing; it names the image to mount")
    image = _named("image", lambda: parse_reference(checked_text(text, "image", 512)))
    if image.name is not None and image.name.startswith("_") and inline:
        raise InvalidInput(f"image {image}: names that begin with _ are not for Pods")
    found = VolumeAttributes(
        image=image,
        store=_optional(left, "store"),
        member=_optional(left, "member"),
        sub_path=_sub_path(left.pop("subPath", "")),
        pull_policy=_one_of(left, "pullPolicy", PullPolicy, _default_policy(image)),
        on_mismatch=_one_of(left, "onMismatch", OnMismatch, OnMismatch.FAIL),
        uid=_number(left, "uid"),
        gid=_number(left, "gid"),
        mode=_mode(left.pop("mode", None)),
        mount_mode=None if inline else _mount_mode(left),
    )
    if (view := left.pop("view", "image")) != "image":
        raise InvalidInput(f"view: {view[:80]!r} is not known here, only 'image'")
    for key in left:
        advice = "; it is for persistent volumes" if key == "mountMode" else ""
        raise InvalidInput(f"{key[:80]!r} is not a volume attribute that is known here{advice}")
    if found.member is not None:
        member = found.member
        _named("member", lambda: check_name(member))
    return found


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


def checked_id(volume_id: str) -> str:
    """A volume's id. Raises InvalidInput."""
    checked_text(volume_id, "volume_id", MAX_ID_BYTES)
    if ".." in volume_id.split("/") or volume_id.startswith("/"):
        raise InvalidInput(f"volume_id {volume_id!r} is a path that leads elsewhere")
    return volume_id


def checked_text(text: str, what: str, limit_bytes: int) -> str:
    """A string of one printable line. Raises InvalidInput."""
    if not text:
        raise InvalidInput(f"{what} is missing")
    if len(text.encode()) > limit_bytes:
        raise InvalidInput(f"{what} has more than {limit_bytes} bytes")
    if not text.isprintable():
        raise InvalidInput(f"{what} {printable(text[:80])!r} has characters that can't be printed")
    return text


def checked_path(path: str, what: str) -> str:
    """An absolute path without detours; blanks are allowed. Raises InvalidInput."""
    checked_text(path, what, MAX_PATH_BYTES)
    if not path.startswith("/") or os.path.normpath(path) != path or path.startswith("//"):
        raise InvalidInput(f"{what} {path[:200]!r} is not an absolute path in its shortest form")
    return path


def _check_map(found: Mapping[str, str], what: str) -> None:
    if sum(len(k.encode()) + len(v.encode()) for k, v in found.items()) > MAX_MAP_BYTES:
        raise InvalidInput(f"{what} has more than {MAX_MAP_BYTES} bytes")
    for key, value in found.items():
        if not key.isprintable() or not value.isprintable():
            raise InvalidInput(f"{what} has characters that can't be printed in {printable(key)!r}")


def _named(key: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except InvalidInput as error:
        raise InvalidInput(f"{key}: {error}") from None


def _default_policy(image: ImageRef) -> PullPolicy:
    """As for container images: what may move is asked for each time."""
    moves = not image.by_digest and image.effective_tag == "latest"
    return PullPolicy.ALWAYS if moves else PullPolicy.IF_NOT_PRESENT


def _optional(left: dict[str, str], key: str) -> str | None:
    value = left.pop(key, None)
    return None if value is None else checked_text(value, key, 512)


def _one_of(left: dict[str, str], key: str, kind: type[Choice], default: Choice) -> Choice:
    value = left.pop(key, None)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(item) for item in kind)
        raise InvalidInput(f"{key}: {value[:80]!r} is not one of {allowed}") from None


def _mount_mode(left: dict[str, str]) -> MountMode | None:
    if "mountMode" not in left:
        return None
    return _one_of(left, "mountMode", MountMode, MountMode.OVERLAY)


def _number(left: dict[str, str], key: str) -> int | None:
    value = left.pop(key, None)
    if value is None:
        return None
    if not re.fullmatch(r"[0-9]{1,10}", value) or int(value) > MAX_UID:
        raise InvalidInput(f"{key}: {value[:80]!r} is not a number from 0 to {MAX_UID}")
    return int(value)


def _mode(value: str | None) -> int | None:
    if value is None:
        return None
    if not _OCTAL.fullmatch(value):
        raise InvalidInput(f"mode: {value[:80]!r} is not three octal digits, such as 0444")
    return int(value, 8)


def _sub_path(value: str) -> str:
    if not value:
        return ""
    checked_text(value, "subPath", MAX_PATH_BYTES)
    if value.startswith("/") or {"", ".", ".."} & set(value.split("/")):
        raise InvalidInput(f"subPath: {value[:200]!r} is not a relative path in its shortest form")
    return value
