"""Images and variants (SPEC.md sections 5.2, 5.6): what references point to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from imgfmt.digest import DIGEST_BYTES, Digest, Octets
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.reference import check_name
from imgfmt.rules import MAX_RULES, decode_rules, encode_rules
from imgfmt.rules import Rule as Rule
from imgfmt.wire import Fields, decode_record, encode_record

MAX_MEMBERS = 1024
MAX_VARIANTS = 256
MAX_PAIRS = 256
MAX_PATH_BYTES = 4095

Pairs = tuple[tuple[str, str], ...]
"""A small map that can't change, ascending by key; `dict(pairs)` gives the map."""

Item = TypeVar("Item", str, Rule)


def pairs(values: Mapping[str, str]) -> Pairs:
    """`values` as Pairs."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True, slots=True)
class Member:
    """One directory of an image. `mount_path` is empty or absolute.

    `provenance` are facts of the snapshot itself, or given by flags.
    """

    name: str
    tree: Digest
    role: str = ""
    mount_path: str = ""
    provenance: Pairs = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        _check_text(self.role, f"the role of member {self.name}")
        _check_text(self.mount_path, f"the mount path of member {self.name}")
        path = self.mount_path.encode()
        if path and (path[:1] != b"/" or b"\0" in path or len(path) > MAX_PATH_BYTES):
            raise InvalidInput(
                f"member {self.name}: {self.mount_path[:80]!r} is not an absolute path"
            )
        _check_pairs(self.provenance, f"provenance of member {self.name}")


@dataclass(frozen=True, slots=True)
class Image:
    """What a reference points to. Members ascend by name, `compat` and `annotations` as well."""

    members: tuple[Member, ...]
    compat: tuple[Rule, ...] = ()
    annotations: Pairs = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise InvalidInput(f"an image has 1 to {MAX_MEMBERS} members, not {len(self.members)}")
        _check_ascending([member.name for member in self.members], "the members of an image")
        _check_count(self.compat, MAX_RULES, "rules of an image")
        _check_ascending(self.compat, "the rules of an image")
        _check_pairs(self.annotations, "annotations")

    def encode(self) -> bytes:
        """The canonical bytes, whose digest names the image."""
        members = [
            {
                "name": member.name,
                "role": member.role,
                "mount_path": member.mount_path,
                "tree": member.tree.raw,
                "provenance": dict(member.provenance),
            }
            for member in self.members
        ]
        compat, annotations = encode_rules(self.compat), dict(self.annotations)
        fields = {"members": members, "compat": compat, "annotations": annotations}
        return encode_record("image", fields)


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the images of variants, and the rules under which it is meant."""

    digest: Digest
    when: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        _check_count(self.when, MAX_RULES, "rules of a variant")


@dataclass(frozen=True, slots=True)
class Variants:
    """Images to choose from, the preferred ones first."""

    images: tuple[Variant, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.images) <= MAX_VARIANTS:
            raise InvalidInput(f"variants are 1 to {MAX_VARIANTS} images, not {len(self.images)}")

    def encode(self) -> bytes:
        """The canonical bytes, whose digest names the variants."""
        images = [
            {"digest": variant.digest.raw, "when": encode_rules(variant.when)}
            for variant in self.images
        ]
        return encode_record("variants", {"images": images})


def decode_image(raw: Octets, what: str) -> Image:
    """Read an image; that `raw` has the right digest is for the caller to see.

    Raises InvalidImage or Unsupported, as do the two below.
    """
    return _image(decode_record(raw, "image", what))


def decode_variants(raw: Octets, what: str) -> Variants:
    """Read variants."""
    return _variants(decode_record(raw, "variants", what))


def decode_image_or_variants(raw: Octets, what: str) -> Image | Variants:
    """Read what lies under the key of an image."""
    fields = decode_record(raw, ("image", "variants"), what)
    return _image(fields) if fields.kind == "image" else _variants(fields)


def _image(fields: Fields) -> Image:
    try:
        image = Image(
            members=tuple(_member(item) for item in fields.children("members", MAX_MEMBERS)),
            compat=decode_rules(fields, "compat"),
            annotations=pairs(fields.text_map("annotations", MAX_PAIRS)),
        )
    except InvalidInput as error:
        raise InvalidImage(f"{fields.what}: {error}") from None
    fields.done()
    return image


def _member(fields: Fields) -> Member:
    member = Member(
        name=fields.text("name"),
        tree=Digest(fields.raw("tree", DIGEST_BYTES)),
        role=fields.text("role"),
        mount_path=fields.text("mount_path"),
        provenance=pairs(fields.text_map("provenance", MAX_PAIRS)),
    )
    fields.done()
    return member


def _variants(fields: Fields) -> Variants:
    children = fields.children("images", MAX_VARIANTS)
    try:
        variants = Variants(tuple(_variant(item) for item in children))
    except InvalidInput as error:
        raise InvalidImage(f"{fields.what}: {error}") from None
    fields.done()
    return variants


def _variant(fields: Fields) -> Variant:
    variant = Variant(Digest(fields.raw("digest", DIGEST_BYTES)), decode_rules(fields, "when"))
    fields.done()
    return variant


def _check_count(items: Sequence[object], limit: int, what: str) -> None:
    if len(items) > limit:
        raise InvalidInput(f"{len(items)} {what} are too many, the limit is {limit}")


def _check_pairs(items: Pairs, what: str) -> None:
    _check_count(items, MAX_PAIRS, what)
    for key, value in items:
        _check_text(key, f"{what}: {key!r:.80}")
        _check_text(value, f"{what}: {key!r:.80}")
    _check_ascending([key for key, _ in items], what)


def _check_text(text: str, what: str) -> None:
    """Raise InvalidInput for what a reader would not take for a string."""
    try:
        str.encode(text)
    except (TypeError, UnicodeEncodeError):
        raise InvalidInput(f"{what} is not UTF-8 text") from None


def _check_ascending(items: Sequence[Item], what: str) -> None:
    if list(items) != sorted(set(items)):
        raise InvalidInput(f"{what} do not ascend, or one is there twice")
