"""References (SPEC.md section 6.1): their grammar, as users write them, and their record."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.digest import DIGEST_BYTES, PREFIX, Digest, Octets
from imgfmt.errors import InvalidImage, InvalidInput
from imgfmt.wire import Fields, Value, decode_record, encode_record

DEFAULT_TAG = "latest"
MAX_NAME_BYTES = 200
MAX_HISTORY = 64
MIN_PREFIX_DIGITS = 8
HEX_DIGITS = 2 * DIGEST_BYTES
WRITE_ID_BYTES = 16
MAX_TIME_NS = 2**63 - 1

_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_RESERVED = re.compile(rf"_{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HEX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX_DIGITS},{HEX_DIGITS}}}")


def check_name(name: str, *, reserved: bool = False) -> None:
    """Raise InvalidInput unless `name` names a reference or a member.

    With `reserved`, names that begin with `_` pass as well, such as `_volumes/<id>`.
    """
    if len(name) > MAX_NAME_BYTES:
        raise InvalidInput(f"name {name[:40]!r}... has more than {MAX_NAME_BYTES} bytes")
    if not _NAME.fullmatch(name) and not (reserved and _RESERVED.fullmatch(name)):
        raise InvalidInput(
            f"{name!r} is not a name: use lower-case letters and digits, joined by . _ - or /"
        )


def check_tag(tag: str) -> None:
    """Raise InvalidInput unless `tag` is one."""
    if not _TAG.fullmatch(tag):
        raise InvalidInput(
            f"{tag[:140]!r} is not a tag: use at most 128 letters, digits, . _ and -,"
            " beginning with a letter, a digit or _"
        )


@dataclass(frozen=True, slots=True)
class ImageRef:
    """What a user may write to name an image.

    `digest_prefix` holds 8 to 63 hexadecimal digits. At most one of `tag`, `digest` and
    `digest_prefix` is set, and without a name one of the last two is. No tag means `latest`.
    """

    name: str | None = None
    tag: str | None = None
    digest: Digest | None = None
    digest_prefix: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name, reserved=True)
            if self.name + ":" == PREFIX:  # else `blake3:x` would have two meanings
                raise InvalidInput(f"{self.name!r} can't be a name: it begins digests")
        if self.tag is not None:
            check_tag(self.tag)
        prefix = self.digest_prefix
        if prefix is not None and (len(prefix) == HEX_DIGITS or not _HEX.fullmatch(prefix)):
            raise InvalidInput(f"{prefix!r} is not the beginning of a digest")
        given = [x for x in (self.tag, self.digest, self.digest_prefix) if x is not None]
        if len(given) > 1 or (self.name is None and (not given or self.tag is not None)):
            raise InvalidInput("an image is named by name, name:tag, name@digest or digest alone")

    @property
    def by_digest(self) -> bool:
        """Whether this gives a digest or the beginning of one, and so no tag."""
        return self.digest is not None or self.digest_prefix is not None

    @property
    def effective_tag(self) -> str:
        """The tag, or the default one."""
        return DEFAULT_TAG if self.tag is None else self.tag

    def __str__(self) -> str:
        name = self.name or ""
        if not self.by_digest:
            return name if self.tag is None else f"{name}:{self.tag}"
        digest = str(self.digest) if self.digest else f"{PREFIX}{self.digest_prefix}"
        return f"{name}@{digest}" if name else digest


def parse_reference(text: str) -> ImageRef:
    """Read `name`, `name:tag`, `name@blake3:<hex>`, `blake3:<hex>` or `@blake3:<hex>`.

    8 to 63 digits are the beginning of a digest. Raises InvalidInput for anything else.
    """
    if not isinstance(text, str):
        raise InvalidInput(f"{text!r} is no reference; it is text, NAME or NAME:TAG")
    name, at, digest_text = text.partition("@")
    if text.startswith(PREFIX):
        name, at, digest_text = "", "@", text
    if not at:
        name, colon, tag = text.partition(":")
        if not name or (colon and not tag):
            raise InvalidInput(f"{text!r} is no reference; write NAME or NAME:TAG")
        return ImageRef(name=name, tag=tag if colon else None)
    digits = digest_text.removeprefix(PREFIX)
    if digits == digest_text or not _HEX.fullmatch(digits):
        raise InvalidInput(
            f"{text!r}: expected {PREFIX} and {MIN_PREFIX_DIGITS} to {HEX_DIGITS} hex digits"
        )
    if len(digits) == HEX_DIGITS:
        return ImageRef(name=name or None, digest=Digest(bytes.fromhex(digits)))
    return ImageRef(name=name or None, digest_prefix=digits)


class TargetKind(StrEnum):
    """What a reference points to; `none` is one that was deleted."""

    IMAGE = "image"
    VARIANTS = "variants"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PastTarget:
    """What a reference pointed to until `time_ns`."""

    target_kind: TargetKind
    target: Digest | None
    time_ns: int

    def __post_init__(self) -> None:
        _check_target(self.target_kind, self.target, self.time_ns)


@dataclass(frozen=True, slots=True)
class ReferenceRecord:
    """One generation of a reference. `history` is newest first; times are the writers' clocks."""

    name: str
    tag: str
    target_kind: TargetKind
    target: Digest | None
    write_id: bytes
    time_ns: int
    who: str
    history: tuple[PastTarget, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, reserved=True)
        check_tag(self.tag)
        _check_target(self.target_kind, self.target, self.time_ns)
        if len(self.write_id) != WRITE_ID_BYTES:
            raise InvalidInput(f"a write id has {WRITE_ID_BYTES} bytes")
        if len(self.history) > MAX_HISTORY:
            raise InvalidInput(f"a reference remembers at most {MAX_HISTORY} targets")

    def replaced_by(
        self,
        target_kind: TargetKind,
        target: Digest | None,
        write_id: bytes,
        time_ns: int,
        who: str,
    ) -> ReferenceRecord:
        """The next generation: its history begins with this one's target, replaced at `time_ns`."""
        past = PastTarget(self.target_kind, self.target, time_ns)
        history = (past, *self.history)[:MAX_HISTORY]
        return ReferenceRecord(
            self.name, self.tag, target_kind, target, write_id, time_ns, who, history
        )

    def roots(self, now_ns: int, history_s: int) -> set[Digest]:
        """The target, and every earlier one that was replaced less than `history_s` ago."""
        since_ns = now_ns - history_s * 1_000_000_000
        kept = {past.target for past in self.history if past.time_ns > since_ns}
        return {target for target in kept | {self.target} if target is not None}

    def encode(self) -> bytes:
        """The canonical bytes of the record."""
        return encode_record(
            "reference",
            {
                "name": self.name,
                "tag": self.tag,
                "target_kind": self.target_kind.value,
                "target": self.target.raw if self.target else None,
                "write_id": self.write_id,
                "time_ns": self.time_ns,
                "who": self.who,
                "history": _encode_history(self.history),
            },
        )

    @classmethod
    def decode(cls, raw: Octets, what: str) -> ReferenceRecord:
        """Read one generation. Raises InvalidImage or Unsupported."""
        fields = decode_record(raw, "reference", what)
        try:
            record = cls(
                name=fields.text("name"),
                tag=fields.text("tag"),
                target_kind=_kind(fields.text("target_kind")),
                target=_target(fields.optional_raw("target", DIGEST_BYTES)),
                write_id=fields.raw("write_id", WRITE_ID_BYTES),
                time_ns=fields.integer("time_ns"),
                who=fields.text("who"),
                history=tuple(_decode_history(fields)),
            )
        except InvalidInput as error:
            raise InvalidImage(f"{what}: {error}") from None
        fields.done()
        return record


