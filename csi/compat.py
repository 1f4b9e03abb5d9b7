"""Whether an image is fit for this node: the seam between the driver and who knows machines.

What is not known never refuses an image: neither a fact of this node, nor a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from imgfmt.compat import checks_of
from imgfmt.image import Image, Member
from restore.host_facts import MachineFacts

FactsOf = Callable[[], Mapping[str, str]]
"""Looks at the node anew: its GPU driver may be another one since the last volume."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A rule of an image that does not hold on this node."""

    check: str
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"{self.check}: it wants {self.wanted}, this node has {self.found}"


class Judge(Protocol):
    """Says which rules of an image do not hold here. May block for seconds."""

    def __call__(self, image: Image, members: Sequence[Member]) -> Sequence[Mismatch]:
        """All that refuse this node, by name; none if these members may be used."""


def facts_of_node() -> Mapping[str, str]:
    """What is known of this node. The limits of the driver's own container are none of a Pod's."""
    return MachineFacts(own_container=False)


def judge_by(facts_of: FactsOf) -> Judge:
    """A judge that compares what an image states and recorded with the facts of the node."""

    def judge(image: Image, members: Sequence[Member]) -> Sequence[Mismatch]:
        return [
            Mismatch(check.rule, f"{check.op} {check.source!r}", repr(check.target))
            for check in checks_of(image, facts_of(), members=members)
            if check.refuses
        ]

    return judge
