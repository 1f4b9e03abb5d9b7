"""What can't be mounted on any node: found out before a claim is bound, and again at each mount.

Whether an image is for a node, or fits into its cache, is not asked here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from csi.attributes import VolumeAttributes
from csi.config import MountConfig, MountMode
from imgfmt.digest import Digest
from imgfmt.errors import ImageError, InvalidInput, NotFound
from imgfmt.image import Image, Member, Variants
from imgfmt.tree import ROOT, EntryType, Tree
from transfer.catalog import Catalog
from transfer.oserrors import printable
from transfer.pull import choose_members, images_of


def check_modes(modes: Collection[MountMode], *, as_stored: bool) -> None:
    """Raise InvalidInput if no mode of these can show files otherwise than they are stored."""
    if not as_stored and MountMode.OVERLAY not in modes:
        raise InvalidInput(
            "uid, gid, mode and SELinux contexts need the mount mode overlay; this volume is"
            " mounted with bind"
        )


def check_one_member(sub_path: str, members: Sequence[Member]) -> None:
    """Raise InvalidInput if `sub_path` would be within several members."""
    if sub_path and len(members) != 1:
        there = ", ".join(m.name for m in members)
        raise InvalidInput(f"subPath is within one member; add member, one of {there}")


def no_directory(sub_path: str) -> NotFound:
    """What is raised for a `subPath` that is none of the image's directories."""
    return NotFound(f"subPath {printable(sub_path)}: it is no directory of the image")


def check_attributes(config: MountConfig, attributes: VolumeAttributes, *, contexts: bool) -> None:
    """Raise InvalidInput for what goes in no namespace. `contexts`: there are SELinux options."""
    modes = config.modes if attributes.mount_mode is None else {attributes.mount_mode}
    check_modes(modes, as_stored=not (contexts or attributes.changes_owner))


async def check_image(catalog: Catalog, digest: Digest, attributes: VolumeAttributes) -> None:
    """Raise NotFound or InvalidInput if the image, or none of variants, can be mounted so."""
    record = await catalog.image(digest)
    images = {digest: record} if isinstance(record, Image) else await _images(catalog, record)
    failed: list[ImageError] = []
    for found, image in images.items():
        try:
            await _check(catalog, found, image, attributes)
            return
        except (NotFound, InvalidInput) as error:
            failed.append(error)
    raise failed[0]


async def _images(catalog: Catalog, variants: Variants) -> dict[Digest, Image]:
    found = await images_of(catalog, variants)
    if not found:
        raise NotFound(catalog.named("none of the variants is there") + "; push them again")
    return found


async def _check(
    catalog: Catalog, digest: Digest, image: Image, attributes: VolumeAttributes
) -> None:
    members = choose_members(image, digest, attributes.member)
    check_one_member(attributes.sub_path, members)
    if attributes.sub_path and not _has_directory(
        await catalog.tree(members[0].tree), attributes.sub_path
    ):
        raise no_directory(attributes.sub_path)


def _has_directory(tree: Tree, path: str) -> bool:
    """Whether a directory is there, without following links."""
    at = ROOT
    for part in path.encode().split(b"/"):
        below = np.flatnonzero(tree.columns["parent"] == at)
        found = [i for i in map(int, below) if i != ROOT and tree.name(i) == part]
        if not found or tree.columns["type"][found[0]] != EntryType.DIRECTORY:
            return False
        at = found[0]
    return True
