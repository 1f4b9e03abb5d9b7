"""Keys of a store's objects (SPEC.md section 8): what is called what. Pure text."""

from __future__ import annotations

import re

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput
from imgfmt.reference import check_name, check_tag

STORE_KEY = "store.msgpack"
PROBE_KEY = "probe.msgpack"
PACKS = "packs/"
TREES = "trees/"
PLACEMENTS = "placements/"
IMAGES = "images/"
REFS = "refs/"
INDEX = "index/"
LEASES = "leases/"
DOOMED = "doomed/"
TMP = "tmp/"

FOLDERS = (PACKS, TREES, PLACEMENTS, IMAGES, REFS, INDEX, LEASES, DOOMED, TMP)
"""All folders of a store."""

NAME_BYTES = 16
"""Length of the random names of packs, index segments, leases and epochs."""

MAX_GENERATION = 10**16 - 1
_VERDICT = ".verdict"
_NAMED_KEY = re.compile(r"(?:index|leases|doomed)/[0-9a-f]{32}(?:\.verdict)?")
_PACK_KEY = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})")
_DIGEST_KEY = re.compile(r"(?:trees|placements|images)/([0-9a-f]{64})")
_GENERATION_KEY = re.compile(r"refs/([^/]+)/([^/]+)/([0-9]{16})")


def pack_key(name: bytes) -> str:
    """Key of the pack of this name, 16 bytes."""
    digits = _digits(name)
    return f"{PACKS}{digits[:2]}/{digits}"


def pack_name_of(key: str) -> bytes | None:
    """The inverse of `pack_key`; None for any other key."""
    found = _PACK_KEY.fullmatch(key)
    return bytes.fromhex(found[2]) if found else None


def tree_key(tree: Digest) -> str:
    """Key of a tree."""
    return TREES + tree.hex


def placement_key(tree: Digest) -> str:
    """Key of the placement of a tree, by the tree's digest."""
    return PLACEMENTS + tree.hex


def image_key(image: Digest) -> str:
    """Key of an image or of variants."""
    return IMAGES + image.hex


def digest_of_key(key: str) -> Digest | None:
    """The digest in the key of a tree, placement, image or variants; None for any other key."""
    found = _DIGEST_KEY.fullmatch(key)
    return Digest(bytes.fromhex(found[1])) if found else None


def reference_prefix(name: str, tag: str) -> str:
    """What the keys of all generations of a reference begin with, such as `refs/team+llama/v3/`."""
    check_name(name, reserved=True)
    check_tag(tag)
    return f"{REFS}{name.replace('/', '+')}/{tag}/"


def generation_key(name: str, tag: str, generation: int) -> str:
    """Key of one generation of a reference. Raises InvalidInput for a name that can't be one."""
    if not 0 <= generation <= MAX_GENERATION:
        raise InvalidInput(f"generation {generation} is not from 0 to {MAX_GENERATION}")
    return f"{reference_prefix(name, tag)}{generation:016d}"


def parse_generation_key(key: str) -> tuple[str, str, int] | None:
    """Name, tag and generation; None for a key that `generation_key` would not make."""
    found = _GENERATION_KEY.fullmatch(key)
    if not found:
        return None
    name, tag = found[1].replace("+", "/"), found[2]
    try:
        check_name(name, reserved=True)
        check_tag(tag)
    except InvalidInput:
        return None
    return name, tag, int(found[3])


def is_object_key(key: str) -> bool:
    """Whether an object of a file store may have this key; else it can be a folder."""
    return bool(
        _PACK_KEY.fullmatch(key)
        or _DIGEST_KEY.fullmatch(key)
        or _GENERATION_KEY.fullmatch(key)
        or _NAMED_KEY.fullmatch(key)
        or key in (STORE_KEY, PROBE_KEY)
    )


def segment_key(name: bytes) -> str:
    """Key of an index segment."""
    return INDEX + _digits(name)


def lease_key(lease_id: bytes) -> str:
    """Key of a lease."""
    return LEASES + _digits(lease_id)


def doomed_key(epoch: bytes) -> str:
    """Key of what a collector means to delete in this epoch."""
    return DOOMED + _digits(epoch)


def verdict_key(epoch: bytes) -> str:
    """Key of the one verdict of an epoch."""
    return DOOMED + _digits(epoch) + _VERDICT


def _digits(name: bytes) -> str:
    if len(name) != NAME_BYTES:
        raise InvalidInput(f"a random name has {NAME_BYTES} bytes, this one has {len(name)}")
    return name.hex()
