"""Trees: what is built is read back, and no table that breaks a rule of SPEC.md 5.1 is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imgfmt import tree as trees
from imgfmt import wire
from imgfmt.chunking import PAGE_BYTES_CHOICES, Profile
from imgfmt.digest import digest_of
from imgfmt.errors import InvalidImage, InvalidInput, Unsupported
from imgfmt.tree import Entry, EntryType, FileContent, Tree, build_tree
from tests.imgfmt.hostile import ALLOWED_EXTRA_BYTES, check_damage, joined, peak_bytes

PAGE = 4096
DIRECTORY, FILE, SYMLINK = EntryType.DIRECTORY, EntryType.FILE, EntryType.SYMLINK
Extents = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Case:
    """A tree before it is encoded. `extents`: for each file its chunks' pages, and hole pages."""

    entries: list[Entry]
    extents: dict[int, Extents]
    page_bytes: int


def content_of(index: int, extents: Extents) -> FileContent:
    chunks = [pages for chunks, _ in extents for pages in chunks]
    digests = [digest_of(b"%d %d" % (index, number)).raw for number in range(len(chunks))]
    return FileContent(
        np.frombuffer(b"".join(digests), "u1").reshape(-1, 32),
        np.array(chunks, "u2"),
        np.array([len(chunks) for chunks, _ in extents], "u4"),
        np.array([hole for _, hole in extents], "u8"),
    )


def build(case: Case) -> bytes:
    contents = {index: content_of(index, extents) for index, extents in case.extents.items()}
    return joined(build_tree(case.entries, contents, Profile(case.page_bytes)).pieces)


def read(raw: bytes) -> Tree:
    return Tree(raw, "tree 00")


NAMES = st.binary(min_size=1, max_size=8).filter(
    lambda name: not {0, ord("/")} & set(name) and name not in (b".", b"..")
)
XATTRS = st.dictionaries(
    NAMES.map(lambda name: b"user." + name)
    | st.sampled_from([b"security.capability", b"system.posix_acl_access"]),
    st.binary(max_size=20),
    max_size=3,
).map(lambda found: tuple(sorted(found.items())))


@st.composite
def extents_of(draw: st.DrawFn, max_pages: int) -> Extents:
    """The extents of a file: chunks and then a hole, the first without chunks, the last open."""
    pages = st.integers(1, max_pages)
    middle = st.tuples(st.lists(pages, min_size=1, max_size=4), st.integers(1, 2**40))
    found: Extents = draw(st.lists(middle, max_size=4))
    if draw(st.booleans()):
        found = [([], draw(st.integers(1, 100))), *found]
    if draw(st.booleans()) or not found:
        found = [*found, (draw(st.lists(pages, min_size=1, max_size=4)), 0)]
    return found


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_bytes = draw(st.sampled_from(PAGE_BYTES_CHOICES))
    root = Entry(0, b"", DIRECTORY, 0o755, 0, 0, 0, 0, 0, 0, xattrs=draw(XATTRS))
    entries, extents = [root], {}
    kinds = st.sampled_from([DIRECTORY, FILE, FILE, SYMLINK, None])  # None: another name of a file
    for parent, above in enumerate(entries):  # grows on the way
        if above.type is not DIRECTORY or len(entries) > 30:
            continue
        for name in sorted(draw(st.sets(NAMES, max_size=5))):
            kind, index = draw(kinds), len(entries)
            firsts = [i for i, e in enumerate(entries) if e.type is FILE and e.group == i]
            if kind is None and firsts:
                first = entries[draw(st.sampled_from(firsts))]
                same = replace(first, parent=parent, name=name, size_bytes=0, xattrs=())
                entries.append(same)
                continue
            kind = FILE if kind is None else kind
            target = draw(st.binary(min_size=1, max_size=9)).replace(b"\0", b"/")
            size_bytes = len(target) if kind is SYMLINK else 0
            if kind is FILE and draw(st.booleans()):
                extents[index] = draw(extents_of(2**20 // page_bytes))
                n_pages = sum(sum(chunks) + hole for chunks, hole in extents[index])
                size_bytes = n_pages * page_bytes - draw(st.integers(0, page_bytes - 1))
            entries.append(
                Entry(
                    parent, name, kind, draw(st.integers(0, 0o7777)),
                    draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1)),
                    draw(st.integers(-(2**63), 2**63 - 1)), draw(st.integers(0, 999_999_999)),
                    size_bytes, index, target if kind is SYMLINK else b"", draw(XATTRS),
                )
            )  # fmt: skip
    return Case(entries, extents, page_bytes)


