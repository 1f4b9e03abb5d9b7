"""Whether an image is for this machine, which one of variants is, and what follows if it is not.

The rules themselves are `imgfmt.compat`, which a pull uses too; facts of this machine are
`restore.host_facts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from imgfmt.compat import Check, Use, Weighed, check_overrides, checks_of, choose, weigh
from imgfmt.digest import Digest
from imgfmt.errors import DoesNotFit, InvalidInput, NotFound
from imgfmt.image import Image, Member, Variants
from imgfmt.rules import Rule
from transfer.catalog import Catalog
from transfer.pull import choose_members, images_of
from transfer.threads import Threads

_MANY = 8
_WAYS_OUT = (
    "use a machine that fits, override the rules that may differ (--override RULE), or go on all"
    " the same (--on-mismatch warn)"
)


class OnMismatch(StrEnum):
    """What to do with an image that is not for this machine."""

    FAIL = "fail"
    WARN = "warn"
    IGNORE = "ignore"

    @classmethod
    def parse(cls, text: str) -> OnMismatch:
        """Read one. Raises InvalidInput."""
        if text not in list(cls):
            raise InvalidInput(f"on-mismatch {text!r} is not one of {', '.join(cls)}")
        return cls(text)


@dataclass(frozen=True, slots=True)
class Rejected:
    """An image of variants that is not for this machine, and the rules that say so."""

    digest: Digest
    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class CompatReport:
    """An image against this machine. `checks` are all its rules, ascending by name.

    Of variants, `digest` is the image that was chosen, `variant` its place from 1 and `n_variants`
    how many there are; `rejected` are those that were preferred and do not fit. If none fits, they
    are all of them and `digest` is the most preferred.
    """

    digest: Digest
    checks: tuple[Check, ...]
    variant: int | None = None
    n_variants: int = 0
    rejected: tuple[Rejected, ...] = ()

    @property
    def refusing(self) -> tuple[Check, ...]:
        """The rules that differ and are not overridden."""
        return tuple(check for check in self.checks if check.refuses)

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against using the image here. What is not known does not."""
        return not self.refusing and len(self.rejected) < max(1, self.n_variants)


async def check(
    catalog: Catalog,
    digest: Digest,
    facts: Mapping[str, str],
    *,
    member: str | None = None,
    override: Collection[str] = (),
) -> CompatReport:
    """Compare an image, or one member of it, with the machine that has `facts`; or choose one.

    The choice among variants is that of a pull. Raises NotFound, and InvalidInput for an override
    of a rule that there can't be.
    """
    found = await catalog.image(digest)
    images = {digest: found} if isinstance(found, Image) else await images_of(catalog, found)
    variants = () if isinstance(found, Image) else found.images
    whens = [rule for variant in variants for rule in variant.when]
    check_overrides(override, images.values(), whens)
    with Threads("facts", 1) as threads:
        if isinstance(found, Image):
            members = choose_members(found, digest, member)
            checks = await threads.run(checks_of, found, facts, members=members, override=override)
            return CompatReport(digest, checks)
        return await threads.run(_check_variants, found, images, facts, member, override)


def _check_variants(
    variants: Variants,
    images: Mapping[Digest, Image],
    facts: Mapping[str, str],
    member: str | None,
    override: Collection[str],
) -> CompatReport:
    rejected: list[Weighed] = []
    chosen: Weighed | None = None
    for weighed in weigh(variants, images, facts, override=override):
        if not weighed.refusing:
            chosen = weighed
            break
        rejected.append(weighed)
    shown = chosen or rejected[0]
    digest = shown.variant.digest
    if shown.image is None:
        raise NotFound(f"image {digest}, which variants name, is not there")
    members = choose_members(shown.image, digest, member)
    return CompatReport(
        digest,
        checks_of(shown.image, facts, when=shown.variant.when, members=members, override=override),
        len(rejected) + 1 if chosen is not None else 1,
        len(variants.images),
        tuple(Rejected(one.variant.digest, one.refusing) for one in rejected),
    )


@dataclass(frozen=True, slots=True)
class Picked:
    """The image to use, and the rules of the variant that it is."""

    digest: Digest
    image: Image
    when: tuple[Rule, ...] = ()


async def pick_image(
    catalog: Catalog,
    digest: Digest,
    facts: Mapping[str, str],
    *,
    override: Collection[str] = (),
    on_mismatch: OnMismatch = OnMismatch.FAIL,
    use: Use = Use.RESTORE,
) -> Picked:
    """The image itself, or of variants the one that a pull takes on the machine that has `facts`.

    If none fits, it is the first that fits for `use`, or unless the machine must fit, the most
    preferred. What is picked is still to be enforced. Raises DoesNotFit, NotFound, and InvalidInput
    for an override of a rule that there can't be.
    """
    found = await catalog.image(digest)
    if isinstance(found, Image):
        check_overrides(override, [found], ())
        return Picked(digest, found)
    images = await images_of(catalog, found)
    whens = [rule for variant in found.images for rule in variant.when]
    check_overrides(override, images.values(), whens)
    with Threads("facts", 1) as threads:
        chosen = await threads.run(_choose, found, images, facts, override, on_mismatch, use)
    if chosen not in images:
        raise NotFound(f"image {chosen}, which variants name, is not there")
    when = next(variant.when for variant in found.images if variant.digest == chosen)
    return Picked(chosen, images[chosen], when)


def _choose(
    variants: Variants,
    images: Mapping[Digest, Image],
    facts: Mapping[str, str],
    override: Collection[str],
    on_mismatch: OnMismatch,
    use: Use,
) -> Digest:
    try:
        return choose(variants, images, facts, override=override)
    except DoesNotFit as error:
        if use is not Use.RESTORE:
            for weighed in weigh(variants, images, facts, override=override, use=use):
                if not weighed.refusing:
                    return weighed.variant.digest
        if on_mismatch is OnMismatch.FAIL:
            raise DoesNotFit(f"{error}; {_WAYS_OUT}") from None
        return variants.images[0].digest


def enforce(
    image: Image,
    facts: Mapping[str, str],
    *,
    what: str,
    when: Sequence[Rule] = (),
    members: Sequence[Member] | None = None,
    override: Collection[str] = (),
    on_mismatch: OnMismatch = OnMismatch.FAIL,
    use: Use = Use.RESTORE,
) -> tuple[str, ...]:
    """Warnings about the rules of an image called `what` that differ here. May block for seconds.

    `when` are further rules, of a variant. Raises DoesNotFit, naming each rule, both values and the
    way around it, if the machine must fit. With IGNORE nothing is looked at.
    """
    if on_mismatch is OnMismatch.IGNORE:
        return ()
    checks = checks_of(image, facts, when=when, members=members, override=override, use=use)
    refusing = [found for found in checks if found.refuses]
    if not refusing:
        return ()
    shown = "; ".join(map(str, refusing[:_MANY]))
    if len(refusing) > _MANY:
        shown += f"; and {len(refusing) - _MANY} more"
    told = f"image {what} is not for this machine: {shown}"
    if on_mismatch is OnMismatch.WARN:
        return (told,)
    names = " ".join(f"--override {name}" for name in sorted({f.rule for f in refusing})[:_MANY])
    raise DoesNotFit(
        f"{told}; use a machine that fits, or override what may differ ({names}), or go on all the"
        " same (--on-mismatch warn)"
    )
