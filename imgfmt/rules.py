"""Rules (SPEC.md section 5.2): what an image asks of the machine that it is restored on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from imgfmt.errors import InvalidInput
from imgfmt.facts import canonical, magnitude, words
from imgfmt.wire import Fields, Value

MAX_RULES = 256

_NUMBERS = re.compile(r"[0-9]{1,18}(?:\.[0-9]{1,18})*")
_RULE = re.compile(r"\s*([^\s=<>~]+)\s*(>=|~=|=)\s*([^\s=](?:.*\S)?)\s*", re.DOTALL)


class Op(StrEnum):
    """How a rule compares what it wants with the fact."""

    EQUAL = "equal"
    AT_LEAST = "at-least"
    SUBSET = "subset"


_SIGNS = {"=": Op.EQUAL, ">=": Op.AT_LEAST, "~=": Op.SUBSET}


@dataclass(frozen=True, slots=True, order=True)
class Rule:
    """What an image asks of a machine.

    `equal`: the fact is `value`. `at-least`: the fact, dotted numbers, is `value` or more, part by
    part, missing parts being 0. `subset`: every comma-separated word of `value` is one of the fact,
    as often. Spellings of the same thing are the same (`imgfmt.facts`).
    """

    fact: str
    op: Op
    value: str

    def __post_init__(self) -> None:
        if not self.fact:
            raise InvalidInput("a rule names no fact")
        if self.op is Op.AT_LEAST and not _NUMBERS.fullmatch(self.value):
            raise InvalidInput(f"rule {self} wants something that is not dotted numbers")

    def __str__(self) -> str:
        sign = next(sign for sign, op in _SIGNS.items() if op is self.op)
        return f"{self.fact}{sign}{self.value}"

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `fact=value`, `fact>=value` or `fact~=word,word` (subset)."""
        if not (found := _RULE.fullmatch(text)):
            raise InvalidInput(f"{text!r} is not a rule: use fact=value, fact>=1.2 or fact~=a,b")
        return cls(found[1], _SIGNS[found[2]], found[3])

    def holds(self, facts: Mapping[str, str]) -> bool:
        """Whether the machine with these facts is fit. What is not known is no obstacle."""
        found = facts.get(self.fact)
        return found is None or meets(self.op, self.fact, self.value, found) is not False


def meets(op: Op, fact: str, wanted: str, found: str) -> bool | None:
    """Whether a fact that is `found` is as `wanted`; None if the two can't be compared."""
    match op:
        case Op.EQUAL:
            forms = canonical(fact, wanted), canonical(fact, found)
            return None if None in forms else forms[0] == forms[1]
        case Op.AT_LEAST:
            least, amount = magnitude(fact, wanted), magnitude(fact, found)
            return None if least is None or amount is None else amount >= least
        case Op.SUBSET:
            return words(fact, wanted) <= words(fact, found)
        case _:
            assert_never(op)


def failing(rules: Iterable[Rule], facts: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules that do not hold."""
    return tuple(rule for rule in rules if not rule.holds(facts))


def encode_rules(rules: Iterable[Rule]) -> list[Value]:
    """What a record holds for these rules."""
    return [[rule.fact, rule.op.value, rule.value] for rule in rules]


def decode_rules(fields: Fields, key: str) -> tuple[Rule, ...]:
    """The inverse of `encode_rules`. Raises InvalidImage, or InvalidInput for an invalid rule."""
    return tuple(_rule(item, fields) for item in fields.array(key, MAX_RULES))


def _rule(item: Value, fields: Fields) -> Rule:
    if not isinstance(item, list) or len(item) != 3 or not all(isinstance(x, str) for x in item):
        fields.fail("a rule is not three strings")
    fact, op, value = item
    if op not in list(Op):
        fields.fail(f"a rule compares by {op[:40]!r}, which is not known")
    return Rule(fact, Op(op), value)