@given(cases())
def test_a_tree_is_read_back(case: Case) -> None:
    tree = read(build(case))
    assert list(tree.entries()) == case.entries
    assert tree.profile == Profile(case.page_bytes)
    assert [tree.entry(index) for index in range(tree.n_entries)] == case.entries
    paths = [b""]
    for entry in case.entries[1:]:
        paths.append((paths[entry.parent] + b"/" + entry.name).lstrip(b"/"))
    assert tree.paths() == paths == [tree.path(index) for index in range(tree.n_entries)]


@given(cases())
def test_the_chunks_of_a_tree_are_read_back(case: Case) -> None:
    tree = read(build(case))
    expected, first = [], 0
    for index, entry in enumerate(case.entries):
        position = 0
        n_chunks = 0
        for chunks, hole in case.extents.get(index, []):
            for pages in chunks:
                end = min(position + pages * case.page_bytes, entry.size_bytes)
                digest = digest_of(b"%d %d" % (index, n_chunks)).raw
                expected.append((index, position, end - position, digest))
                position, n_chunks = position + pages * case.page_bytes, n_chunks + 1
            position += hole * case.page_bytes
        assert tree.chunk_range(index) == (first, first + n_chunks)
        first += n_chunks
    found = zip(
        tree.chunk_entry.tolist(),
        tree.chunk_offset.tolist(),
        tree.chunk_bytes.tolist(),
        [digest.tobytes() for digest in tree.chunk_digest],
        strict=True,
    )
    assert list(found) == expected
    assert tree.n_chunks == len(expected)


@given(cases())
def test_the_totals_are_those_of_the_files(case: Case) -> None:
    tree = read(build(case))
    sizes = {i: e.size_bytes for i, e in enumerate(case.entries) if e.type is FILE}
    assert tree.logical_bytes == sum(sizes.values())
    assert tree.zero_bytes == tree.logical_bytes - int(tree.chunk_bytes.sum(dtype="u8"))
    assert trees.peek_totals(build(case)[: trees.PEEK_BYTES], "tree 00") == (
        tree.logical_bytes,
        tree.zero_bytes,
    )


@given(cases())
def test_a_tree_has_one_form_and_its_digest_is_that_of_its_bytes(case: Case) -> None:
    contents = {index: content_of(index, extents) for index, extents in case.extents.items()}
    encoded = build_tree(case.entries, contents, Profile(case.page_bytes))
    raw = joined(encoded.pieces)
    assert encoded.digest == digest_of(raw)
    assert encoded.size_bytes == len(raw)
    backwards = dict(reversed(contents.items()))
    assert build_tree(case.entries, backwards, Profile(case.page_bytes)).digest == encoded.digest


def root(**changed: Any) -> Entry:
    return replace(Entry(0, b"", DIRECTORY, 0o755, 1, 2, 3, 4, 0, 0), **changed)


def file(parent: int, name: bytes, own: int, size_bytes: int, **changed: Any) -> Entry:
    entry = Entry(parent, name, FILE, 0o644, 1, 2, 3, 4, size_bytes, own)
    return replace(entry, **changed)


def link(parent: int, name: bytes, own: int, target: bytes) -> Entry:
    return Entry(parent, name, SYMLINK, 0o777, 1, 2, 3, 4, len(target), own, target)


GOOD = Case(
    [
        root(),
        file(0, b"a", 1, 10 * PAGE - 100, xattrs=((b"user.a", b"1"), (b"user.b", b""))),
        root(name=b"d", group=2, xattrs=((b"system.posix_acl_access", b"acl"),)),
        file(0, b"h", 1, 0),
        link(0, b"l", 4, b"../a"),
        file(2, b"b", 5, 5),
        file(2, b"c", 6, 0),
        file(2, b"z", 7, 20 * PAGE - 1),
    ],
    {1: [([3, 2], 2), ([3], 0)], 5: [([1], 0)], 7: [([], 20)]},
    PAGE,
)


def good_columns() -> dict[str, Any]:
    table = wire.decode_table(build(GOOD), trees.LAYOUT, "good")
    return {name: column.copy() for name, column in table.columns.items()}


