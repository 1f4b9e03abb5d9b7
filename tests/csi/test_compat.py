"""What refuses a node: rules that an image states, and what was recorded of its members."""

from __future__ import annotations

from csi.compat import Mismatch, facts_of_node, judge_by
from imgfmt.digest import digest_of
from imgfmt.image import Image, Member, pairs
from imgfmt.rules import Rule

TREE = digest_of(b"tree")
ARCH = pairs({"cpu.arch": "vax"})


def test_recorded_facts_of_the_members_that_are_mounted_are_compared() -> None:
    first, second = Member("a", TREE, provenance=ARCH), Member("b", TREE)
    image = Image((first, second), (), ())
    judge = judge_by(lambda: {"cpu.arch": "x86_64"})
    assert judge(image, (first,)) == [Mismatch("cpu.arch", "equal 'vax'", "'x86_64'")]
    assert judge(image, (second,)) == []


def test_what_is_not_known_never_refuses() -> None:
    image = Image((Member("a", TREE, provenance=ARCH),), (Rule.parse("gpu.count>=8"),), ())
    assert judge_by(lambda: {})(image, image.members) == []


def test_the_node_is_looked_at_anew_each_time() -> None:
    found = [{"gpu.driver_version": "550.1"}, {"gpu.driver_version": "570.1"}]
    image = Image((Member("a", TREE),), (Rule.parse("gpu.driver_version>=560"),), ())
    judge = judge_by(lambda: found.pop(0))
    assert [bool(judge(image, image.members)) for _ in range(2)] == [True, False]


def test_limits_of_the_container_of_the_driver_are_none_of_a_pods() -> None:
    assert "cpu.arch" in facts_of_node()
    assert "container.memory_limit" not in facts_of_node()
