"""Rules: how they are written, and when they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.errors import InvalidInput
from imgfmt.rules import Op, Rule, failing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu=H100", Rule("gpu", Op.EQUAL, "H100")),
        ("gpu = NVIDIA H100 80GB ", Rule("gpu", Op.EQUAL, "NVIDIA H100 80GB")),
        ("driver.version>=550.54", Rule("driver.version", Op.AT_LEAST, "550.54")),
        ("cpu.flags~=avx2,amx", Rule("cpu.flags", Op.SUBSET, "avx2,amx")),
        ("a=b=c", Rule("a", Op.EQUAL, "b=c")),
    ],
)
def test_rules_are_read_as_users_write_them(text: str, expected: Rule) -> None:
    assert Rule.parse(text) == expected
    assert Rule.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "text", ["", "a", "=1", "a=", "a<=1", "a>1", "a==1", "a>=x", "a b=1", "~=a"]
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        Rule.parse(text)


@given(st.text(max_size=20))
def test_no_text_fails_in_another_way(text: str) -> None:
    try:
        rule = Rule.parse(text)
    except InvalidInput:
        return
    assert Rule.parse(str(rule)) == rule


@pytest.mark.parametrize("value", ["", ".", "1.", "1..2", "-1", "1.x", "\u0661", "1" * 19, "1\n"])
def test_at_least_wants_dotted_numbers(value: str) -> None:
    with pytest.raises(InvalidInput, match="not dotted numbers"):
        Rule("a", Op.AT_LEAST, value)


@pytest.mark.parametrize(
    ("rule", "fact", "holds"),
    [
        ("a=1", "1", True),
        ("a=1", "1.0", False),
        ("a=x", "X", False),
        ("a>=550.54", "550.54", True),
        ("a>=550.54", "550.54.15", True),
        ("a>=550.54", "550.100", True),
        ("a>=550.54", "550.6", False),
        ("a>=550.54", "550", False),
        ("a>=550.54", "1000", True),
        ("a>=1.0.0", "1", True),
        ("a>=1", "1.0", True),
        ("a>=0", "0", True),
        ("a>=1", "unknown", True),
        ("a>=1", "2-generic", True),
        ("a>=3", "2-generic", False),
        ("a>=1", "9" * 5000, True),
        ("a~=x,y", "z,y,x", True),
        ("a~=x, y", "y , x", True),
        ("a~=x,y", "x", False),
        ("a~=x,x", "x", False),
        ("a~=x,x", "x,y,x", True),
        ("a~=x", "xy", False),
        ("a~=x", "", False),
    ],
)
def test_a_rule_holds_as_its_op_says(rule: str, fact: str, holds: bool) -> None:
    assert Rule.parse(rule).holds({"a": fact}) is holds


def test_a_rule_about_an_unknown_fact_holds() -> None:
    for rule in ("a=1", "a>=1", "a~=1"):
        assert Rule.parse(rule).holds({"b": "2"})


def test_the_rules_that_fail_are_told() -> None:
    rules = [Rule.parse("a=1"), Rule.parse("b=1"), Rule.parse("c=1")]
    assert failing(rules, {"a": "1", "b": "2"}) == (rules[1],)