def encode(columns: dict[str, Any], **changed: Any) -> bytes:
    head = {
        "page_bytes": PAGE,
        "profile": "page-cdc-1",
        "logical_bytes": 30 * PAGE - 101 + 5,
        "zero_bytes": 22 * PAGE - 1,
    }
    return joined(wire.encode_table(trees.LAYOUT, head | changed, columns))


def check_refused(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidImage, match=rf"^tree 00: [^\n]*{message}[^\n]*\Z"):
        read(raw)


def test_the_columns_of_the_good_example_are_a_tree() -> None:
    assert encode(good_columns()) == build(GOOD)
    assert read(build(GOOD)).zero_bytes == 22 * PAGE - 1


@pytest.mark.parametrize(
    ("column", "at", "value", "message"),
    [
        ("parent", 0, 1, "entry 0 is not a root directory"),
        ("type", 0, 1, "entry 0 is not a root directory"),
        ("type", 6, 3, "unknown type"),
        ("type", 2, 2, "not a directory"),
        ("type", 2, 1, "not a directory"),
        ("parent", 1, 1, "comes before its directory"),
        ("parent", 5, 6, "comes before its directory"),
        ("parent", 3, 2, "not in order of their directories"),
        ("parent", 7, 1, "not in order of their directories"),
        ("parent", slice(5, 8), 1, "beneath something that is not a directory"),
        ("parent", slice(5, 8), 4, "beneath something that is not a directory"),
        ("mode", 1, 0o10000, "mode or time out of range"),
        ("mtime_ns", 1, 1_000_000_000, "mode or time out of range"),
        ("size", 1, 2**63, "size out of range"),
        ("size", 2, 1, "size out of range"),
        ("size", 1, 10 * PAGE + 1, "do not add up to its size"),
        ("size", 1, 9 * PAGE, "do not add up to its size"),
        ("size", 1, 10 * PAGE - 99, "logical_bytes"),
        ("size", 5, 0, "a file without bytes has extents"),
        ("size", 6, 1, "one with bytes has none"),
        ("size", 7, 20 * PAGE, "zero_bytes"),
        ("size", 4, 0, "targets of its symbolic links"),
        ("size", 4, 5, "targets of its symbolic links"),
        ("size", 4, 4096, "targets of its symbolic links"),
        ("size", 3, 1, "content of its own"),
        ("group", 1, 3, "comes before its first name"),
        ("group", 2, 1, "hard link is a directory"),
        ("group", 2, 0, "hard link is a directory"),
        ("group", 3, 0, "of another type than its first name"),
        ("group", 3, 2, "of another type than its first name"),
        ("group", 6, 3, "names another hard link"),
        ("mode", 3, 0o600, "differ in mode"),
        ("uid", 3, 9, "differ in uid"),
        ("gid", 3, 9, "differ in gid"),
        ("mtime_s", 3, 9, "differ in mtime_s"),
        ("mtime_ns", 3, 9, "differ in mtime_ns"),
        ("xattr_entry", 2, 3, "has extended attributes"),
        ("name_end", 7, 8, "name ends do not fit"),
        ("name_end", 7, 6, "name ends do not fit"),
        ("name_end", 3, 5, "name ends do not fit"),
        ("name_end", 0, 1, "empty or longer"),
        ("name_end", 1, 2, "empty or longer"),
        ("names", 0, 0, "holds NUL or '/'"),
        ("names", 0, ord("/"), "holds NUL or '/'"),
        ("names", 0, ord("."), r"a name is '\.'"),
        ("names", 1, ord("a"), "duplicate or not in order"),
        ("names", 3, ord("c"), "duplicate or not in order"),
        ("targets", 1, 0, "holds NUL"),
        ("extent_count", 1, 1, "more or fewer extents"),
        ("extent_count", 3, 1, "content of its own"),
        ("extent_count", 5, 2**32 - 1, "more or fewer extents"),
        ("extent_count", 1, 0, "one with bytes has none"),
        ("extent_count", 2, 1, "a file without bytes has extents"),
        ("extent_chunks", 0, 3, "more or fewer chunks"),
        ("extent_chunks", 0, 2**32 - 1, "more or fewer chunks"),
        ("extent_chunks", slice(1, 3), [0, 2], "extent that is not the first has no chunks"),
        ("extent_hole_pages", 0, 0, "hole of no or too many pages"),
        ("extent_hole_pages", 0, 2**51 + 1, "hole of no or too many pages"),
        ("extent_hole_pages", 0, 2**64 - 1, "hole of no or too many pages"),
        ("extent_hole_pages", slice(0, 4), [2**50, 2**50, 2**50, 2**50], "too many pages"),
        ("extent_hole_pages", 3, 0, "has no chunks"),
        ("extent_hole_pages", 3, 21, "do not add up"),
        ("chunk_pages", 0, 3, "do not add up"),
        ("xattr_entry", 2, 8, "not in order of entries"),
        ("xattr_entry", slice(0, 3), [2, 1, 1], "not in order of entries"),
        ("xattr_name_end", 2, 36, "xattr name ends do not fit"),
        ("xattr_name_end", 0, 13, "xattr name ends do not fit"),
        ("xattr_value_end", 2, 5, "xattr value ends do not fit"),
        ("xattr_value_end", 0, 2, "xattr value ends do not fit"),
        ("xattr_names", 5, 0, "is not one that is stored"),
        ("xattr_names", 0, ord("U"), "is not one that is stored"),
        ("xattr_names", 20, ord("S"), "is not one that is stored"),
        ("xattr_names", 11, ord("a"), "duplicate or not in order"),
        ("xattr_names", 5, ord("c"), "duplicate or not in order"),
        ("xattr_name_end", 0, 0, "is not one that is stored"),
        ("xattr_name_end", 0, 5, "is not one that is stored"),
    ],
)
def test_a_tree_that_breaks_a_rule_is_refused(
    column: str, at: Any, value: Any, message: str
) -> None:
    columns = good_columns()
    before = columns[column].copy()
    columns[column][at] = value
    assert not np.array_equal(columns[column], before)
    check_refused(encode(columns), message)


