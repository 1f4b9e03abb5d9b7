"""Whether an image is for a machine (SPEC.md section 5.2.2), by the facts of both; and choosing.

Two kinds of rules: those that an image states, and those that follow from what is recorded of the
snapshot. What a machine does not tell, or what can't be compared, never refuses it. Facts of a
machine are looked up only for rules that there are, so that a lazy mapping does no more than it
must.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.digest import Digest
from imgfmt.errors import DoesNotFit, InvalidInput, NotFound
from imgfmt.facts import words
from imgfmt.image import Image, Member, Variant, Variants
from imgfmt.rules import Op, Rule, meets

RECORDED = {
    "container.cpu_limit": Op.AT_LEAST,
    "container.image_id": Op.EQUAL,
    "container.memory_limit": Op.AT_LEAST,
    "cpu.arch": Op.EQUAL,
    "cpu.features": Op.SUBSET,
    "criu.plugins": Op.SUBSET,
    "criu.version": Op.AT_LEAST,
    "engine": Op.EQUAL,
    "engine.flags": Op.EQUAL,
    "engine.version": Op.EQUAL,
    "gpu.compute_capability": Op.SUBSET,
    "gpu.count": Op.AT_LEAST,
    "gpu.cuda_version": Op.AT_LEAST,
    "gpu.driver_version": Op.EQUAL,
    "gpu.memory_gib": Op.AT_LEAST,
    "gpu.mig_profiles": Op.SUBSET,
    "gpu.products": Op.SUBSET,
    "kernel.release": Op.EQUAL,
    "model": Op.EQUAL,
}
"""Facts of a snapshot that a machine must match to go on with its processes, and how."""

_OF_TENSORS = frozenset({"cpu.arch", "gpu.compute_capability"})
_SHOWN_VARIANTS = 8
_SHOWN_CHARACTERS = 120


class Use(StrEnum):
    """What an image is wanted for: to go on with its processes, or only for the data in it."""

    RESTORE = "restore"
    TENSORS = "tensors"


class Verdict(StrEnum):
    """How the two values of a rule compare."""

    FITS = "fits"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


class Origin(StrEnum):
    """Where a rule comes from: the image states it, or it follows from what is recorded."""

    REQUIRED = "required"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, compared. `rule` is its name, that of the fact; `source` is what the image has.

    `target` is what the machine has, or None. `members` are those that it comes from; none if it
    is the image's own. An overridden rule refuses no machine whatever its verdict.
    """

    rule: str
    op: Op
    source: str
    target: str | None
    verdict: Verdict
    origin: Origin
    members: tuple[str, ...] = ()
    overridden: bool = False

    @property
    def refuses(self) -> bool:
        """Whether the machine must not use the image."""
        return self.verdict is Verdict.DIFFERS and not self.overridden

    @property
    def missing(self) -> tuple[str, ...]:
        """Of a list that the machine does not have whole, what it lacks, ascending."""
        if self.op is not Op.SUBSET or self.target is None:
            return ()
        lacking = words(self.rule, self.source) - words(self.rule, self.target)
        return tuple(sorted(lacking.elements()))

    def __str__(self) -> str:
        told = (
            f"{self.rule}: the image wants {self.op} {_short(self.source)}, this machine has"
            f" {_short(self.target or '')}"
        )
        return told + (f" and lacks {_short(','.join(self.missing))}" if self.missing else "")


def _short(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}...")


def checks_of(
    image: Image,
    facts: Mapping[str, str],
    *,
    when: Sequence[Rule] = (),
    members: Sequence[Member] | None = None,
    override: Collection[str] = (),
    use: Use = Use.RESTORE,
) -> tuple[Check, ...]:
    """Every rule of an image, ascending by name, against the facts of a machine.

    `when` are further rules, of a variant. Of `members` only, if given, is looked at what is
    recorded. A stated rule takes the place of a recorded one about the same fact.
    """
    stated = {*image.compat, *when}
    named = {rule.fact for rule in stated}
    found = _stated(stated, facts, override)
    for (fact, source), names in _recorded(image.members if members is None else members).items():
        if fact not in named and (use is Use.RESTORE or fact in _OF_TENSORS):
            op = RECORDED[fact]
            found.append(_check(fact, op, source, facts, Origin.RECORDED, tuple(names), override))
    return tuple(sorted(found, key=lambda check: (check.rule, check.op, check.source)))