def standing_in(
    name: str, tag: str, before: ReferenceRecord | None, n_damaged: int, time_ns: int
) -> ReferenceRecord:
    """What stands for the `n_damaged` generations, at least one, that follow `before`: deleted.

    Each has its place in the history, so that those of other generations stay where they are.
    """
    nothing, time_ns = bytes(WRITE_ID_BYTES), min(max(time_ns, 0), MAX_TIME_NS)
    record = ReferenceRecord(name, tag, TargetKind.NONE, None, nothing, time_ns, "")
    if before is not None:
        record = before
        for _ in range(min(n_damaged, MAX_HISTORY + 1)):
            record = record.replaced_by(
                TargetKind.NONE, None, nothing, max(time_ns, record.time_ns), ""
            )
    return record


def _check_target(target_kind: TargetKind, target: Digest | None, time_ns: int) -> None:
    if (target is None) != (target_kind is TargetKind.NONE):
        raise InvalidInput(f"a target of kind {target_kind} needs {'no' if target else 'a'} digest")
    if not 0 <= time_ns <= MAX_TIME_NS:
        raise InvalidInput(f"time {time_ns} ns is not from 0 to {MAX_TIME_NS}")


def _encode_history(history: Iterable[PastTarget]) -> list[Value]:
    return [
        [past.target_kind.value, past.target.raw if past.target else None, past.time_ns]
        for past in history
    ]


def _decode_history(fields: Fields) -> Iterable[PastTarget]:
    for item in fields.array("history", MAX_HISTORY):
        if not isinstance(item, list) or len(item) != 3:
            fields.fail("its history has an entry that is not kind, target and time")
        kind, target, time_ns = item
        if not isinstance(kind, str) or not isinstance(target, bytes | None):
            fields.fail("its history has a target of the wrong type")
        if not isinstance(time_ns, int) or isinstance(time_ns, bool):
            fields.fail("its history has a time that is not an integer")
        yield PastTarget(_kind(kind), _target(target), time_ns)


def _kind(text: str) -> TargetKind:
    try:
        return TargetKind(text)
    except ValueError:
        raise InvalidInput(f"{text[:40]!r} is not a kind of target") from None


def _target(raw: bytes | None) -> Digest | None:
    return None if raw is None else Digest(raw)