@pytest.mark.parametrize(
    "name", [c.name for c in trees.LAYOUT.columns if c.name not in ("names", "targets")]
)
@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: np.concatenate([c, c[-1:]])])
def test_a_column_with_too_few_or_too_many_items_is_refused(
    name: str, change: Callable[[Any], Any]
) -> None:
    columns = good_columns()
    columns[name] = change(columns[name])
    check_refused(encode(columns), "")


def test_a_tree_without_entries_is_refused() -> None:
    columns = {name: column[:0] for name, column in good_columns().items()}
    check_refused(encode(columns, logical_bytes=0, zero_bytes=0), "entry columns")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logical_bytes": 1}, "logical_bytes are not"),
        ({"logical_bytes": 0}, "logical_bytes are not"),
        ({"zero_bytes": 22 * PAGE}, "zero_bytes are not"),
        ({"zero_bytes": 0}, "zero_bytes are not"),
        ({"logical_bytes": -1}, "'logical_bytes' is not an integer"),
        ({"zero_bytes": "0"}, "'zero_bytes' is not an integer"),
        ({"page_bytes": 8192}, "page size 8192"),
        ({"page_bytes": 0}, "'page_bytes' is not an integer"),
        ({"page_bytes": 65536}, "longer than its profile allows|do not add up"),
        ({"profile": 1}, "'profile' is not a string"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_a_head_that_breaks_a_rule_is_refused(changed: dict[str, Any], message: str) -> None:
    check_refused(encode(good_columns(), **changed), message)


def test_an_unknown_profile_is_unsupported_and_the_tree_is_named() -> None:
    with pytest.raises(Unsupported, match=r"^tree 00: .*'page-cdc-2' is not known"):
        read(encode(good_columns(), profile="page-cdc-2"))


def one_file(*names: bytes, parents: Sequence[int] | None = None) -> bytes:
    """A tree with empty files of these names, written without the checks of a writer."""
    n = len(names)
    lengths = np.cumsum([0, *map(len, names)])
    columns = {
        "parent": np.array([0, *(parents or [0] * n)], "u4"),
        "type": np.array([0] + [1] * n, "u1"),
        **{name: np.zeros(n + 1, "u4") for name in ("uid", "gid", "mtime_ns", "extent_count")},
        "mode": np.zeros(n + 1, "u2"),
        "mtime_s": np.zeros(n + 1, "i8"),
        "size": np.zeros(n + 1, "u8"),
        "group": np.arange(n + 1, dtype="u4"),
        "name_end": lengths.astype("u4"),
        "names": np.frombuffer(b"".join(names), "u1"),
        "targets": np.zeros(0, "u1"),
        **{
            c.name: np.zeros((0, 32) if c.is_digest else 0, "u1") for c in trees.LAYOUT.columns[13:]
        },
    }
    return encode(columns, logical_bytes=0, zero_bytes=0)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([b".."], r"a name is '\.\.'"),
        ([b"."], r"a name is '\.'"),
        ([b"../x"], "holds NUL or '/'"),
        ([b"/etc"], "holds NUL or '/'"),
        ([b"/"], "holds NUL or '/'"),
        ([b"a/b"], "holds NUL or '/'"),
        ([b"a\0"], "holds NUL or '/'"),
        ([b""], "empty or longer"),
        ([b"x" * 256], "empty or longer"),
        ([b"same", b"same"], "duplicate or not in order"),
        ([b"b", b"a"], "duplicate or not in order"),
        ([b"\xff", b"\xfe"], "duplicate or not in order"),
        ([b"ab", b"a"], "duplicate or not in order"),
    ],
)
def test_a_name_that_could_lead_astray_is_refused(names: list[bytes], message: str) -> None:
    check_refused(one_file(*names), message)


