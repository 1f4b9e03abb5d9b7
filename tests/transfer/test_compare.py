"""What two images share is told exactly, however the digests lie."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt.chunking import Profile
from imgfmt.digest import digest_of
from imgfmt.image import Image, Member
from imgfmt.tree import Entry, EntryType, FileContent, Tree, build_tree
from transfer.compare import Change, _compare_trees, distinct, grouped, shared_bytes

PAGE = 4096

digests = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2)).map(
        lambda ends: bytes([ends[0]]) * 8 + bytes(16) + bytes([ends[1]]) * 8
    ),
    max_size=30,
)


def rows(names: Sequence[bytes]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(names), dtype=np.uint8).reshape(-1, 32)


def tree_of(files: dict[bytes, list[bytes]], **changed: int) -> Tree:
    """A tree of files whose chunks are of one page each and have these names."""
    values = {"mode": 0o644, "uid": 0, "gid": 0, "mtime_s": 5, "mtime_ns": 0, **changed}
    entries = [Entry(0, b"", EntryType.DIRECTORY, 0o755, 0, 0, 5, 0, 0, 0)]
    contents = {}
    for index, (name, chunks) in enumerate(sorted(files.items()), 1):
        size = PAGE * len(chunks)
        entries.append(
            Entry(
                0, name, EntryType.FILE, values["mode"], values["uid"], values["gid"],
                values["mtime_s"], values["mtime_ns"], size, index,
            )
        )  # fmt: skip
        if chunks:
            contents[index] = FileContent(
                rows(chunks),
                np.ones(len(chunks), dtype=np.uint16),
                np.array([len(chunks)], dtype=np.uint32),
                np.array([0], dtype=np.uint64),
            )
    return Tree(b"".join(build_tree(entries, contents, Profile()).pieces), "tree")


@given(digests)
def test_equal_digests_are_grouped_also_where_their_beginnings_are_equal(
    names: list[bytes],
) -> None:
    order, first = grouped(rows(names))
    ends = [*first[1:].tolist(), len(names)]
    groups = [{names[i] for i in order[a:b]} for a, b in zip(first, ends, strict=False)]
    assert all(len(group) == 1 for group in groups)
    assert len(groups) == len(set(names))
    assert sorted(order.tolist()) == list(range(len(names)))
    n_distinct, n_bytes = distinct(rows(names), np.full(len(names), 7, dtype=np.uint32))
    assert (n_distinct, n_bytes) == (len(set(names)), 7 * len(set(names)))


@given(digests, digests)
def test_shared_bytes_are_those_of_the_chunks_that_both_have(
    one: list[bytes], other: list[bytes]
) -> None:
    found = shared_bytes([tree_of({b"a": one})], [tree_of({b"b": other})])
    shared = len(set(one) & set(other))
    assert found == (
        shared * PAGE,
        (len(set(one)) - shared) * PAGE,
        (len(set(other)) - shared) * PAGE,
    )


def test_entries_are_added_removed_changed_in_content_or_in_metadata() -> None:
    a, b, c = (digest_of(bytes([n])).raw for n in range(3))
    before = tree_of({b"same": [a], b"gone": [a], b"other": [a, b]})
    after = tree_of({b"same": [a], b"new": [c], b"other": [b, a]})
    changes, unchanged = _compare_trees("m", before, after)
    assert {change.path: change.change for change in changes} == {
        b"gone": Change.REMOVED,
        b"new": Change.ADDED,
        b"other": Change.CONTENT,
    }
    assert unchanged == 2
    for name in ("mode", "uid", "gid", "mtime_s", "mtime_ns"):
        changes, _ = _compare_trees("m", tree_of({b"f": [a]}), tree_of({b"f": [a]}, **{name: 1}))
        assert [change.change for change in changes] == [Change.METADATA]


def test_a_member_that_only_one_image_has_is_all_added_or_removed() -> None:
    tree = tree_of({b"f": []})
    for one, other, change in ((None, tree, Change.ADDED), (tree, None, Change.REMOVED)):
        changes, _ = _compare_trees("m", one, other)
        assert [(c.path, c.change) for c in changes] == [(b"", change), (b"f", change)]


def test_members_are_matched_by_name_and_single_ones_whatever_their_names() -> None:
    from transfer.compare import _matched

    def image(*names: str) -> Image:
        return Image(tuple(Member(name, digest_of(b"")) for name in names))

    def pairs(one: Image, other: Image) -> list[tuple[str, bool, bool]]:
        return [(n, bool(a), bool(b)) for n, a, b in _matched(one.members, other.members)]

    assert pairs(image("x"), image("y")) == [("y", True, True)]
    assert pairs(image("a", "b"), image("b", "c")) == [
        ("a", True, False),
        ("b", True, True),
        ("c", False, True),
    ]


@pytest.mark.slow
def test_three_million_chunks_are_grouped_in_seconds() -> None:
    names = np.random.default_rng(0).integers(0, 256, (3_000_000, 32), dtype=np.uint8)
    names[1_500_000:] = names[:1_500_000]
    begun = time.monotonic()
    _, first = grouped(names)
    assert len(first) == 1_500_000
    assert time.monotonic() - begun < 60
