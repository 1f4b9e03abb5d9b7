"""Rules of an image against a machine: verdicts, overrides, and the choice among variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from imgfmt.compat import (
    RECORDED,
    Check,
    Origin,
    Use,
    Verdict,
    check_overrides,
    checks_of,
    choose,
    weigh,
)
from imgfmt.digest import Digest
from imgfmt.errors import DoesNotFit, ErrorKind, InvalidInput, NotFound
from imgfmt.image import Image, Member, Variant, Variants, pairs
from imgfmt.rules import Rule

TREE = Digest(bytes(range(32)))
SNAPSHOT = {
    "container.memory_limit": "128Gi",
    "cpu.arch": "amd64",
    "cpu.features": "avx2,sse2",
    "cpu.model_name": "Some Processor",
    "gpu.count": "2",
    "gpu.driver_version": "580.65.06",
    "gpu.products": "NVIDIA H200,NVIDIA H200",
    "kernel.release": "6.8.0-45-generic",
}
MACHINE = {
    "cpu.arch": "x86_64",
    "cpu.features": "avx,avx2,sse2",
    "gpu.count": "8",
    "gpu.driver_version": "580.65.6",
    "gpu.products": ",".join(["NVIDIA-H200"] * 8),
    "kernel.release": "6.8.0-45-generic",
}


def digest(n: int) -> Digest:
    return Digest(bytes([n] * 32))


def make_image(*rules: str) -> Image:
    return Image((Member("rank-0", TREE),), tuple(sorted(map(Rule.parse, rules))))


def recorded(facts: Mapping[str, str], *rules: str) -> Image:
    """An image that has recorded these facts, and states these rules."""
    member = Member("rank-0", TREE, provenance=pairs(facts))
    return Image((member,), tuple(sorted(map(Rule.parse, rules))))


def verdicts(image: Image, facts: Mapping[str, str]) -> dict[str, Verdict]:
    return {check.rule: check.verdict for check in checks_of(image, facts)}


class Asked(Mapping[str, str]):
    """A machine that notes which facts it is asked for."""

    def __init__(self, facts: Mapping[str, str]) -> None:
        self.facts = facts
        self.asked: set[str] = set()

    def __getitem__(self, fact: str) -> str:
        self.asked.add(fact)
        return self.facts[fact]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all facts are asked for")

    def __len__(self) -> int:
        raise AssertionError("all facts are asked for")


def test_a_machine_like_that_of_the_snapshot_fits() -> None:
    found = verdicts(recorded(SNAPSHOT), MACHINE)
    assert found.pop("container.memory_limit") is Verdict.UNKNOWN
    assert set(found.values()) == {Verdict.FITS}
    assert "cpu.model_name" not in found


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("container.memory_limit", "64Gi"),
        ("cpu.arch", "aarch64"),
        ("cpu.features", "avx,sse2"),
        ("gpu.count", "1"),
        ("gpu.driver_version", "580.65.60"),
        ("gpu.products", "NVIDIA H200,NVIDIA B200"),
        ("kernel.release", "6.8.0-46-generic"),
    ],
)
def test_each_fact_that_is_not_matched_refuses(fact: str, value: str) -> None:
    found = checks_of(recorded(SNAPSHOT), {**MACHINE, fact: value})
    (differing,) = [check for check in found if check.refuses]
    assert differing == Check(
        fact, RECORDED[fact], SNAPSHOT[fact], value, Verdict.DIFFERS, Origin.RECORDED, ("rank-0",)
    )
    assert SNAPSHOT[fact] in str(differing)
    assert value in str(differing)


@pytest.mark.parametrize("fact", sorted(RECORDED))
def test_what_is_unknown_on_one_side_is_no_obstacle(fact: str) -> None:
    found = checks_of(recorded({fact: "1"}), {})
    assert [(check.verdict, check.target) for check in found] == [(Verdict.UNKNOWN, None)]
    assert checks_of(recorded({}), {fact: "1"}) == ()


def test_what_can_not_be_compared_is_unknown() -> None:
    image = recorded({"container.image_id": "name:tag", "gpu.count": "some"})
    found = verdicts(image, {"container.image_id": "name:other", "gpu.count": "2"})
    assert set(found.values()) == {Verdict.UNKNOWN}


def test_an_overridden_rule_keeps_its_verdict_and_refuses_nothing() -> None:
    image = recorded(SNAPSHOT, "os=debian-12")
    facts = {**MACHINE, "gpu.count": "1", "os": "debian-13"}
    found = checks_of(image, facts, override=("gpu.count", "os"))
    changed = [check for check in found if check.overridden]
    assert [check.rule for check in changed] == ["gpu.count", "os"]
    assert {check.verdict for check in changed} == {Verdict.DIFFERS}
    assert not any(check.refuses for check in found)


def test_a_stated_rule_takes_the_place_of_a_recorded_one() -> None:
    image = recorded(SNAPSHOT, "gpu.driver_version>=570")
    (found,) = [c for c in checks_of(image, MACHINE) if c.rule == "gpu.driver_version"]
    assert (found.origin, found.source, found.verdict) == (
        Origin.REQUIRED, "570", Verdict.FITS,
    )  # fmt: skip
    newer = {**MACHINE, "gpu.driver_version": "590.1"}
    assert verdicts(image, newer)["gpu.driver_version"] is Verdict.FITS
    when = (Rule.parse("kernel.release>=6.1"),)
    (kernel,) = [c for c in checks_of(image, newer, when=when) if c.rule == "kernel.release"]
    assert (kernel.origin, kernel.source) == (Origin.REQUIRED, "6.1")


def test_what_a_machine_lacks_of_a_list_is_named() -> None:
    image = recorded({"cpu.features": "sse2,avx2,avx512f", "gpu.products": "NVIDIA L4,NVIDIA L4"})
    cpu, gpus = checks_of(image, {"cpu.features": "avx2", "gpu.products": "L4"})
    assert (cpu.missing, gpus.missing) == (("avx512f", "sse2"), ("l4",))
    assert "lacks 'avx512f,sse2'" in str(cpu)
    (fits,) = checks_of(recorded({"cpu.features": "avx2"}), {"cpu.features": "avx2"})
    assert fits.missing == ()


def test_a_value_of_any_length_is_told_in_a_line() -> None:
    (check,) = checks_of(recorded({"model": "m" * 10_000}), {"model": "n\n" * 10_000})
    assert len(str(check)) < 600
    assert "\n" not in str(check)


def test_members_that_ran_on_different_machines_each_have_a_rule() -> None:
    members = tuple(
        Member(name, TREE, provenance=pairs({"cpu.arch": arch, "kernel.release": "6.1"}))
        for name, arch in (("a", "x86_64"), ("b", "aarch64"), ("c", "x86_64"))
    )
    image = Image(members)
    found = checks_of(image, {"cpu.arch": "x86_64"})
    assert [(c.rule, c.source, c.members, c.refuses) for c in found] == [
        ("cpu.arch", "aarch64", ("b",), True),
        ("cpu.arch", "x86_64", ("a", "c"), False),
        ("kernel.release", "6.1", ("a", "b", "c"), False),
    ]
    only = checks_of(image, {"cpu.arch": "x86_64"}, members=[members[0]])
    assert [(c.rule, c.members) for c in only] == [("cpu.arch", ("a",)), ("kernel.release", ("a",))]


def test_for_tensors_only_what_they_depend_on_counts() -> None:
    image = recorded({**SNAPSHOT, "gpu.compute_capability": "9.0"}, "pool=fast")
    found = checks_of(image, {}, use=Use.TENSORS)
    assert [check.rule for check in found] == ["cpu.arch", "gpu.compute_capability", "pool"]


def test_only_facts_that_rules_are_about_are_asked_for() -> None:
    facts = Asked(MACHINE)
    checks_of(recorded({"cpu.arch": "amd64", "os": "debian-12"}, "pool=fast"), facts)
    assert facts.asked == {"cpu.arch", "pool"}


def test_an_override_of_a_rule_that_there_can_not_be_is_refused() -> None:
    image = make_image("pool=fast")
    check_overrides(["pool", "gpu.count", "rack"], [image], [Rule.parse("rack=1")])
    with pytest.raises(InvalidInput, match=r"no rule 'gpu\.cuont' to override; .*gpu\.count"):
        check_overrides(["gpu.cuont"], [image], ())


def test_variants_are_chosen_by_what_is_recorded_too() -> None:
    known = {
        digest(1): recorded({"gpu.products": "NVIDIA B200"}),
        digest(2): recorded({"gpu.products": "NVIDIA H100 80GB HBM3", "kernel.release": "6.8"}),
    }
    variants = Variants((Variant(digest(1)), Variant(digest(2))))
    assert choose(variants, known, {"gpu.products": "NVIDIA B200"}) == digest(1)
    old = {"gpu.products": "NVIDIA H100 80GB HBM3", "kernel.release": "6.1"}
    with pytest.raises(DoesNotFit) as caught:
        choose(variants, known, old)
    assert caught.value.kind is ErrorKind.MISMATCH
    assert choose(variants, known, old, override=["kernel.release"]) == digest(2)


def test_weighing_goes_through_all_variants() -> None:
    known = {digest(1): make_image("a=1"), digest(2): make_image()}
    variants = Variants((Variant(digest(1)), Variant(digest(2))))
    weighed = list(weigh(variants, known, {"a": "2"}))
    assert [[c.rule for c in one.refusing] for one in weighed] == [["a"], []]
    assert [one.image for one in weighed] == list(known.values())


def test_the_first_variant_that_fits_is_chosen() -> None:
    known = {
        digest(1): make_image("gpu=H100"),
        digest(2): make_image("driver>=550"),
        digest(3): make_image(),
    }
    when = (Rule.parse("pool=fast"),)
    variants = Variants((Variant(digest(1)), Variant(digest(2), when), Variant(digest(3))))

    def chosen(**facts: str) -> Digest:
        return choose(variants, known, facts)

    assert chosen(gpu="H100") == digest(1)
    assert chosen() == digest(1)
    assert chosen(gpu="B200", pool="fast", driver="560.1") == digest(2)
    assert chosen(gpu="B200", pool="slow", driver="560.1") == digest(3)
    assert chosen(gpu="B200", pool="fast", driver="540.9") == digest(3)


def test_where_no_variant_fits_each_is_named_with_both_values() -> None:
    known = {digest(1): make_image("gpu=H100")}
    variants = Variants((Variant(digest(1)), Variant(digest(2), (Rule.parse("driver>=550"),))))
    with pytest.raises(DoesNotFit) as caught:
        choose(variants, known, {"gpu": "B200", "driver": "535.1"})
    assert str(caught.value) == (
        "none of the variants fits this machine (name one by its digest to have it all the same): "
        f"{digest(1).short} wants gpu equal 'H100', here it is 'B200'; "
        f"{digest(2).short} wants driver at-least '550', here it is '535.1'"
    )


def test_of_many_variants_only_some_are_named() -> None:
    variant = Variant(TREE, (Rule.parse("a=1"),))
    for n_variants, end in ((8, "here it is '2'"), (11, "; and 3 more")):
        with pytest.raises(DoesNotFit, match=f"{end}$"):
            choose(Variants((variant,) * n_variants), {}, {"a": "2"})


def test_an_image_that_variants_name_and_nobody_has_is_not_found() -> None:
    with pytest.raises(NotFound, match=str(TREE)):
        choose(Variants((Variant(TREE),)), {}, {})
