"""Volume attributes: what a Pod, a persistent volume or a StorageClass says of an image."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from csi.checks import MAX_PATH_BYTES, checked_text
from csi.config import MountMode
from imgfmt.errors import InvalidInput
from imgfmt.reference import ImageRef, check_name, parse_reference

MAX_UID = 2**32 - 2

_OCTAL = re.compile(r"0?[0-7]{3}")

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
        raise InvalidInput(f"mode: {value[:80]!r} is not of the form 444 or 0444, in octal")
    return int(value, 8)


def _sub_path(value: str) -> str:
    if not value:
        return ""
    checked_text(value, "subPath", MAX_PATH_BYTES)
    if value.startswith("/") or {"", ".", ".."} & set(value.split("/")):
        raise InvalidInput(f"subPath: {value[:200]!r} is not a relative path in its shortest form")
    return value