@pytest.mark.parametrize("name", [b"...", b"..a", b"\xff\xfe", b"x" * 255, b"-", b" ", b"\n", b"~"])
def test_an_odd_but_harmless_name_is_read(name: bytes) -> None:
    assert read(one_file(name)).path(1) == name


def test_a_file_beneath_a_symbolic_link_or_a_file_is_refused() -> None:
    check_refused(one_file(b"a", b"b", parents=[0, 1]), "beneath something that is not a directory")
    columns = good_columns()
    columns["parent"][5:] = 4
    columns["size"][4] = 4
    check_refused(encode(columns), "beneath something that is not a directory")


def test_the_message_for_a_hostile_name_is_one_line() -> None:
    with pytest.raises(InvalidImage) as caught:
        read(one_file(b"a\nb", b"a\nb"))
    assert re.fullmatch(r"[^\n]{1,400}", str(caught.value))


def nested(n_levels: int, last: bytes) -> Case:
    """A directory in a directory and so on, with names of 255 bytes, and a file in the last."""
    levels = range(n_levels)
    entries = [root(), *(root(parent=i, name=b"n" * 255, group=i + 1) for i in levels)]
    entries.append(file(n_levels, last, n_levels + 1, 0))
    return Case(entries, {}, PAGE)


def test_a_path_has_as_many_bytes_as_allowed_and_no_more() -> None:
    tree = read(build(nested(15, b"f" * 255)))
    assert len(tree.path(16)) == 4095
    check_refused(build(nested(16, b"f")), "a path is longer than 4095")


def many(targets: Sequence[bytes]) -> bytes:
    entries = [root()]
    entries += [link(0, b"%04d" % i, i + 1, target) for i, target in enumerate(targets)]
    return build(Case(entries, {}, PAGE))


def test_a_target_has_as_many_bytes_as_allowed_and_no_more() -> None:
    longest = b"t" * 4095
    assert read(many([b"x", longest, b"/"])).entry(2).target == longest
    check_refused(many([longest + b"t"]), "targets of its symbolic links")
    check_refused(many([b"", b"x"]), "targets of its symbolic links")


def with_xattrs(*xattrs: tuple[bytes, bytes]) -> bytes:
    return build(Case([root(xattrs=xattrs)], {}, PAGE))


def test_extended_attributes_are_as_long_as_allowed_and_no_longer() -> None:
    longest = (b"user." + b"x" * 250, bytes(65_536))
    assert read(with_xattrs(longest)).entry(0).xattrs == (longest,)
    check_refused(with_xattrs((b"user." + b"x" * 251, b"")), "is not one that is stored")
    check_refused(with_xattrs((b"user.x", bytes(65_537))), "longer than 65536")


@pytest.mark.parametrize("name", [b"trusted.x", b"user", b"security.selinux", b"system.x", b""])
def test_an_attribute_that_is_not_stored_is_refused(name: bytes) -> None:
    check_refused(with_xattrs((name, b"")), "is not one that is stored")