def _stated(
    rules: Iterable[Rule], facts: Mapping[str, str], override: Collection[str]
) -> list[Check]:
    return [
        _check(rule.fact, rule.op, rule.value, facts, Origin.REQUIRED, (), override)
        for rule in sorted(rules)
    ]


def _recorded(members: Iterable[Member]) -> dict[tuple[str, str], list[str]]:
    """Names of members by fact and value, of the facts that are compared."""
    found: dict[tuple[str, str], list[str]] = {}
    for member in members:
        for fact, value in member.provenance:
            if fact in RECORDED:
                found.setdefault((fact, value), []).append(member.name)
    return found


def _check(
    fact: str,
    op: Op,
    source: str,
    facts: Mapping[str, str],
    origin: Origin,
    members: tuple[str, ...],
    override: Collection[str],
) -> Check:
    target = facts.get(fact)
    verdict = Verdict.UNKNOWN
    if target is not None:
        met = meets(op, fact, source, target)
        if met is not None:
            verdict = Verdict.FITS if met else Verdict.DIFFERS
    return Check(fact, op, source, target, verdict, origin, members, fact in override)


def check_overrides(
    override: Iterable[str], images: Iterable[Image], whens: Iterable[Rule]
) -> None:
    """Raise InvalidInput for the name of a rule that there can't be: it would be a slip."""
    stated = {rule.fact for image in images for rule in image.compat} | {r.fact for r in whens}
    for name in override:
        if name not in stated and name not in RECORDED:
            raise InvalidInput(
                f"there is no rule {name!r} to override; there are"
                f" {', '.join(sorted(stated | RECORDED.keys()))}"
            )


@dataclass(frozen=True, slots=True)
class Weighed:
    """One of the images of variants, and its rules on a machine.

    `image` is None if it is not there; if the rules of the variant refuse the machine already, its
    own were not looked at.
    """

    variant: Variant
    image: Image | None
    checks: tuple[Check, ...]

    @property
    def refusing(self) -> tuple[Check, ...]:
        """The rules that refuse the machine."""
        return tuple(check for check in self.checks if check.refuses)


def weigh(
    variants: Variants,
    images: Mapping[Digest, Image],
    facts: Mapping[str, str],
    *,
    override: Collection[str] = (),
    use: Use = Use.RESTORE,
) -> Iterator[Weighed]:
    """Each of the variants in turn. Stop at the first that nothing refuses: it is the one.

    Raises NotFound if an image whose variant's rules hold is not in `images`.
    """
    for variant in variants.images:
        image = images.get(variant.digest)
        checks = tuple(_stated(variant.when, facts, override))
        if not any(check.refuses for check in checks):
            if image is None:
                raise NotFound(f"image {variant.digest}, which variants name, is not there")
            checks = checks_of(image, facts, when=variant.when, override=override, use=use)
        yield Weighed(variant, image, checks)


def choose(
    variants: Variants,
    images: Mapping[Digest, Image],
    facts: Mapping[str, str],
    *,
    override: Collection[str] = (),
) -> Digest:
    """The first image whose own rules and whose variant's rules refuse nothing.

    Raises NotFound as `weigh` does, and DoesNotFit naming a rule of each image if none fits.
    """
    reasons = []
    for weighed in weigh(variants, images, facts, override=override):
        if not weighed.refusing:
            return weighed.variant.digest
        check = weighed.refusing[0]
        reasons.append(
            f"{weighed.variant.digest.short} wants {check.rule} {check.op} {_short(check.source)},"
            f" here it is {_short(check.target or '')}"
        )
    more = len(reasons) - _SHOWN_VARIANTS
    told = "; ".join(reasons[:_SHOWN_VARIANTS]) + (f"; and {more} more" if more > 0 else "")
    raise DoesNotFit(
        f"none of the variants fits this machine (name one by its digest to have it all the same):"
        f" {told}"
    )
