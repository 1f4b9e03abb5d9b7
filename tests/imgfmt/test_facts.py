"""Facts: spellings of one thing are one thing, and what is more is more."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.facts import canonical, joined, magnitude, words

SHA = "sha256:" + "0a" * 32
PARTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=5)
VERSION_FACTS = ("criu.version", "engine.version", "gpu.cuda_version", "gpu.driver_version")


@pytest.mark.parametrize(
    ("fact", "one", "other"),
    [
        ("cpu.arch", "amd64", "x86_64"),
        ("cpu.arch", "arm64", "AArch64 "),
        ("cpu.arch", "x64", "x86-64"),
        ("cpu.vendor", "GenuineIntel", "intel"),
        ("gpu.driver_version", "560.35.03", "560.35.3"),
        ("gpu.driver_version", "580.65", "580.65.0"),
        ("engine.version", "v0.20.1", "0.20.1"),
        ("gpu.products", "NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
        ("gpu.products", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("gpu.products", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3"),
        ("gpu.products", "NVIDIA H200,NVIDIA B200", "B200, H200"),
        ("gpu.mig_profiles", "MIG 1g.10gb", "1g.10gb"),
        ("gpu.compute_capability", "9.0", "9"),
        ("container.image_id", f"docker-pullable://r.example/a/b@{SHA}", SHA),
        ("container.image_id", f"containerd://{SHA.upper()}", SHA),
        ("container.memory_limit", "1Gi", "1024Mi"),
        ("container.memory_limit", "1073741824", "1Gi"),
        ("container.cpu_limit", "500m", "0.5"),
    ],
)
def test_spellings_of_one_thing_are_equal(fact: str, one: str, other: str) -> None:
    form = canonical(fact, one)
    assert form is not None
    assert form == canonical(fact, other)


@pytest.mark.parametrize(
    ("fact", "one", "other"),
    [
        ("cpu.arch", "x86_64", "aarch64"),
        ("gpu.driver_version", "560.35.03", "560.35.30"),
        ("gpu.products", "NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL"),
        ("gpu.products", "NVIDIA H200,NVIDIA H200", "NVIDIA H200"),
        ("engine.version", "0.20.1", "0.20.1rc1"),
        ("container.image_id", SHA, "sha256:" + "0b" * 32),
        ("container.memory_limit", "1G", "1Gi"),
        ("os", "debian-12", "Debian-12"),
        ("anything", "1.0", "1"),
    ],
)
def test_different_things_are_not_equal(fact: str, one: str, other: str) -> None:
    assert canonical(fact, one) != canonical(fact, other)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("container.image_id", "registry.example/llm:1"),
        ("container.image_id", "sha256:00ff"),
        ("container.memory_limit", "much"),
        ("container.memory_limit", "1Zi"),
    ],
)
def test_what_can_not_be_compared_has_no_form(fact: str, value: str) -> None:
    assert canonical(fact, value) is None


@st.composite
def pairs_of_versions(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two versions, of which one may begin as the other does."""
    one, more = draw(PARTS), draw(st.lists(st.integers(0, 1), max_size=2))
    n_same = draw(st.integers(0, len(one)))
    return one, [*one[:n_same], *more] or [0]


@given(pairs_of_versions())
def test_versions_compare_part_by_part_with_missing_parts_as_zero(
    both: tuple[list[int], list[int]],
) -> None:
    one, other = both
    n_parts = max(len(one), len(other))
    padded = [parts + [0] * (n_parts - len(parts)) for parts in (one, other)]
    dotted = [".".join(map(str, parts)) for parts in (one, other)]
    a, b = (magnitude("gpu.driver_version", text) for text in dotted)
    assert a is not None
    assert b is not None
    assert (a >= b, a == b) == (padded[0] >= padded[1], padded[0] == padded[1])
    same = {canonical("gpu.driver_version", text) for text in dotted}
    assert (len(same) == 1) == (padded[0] == padded[1])


@given(PARTS, st.lists(st.integers(0, 3), min_size=5, max_size=5), st.sampled_from(VERSION_FACTS))
def test_zeros_before_a_part_and_a_v_before_all_change_nothing(
    parts: list[int], n_zeros: list[int], fact: str
) -> None:
    plain = ".".join(map(str, parts))
    padded = "v" + ".".join("0" * n + str(part) for n, part in zip(n_zeros, parts, strict=False))
    assert canonical(fact, plain) == canonical(fact, padded)
    assert magnitude(fact, plain) == magnitude(fact, padded)


@given(PARTS, st.from_regex(r"[-+ ~a-z][ -~]{0,20}", fullmatch=True))
def test_what_follows_the_numbers_does_not_count(parts: list[int], rest: str) -> None:
    plain = ".".join(map(str, parts))
    assert magnitude("kernel.release", plain + rest) == magnitude("kernel.release", plain)


@given(
    st.text(max_size=30) | st.text("vV1.-_ nidamgtesl,", max_size=12),
    st.sampled_from([*VERSION_FACTS, "gpu.products", "cpu.arch", "x"]),
)
def test_no_text_fails_and_a_form_is_its_own_form(text: str, fact: str) -> None:
    form = canonical(fact, text)
    assert form is not None
    assert canonical(fact, form) == form
    magnitude(fact, text)
    assert words(fact, text) <= words(fact, f"{text},{text}")


@given(st.fractions(0, 10**6, max_denominator=1000))
def test_quantities_are_numbers(amount: Fraction) -> None:
    thousandths = int(amount * 1000)
    assert magnitude("container.cpu_limit", f"{thousandths}m") == (Fraction(thousandths, 1000),)


def test_no_limit_is_more_than_any_limit() -> None:
    unlimited, large = (magnitude("container.memory_limit", text) for text in ("max", "900Ei"))
    assert unlimited is not None
    assert large is not None
    assert unlimited > large


@pytest.mark.parametrize("text", ["9" * 19, "1." + "9" * 19, "1.2." + "9" * 5000, "", "v", "-1"])
def test_what_is_no_number_or_too_long_is_no_amount(text: str) -> None:
    assert magnitude("gpu.driver_version", text) is None


def test_a_list_is_written_in_order() -> None:
    assert joined(["b", "a", "b"]) == "a,b,b"