def test_damage_to_a_tree_is_refused_or_makes_another_tree() -> None:
    def decode(raw: bytes) -> bytes:
        tree = read(raw)
        for index in range(tree.n_entries):
            tree.entry(index)
            tree.chunk_range(index)
        assert (tree.chunk_bytes > 0).all()
        end = tree.chunk_offset + tree.chunk_bytes
        assert (end <= tree.columns["size"][tree.chunk_entry]).all()
        return raw

    step = 3  # two or three bits of each byte
    assert check_damage(build(GOOD), decode, lambda raw: raw, step) > 8 * 32 * 4 // step


def test_names_of_one_symbolic_link_share_its_target() -> None:
    entries = [
        root(),
        link(0, b"a", 1, b"first"),
        link(0, b"b", 2, b"second"),
        replace(link(0, b"c", 1, b"first"), size_bytes=0),
        link(0, b"d", 4, b"third"),
    ]
    raw = build(Case(entries, {}, PAGE))
    assert raw.count(b"first") == 1
    assert list(read(raw).entries()) == entries
    entries[3] = replace(entries[3], size_bytes=5)
    check_refused(build(Case(entries, {}, PAGE)), "content of its own")


def test_a_file_as_large_as_a_file_may_be_is_read_back() -> None:
    case = Case([root(), file(0, b"a", 1, 2**63 - 1)], {1: [([], 2**51)]}, PAGE)
    assert read(build(case)).zero_bytes == 2**63 - 1


@pytest.mark.parametrize(
    "entry",
    [
        file(0, b"a", 1, 0, uid=2**32),
        file(0, b"a", 1, 0, gid=-1),
        file(0, b"a", 1, 0, mode=2**16),
        file(0, b"a", 1, 0, mtime_s=2**63),
        file(0, b"a", 1, 2**64),
        file(0, b"a", 1, 2**63),
    ],
)
def test_what_no_column_can_hold_is_not_written(entry: Entry) -> None:
    extents: dict[int, Extents] = {1: [([], 2**51 - 1)]} if entry.size_bytes else {}
    with pytest.raises(InvalidInput):
        build(Case([root(), entry], extents, PAGE))


def many_entries(n: int) -> bytes:
    names = sorted(b"%x" % i for i in range(n))
    return one_file(*names)


@pytest.mark.slow
def test_a_hostile_tree_costs_at_most_four_times_its_size() -> None:
    raw = many_entries(150_000)
    assert peak_bytes(lambda: read(raw)) < 4 * len(raw) + ALLOWED_EXTRA_BYTES


@pytest.mark.slow
def test_hostile_attributes_cost_at_most_four_times_their_size() -> None:
    columns = {name: column[:1] for name, column in good_columns().items()}
    n = 300_000
    names = sorted(b"user.%x" % i for i in range(n))
    columns |= {
        c.name: np.zeros((0, 32) if c.is_digest else 0, "u1") for c in trees.LAYOUT.columns[10:]
    }
    columns["extent_count"] = np.zeros(1, "u4")
    columns["xattr_entry"] = np.zeros(n, "u4")
    columns["xattr_name_end"] = np.cumsum([len(name) for name in names])
    columns["xattr_value_end"] = np.zeros(n, "u4")
    columns["xattr_names"] = np.frombuffer(b"".join(names), "u1")
    raw = encode(columns, logical_bytes=0, zero_bytes=0)
    assert len(read(raw).entry(0).xattrs) == n
    assert peak_bytes(lambda: read(raw)) < 4 * len(raw) + ALLOWED_EXTRA_BYTES


@pytest.mark.slow
def test_a_tree_of_a_terabyte_opens_in_less_than_500_mb() -> None:
    n_chunks = 3_000_000
    content = FileContent(
        np.random.default_rng(1).integers(0, 256, (n_chunks, 32), "u1"),
        np.full(n_chunks, 85, "u2"),
        np.array([n_chunks], "u4"),
        np.array([0], "u8"),
    )
    entries = [root(), file(0, b"pages-1.img", 1, 85 * PAGE * n_chunks - 1)]
    raw = joined(build_tree(entries, {1: content}, Profile()).pieces)
    assert entries[1].size_bytes > 10**12

    def open_and_use() -> None:
        tree = read(raw)
        assert int(tree.chunk_offset[-1]) + int(tree.chunk_bytes[-1]) == entries[1].size_bytes

    assert peak_bytes(open_and_use) < 500_000_000
