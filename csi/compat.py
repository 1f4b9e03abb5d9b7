"""Whether an image is fit for this node: the seam between the driver and who knows machines.

What is not known never refuses an image: neither a fact of this node, nor a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from imgfmt.image import Image
from imgfmt.rules import failing


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A rule of an image that does not hold on this node."""

    check: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.check}: it wants {self.wanted}, this node has {self.found}"


class Judge(Protocol):
    """Says which rules of an image do not hold here. Must not block."""

    def __call__(self, image: Image) -> Sequence[Mismatch]:
        """All that refuse this node, the most telling first; none if it may be used."""


def judge_by(facts: Mapping[str, str]) -> Judge:
    """A judge that evaluates an image's own rules against these facts of the node."""

    def judge(image: Image) -> Sequence[Mismatch]:
        return [
            Mismatch(rule.fact, f"{rule.op} {rule.value!r}", repr(facts[rule.fact]))
            for rule in failing(image.compat, facts)
        ]

    return judge
