"""Listing a directory: everything in tree order, and what can't be stored is refused by name."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from imgfmt.digest import digest_of
from imgfmt.errors import AccessDenied, Conflict, ImageError, InvalidInput, NotFound
from imgfmt.tree import Entry, EntryType
from tests.transfer.privilege import modes_count
from transfer.pushing.scan import Listing, check_unchanged, scan_directory


def scan(root: Path, *, skip_special: bool = False) -> Listing:
    return scan_directory(os.fspath(root), skip_special=skip_special)


def make(root: Path, *names: str) -> None:
    """Files with their names as content; a name that ends with `/` is a directory."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)


def entry_of(listing: Listing, path: str | bytes) -> Entry:
    wanted = os.fsencode(path)
    relative = [found[len(listing.root) + 1 :] for found in listing.paths]
    return listing.entries[relative.index(wanted)]


def relative_paths(listing: Listing) -> list[bytes]:
    return [path[len(listing.root) + 1 :] for path in listing.paths]


def test_entries_are_in_tree_order(tmp_path: Path) -> None:
    make(tmp_path, "b/2", "b/1/x", "a", "b-", "c/", "B/y", "b/1.")
    listing = scan(tmp_path)
    assert relative_paths(listing) == [
        b"", b"B", b"a", b"b", b"b-", b"c", b"B/y", b"b/1", b"b/1.", b"b/2", b"b/1/x"
    ]  # fmt: skip
    for index, entry in enumerate(listing.entries[1:], 1):
        path = listing.paths[index]
        assert listing.paths[entry.parent] + b"/" + entry.name == path
        before = listing.entries[index - 1]
        assert index == 1 or (before.parent, before.name) < (entry.parent, entry.name)


def test_an_entry_has_the_attributes_of_its_file(tmp_path: Path) -> None:
    make(tmp_path, "file")
    path = tmp_path / "file"
    path.chmod(0o4751)
    os.utime(path, ns=(0, 1_600_000_000_123_456_789))
    entry = entry_of(scan(tmp_path), "file")
    status = path.stat()
    assert entry.type is EntryType.FILE
    assert (entry.mode, entry.uid, entry.gid) == (0o4751, status.st_uid, status.st_gid)
    assert (entry.mtime_s, entry.mtime_ns) == (1_600_000_000, 123_456_789)
    assert (entry.size_bytes, entry.target) == (4, b"")


def test_a_time_before_1970_is_kept(tmp_path: Path) -> None:
    make(tmp_path, "file")
    os.utime(tmp_path / "file", ns=(0, -1))
    entry = entry_of(scan(tmp_path), "file")
    assert (entry.mtime_s, entry.mtime_ns) == (-1, 999_999_999)


def test_files_with_bytes_are_listed_once(tmp_path: Path) -> None:
    make(tmp_path, "a/x", "b")
    (tmp_path / "empty").touch()
    os.link(tmp_path / "b", tmp_path / "a" / "b")
    listing = scan(tmp_path)
    assert [file.path for file in listing.files] == [
        os.fsencode(tmp_path / name) for name in ("b", "a/x")
    ]
    assert listing.logical_bytes == len("b") + len("a/x")
    assert [listing.entries[file.entry].name for file in listing.files] == [b"b", b"x"]


def test_names_of_any_bytes_are_listed(tmp_path: Path) -> None:
    names = [b"\xff\xfe", b"a\nb", b"\xed\xa0\x80", b" ", b"-", b"\x01", "é".encode(), b"x" * 255]
    for name in names:
        with open(os.fsencode(tmp_path) + b"/" + name, "wb"):
            pass
    assert relative_paths(scan(tmp_path))[1:] == sorted(names)


def test_paths_are_as_deep_as_the_system_allows(tmp_path: Path) -> None:
    depth = (4095 - len(os.fsencode(tmp_path))) // 101
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for level in range(depth + 1):
        if level == depth:
            assert len(scan(tmp_path).entries) == depth + 1
        os.mkdir("d" * 100, dir_fd=descriptor)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    with pytest.raises(InvalidInput, match="too long"):
        scan(tmp_path)


def test_names_of_one_file_form_a_group(tmp_path: Path) -> None:
    make(tmp_path, "c", "a/x", "z")
    os.setxattr(tmp_path / "c", "user.k", b"v")
    os.link(tmp_path / "c", tmp_path / "a" / "y")
    os.link(tmp_path / "c", tmp_path / "b")
    listing = scan(tmp_path)
    first = entry_of(listing, "b")
    assert listing.entries[first.group] is first
    assert (first.size_bytes, first.xattrs) == (1, ((b"user.k", b"v"),))
    for later in ("c", "a/y"):
        entry = entry_of(listing, later)
        assert (entry.group, entry.size_bytes, entry.xattrs) == (first.group, 0, ())
    alone = entry_of(listing, "z")
    assert listing.entries[alone.group] is alone


def test_names_of_one_symbolic_link_form_a_group(tmp_path: Path) -> None:
    os.symlink("nowhere", tmp_path / "a")
    os.link(tmp_path / "a", tmp_path / "b", follow_symlinks=False)
    listing = scan(tmp_path)
    first, later = entry_of(listing, "a"), entry_of(listing, "b")
    assert listing.entries[first.group] is listing.entries[later.group] is first
    assert (first.size_bytes, later.size_bytes) == (7, 0)
    assert first.target == later.target == b"nowhere"


def test_symbolic_links_are_listed_and_not_followed(tmp_path: Path) -> None:
    make(tmp_path, "target/inside")
    targets = {"to-dir": b"target", "away": b"../../etc", "nowhere": b"\xff", "self": b"self"}
    for name, target in targets.items():
        os.symlink(target, os.fsencode(tmp_path / name))
    listing = scan(tmp_path)
    assert len(listing.entries) == 1 + 2 + len(targets)
    for name, target in targets.items():
        entry = entry_of(listing, name)
        assert entry.type is EntryType.SYMLINK
        assert (entry.target, entry.size_bytes) == (target, len(target))


def test_the_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    make(tmp_path, "real/x")
    (tmp_path / "link").symlink_to("real")
    listing = scan(tmp_path / "link")
    assert relative_paths(listing) == [b"", b"x"]
    assert listing.entries[0].type is EntryType.DIRECTORY
    check_unchanged(listing)


def test_the_marker_of_a_pull_is_left_out_at_the_root_only(tmp_path: Path) -> None:
    make(tmp_path, "d/")
    for folder in (tmp_path, tmp_path / "d"):
        (folder / ".snapcask-complete").write_text(f"{digest_of(b'')}\n")
    assert relative_paths(scan(tmp_path)) == [b"", b"d", b"d/.snapcask-complete"]
    (tmp_path / ".snapcask-partial.moving").touch()  # killed after all was there
    assert relative_paths(scan(tmp_path)) == [b"", b"d", b"d/.snapcask-complete"]


@pytest.mark.parametrize("content", [b"", b"mine", b"\xff", f"{digest_of(b'')}".encode()])
def test_a_file_of_the_users_that_is_called_as_the_marker_is_listed(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / ".snapcask-complete").write_bytes(content)
    assert relative_paths(scan(tmp_path)) == [b"", b".snapcask-complete"]


def test_what_is_called_as_the_marker_and_is_no_file_is_listed(tmp_path: Path) -> None:
    make(tmp_path, "d/.snapcask-complete/", "l/")
    (tmp_path / "l" / ".snapcask-complete").symlink_to("x")
    assert relative_paths(scan(tmp_path / "d")) == [b"", b".snapcask-complete"]
    assert relative_paths(scan(tmp_path / "l")) == [b"", b".snapcask-complete"]


UNFINISHED = [
    ".snapcask-partial/",
    ".snapcask-partial",
    ".snapcask-partial.journal",
    ".snapcask-partial.journal.new",
    ".snapcask-partial.moving",
    ".out.snapcask-partial-01234567/",
    ".out.snapcask-partial-01234567.journal",
    ".out.snapcask-partial-01234567.journal.new",
    ".a\nb.snapcask-partial-89abcdef/",
]


@pytest.mark.parametrize("name", UNFINISHED)
@pytest.mark.parametrize("where", ["", "d/"])
def test_a_directory_that_holds_an_unfinished_pull_is_refused(
    tmp_path: Path, name: str, where: str
) -> None:
    make(tmp_path, where + name, "x")
    folder = re.escape(str(tmp_path / where))
    with pytest.raises(InvalidInput) as caught:
        scan(tmp_path)
    said = str(caught.value)
    assert re.match(f"{folder} holds an unfinished pull; finish it by the same pull, or ", said)
    shown = name.rstrip("/").replace("\n", "\\n")
    assert said.endswith("empty it" if name.endswith("moving") else f"remove {shown}")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", [".snapcask-partial", ".out.snapcask-partial-01234567"])
def test_what_an_unfinished_pull_left_is_refused_itself(tmp_path: Path, name: str) -> None:
    make(tmp_path, f"{name}/x")
    (tmp_path / "link").symlink_to(name)
    for root in (tmp_path / name, tmp_path / "link"):
        with pytest.raises(InvalidInput, match=f"^{root} is what an unfinished pull left"):
            scan(root)


@pytest.mark.parametrize(
    "name", [".snapcask-partials", "x.snapcask-partial-01234567", ".o.snapcask-partial-0123"]
)
def test_names_that_no_pull_gives_are_listed(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    assert relative_paths(scan(tmp_path)) == [b"", os.fsencode(name)]


def test_attributes_that_a_tree_can_hold_are_listed_and_others_reported(tmp_path: Path) -> None:
    make(tmp_path, "a", "b")
    os.setxattr(tmp_path / "a", "user.z", b"1")
    os.setxattr(tmp_path / "a", "user.b", b"\0\xff")
    os.setxattr(tmp_path, "user.root", b"")
    listing = scan(tmp_path)
    assert entry_of(listing, "a").xattrs == ((b"user.b", b"\0\xff"), (b"user.z", b"1"))
    assert listing.entries[0].xattrs == ((b"user.root", b""),)
    assert listing.warnings == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set trusted attributes")
def test_attributes_that_are_not_stored_are_counted(tmp_path: Path) -> None:
    make(tmp_path, "a", "b")
    for name in ("a", "b"):
        os.setxattr(tmp_path / name, "trusted.x", b"1")
    listing = scan(tmp_path)
    assert listing.warnings == [
        f"extended attribute trusted.x of 2 entries is not stored: {tmp_path}/a, {tmp_path}/b"
    ]
    assert entry_of(listing, "a").xattrs == ()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def make_device(path: Path, kind: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root makes devices")
    os.mknod(path, kind | 0o600, os.makedev(1, 3))


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a socket": make_socket,
    "a fifo": os.mkfifo,
    "a character device": lambda path: make_device(path, stat.S_IFCHR),
    "a block device": lambda path: make_device(path, stat.S_IFBLK),
}


@pytest.mark.parametrize("what", SPECIAL)
def test_a_special_file_is_refused_by_name(tmp_path: Path, what: str) -> None:
    make(tmp_path, "d/x")
    SPECIAL[what](tmp_path / "d" / "odd")
    wanted = rf"{tmp_path}/d/odd is {what}, .*--skip-special"
    with pytest.raises(InvalidInput, match=wanted):
        scan(tmp_path)


@pytest.mark.parametrize("what", SPECIAL)
def test_special_files_are_skipped_and_counted_if_asked(tmp_path: Path, what: str) -> None:
    make(tmp_path, "d/x", "a")
    SPECIAL[what](tmp_path / "d" / "odd")
    SPECIAL[what](tmp_path / "odd")
    listing = scan(tmp_path, skip_special=True)
    assert relative_paths(listing) == [b"", b"a", b"d", b"d/x"]
    assert listing.warnings == [f"skipped: 2 x {what}: {tmp_path}/odd, {tmp_path}/d/odd"]


def test_of_many_skipped_files_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    for name in ("a", "b\n", "c", "d", "e"):
        os.mkfifo(tmp_path / name)
    listing = scan(tmp_path, skip_special=True)
    first = rf"{tmp_path}/a, {tmp_path}/b\n, {tmp_path}/c"
    assert listing.warnings == [f"skipped: 5 x a fifo: {first} and 2 more"]


def test_a_root_that_is_missing_or_no_directory_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "file")
    with pytest.raises(NotFound, match=f"^{tmp_path}/none: it does not exist"):
        scan(tmp_path / "none")
    with pytest.raises(InvalidInput, match=f"^{tmp_path}/file is not a directory"):
        scan(tmp_path / "file")


def test_a_directory_that_may_not_be_read_is_denied_by_name(tmp_path: Path) -> None:
    make(tmp_path, "d/x")
    (tmp_path / "d").chmod(0o100)
    with modes_count(), pytest.raises(AccessDenied, match=f"^{tmp_path}/d: permission denied"):
        scan(tmp_path)
    (tmp_path / "d").chmod(0o700)


def vanishing(call: Any, path: Path) -> Any:
    """`call`, before whose use of `path` it is taken away."""

    def vanish(target: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fsencode(target) == os.fsencode(path):
            path.rename(path.with_name("gone"))
        return call(target, *args, **kwargs)

    return vanish


@pytest.mark.parametrize("call", ["lstat", "listxattr"])
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_vanishes_meanwhile_is_a_conflict_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, kind: str
) -> None:
    make(tmp_path, "m/a", "m/file", "m/directory/", "m/z")
    (tmp_path / "m" / "link").symlink_to("x")
    path = tmp_path / "m" / kind
    monkeypatch.setattr(os, call, vanishing(getattr(os, call), path))
    with pytest.raises(Conflict, match=f"^{path} changed or vanished"):
        scan(tmp_path)


def test_a_directory_that_vanishes_before_it_is_listed_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "d/")
    monkeypatch.setattr(os, "listdir", vanishing(os.listdir, tmp_path / "d"))
    with pytest.raises(Conflict, match=f"^{tmp_path}/d changed or vanished"):
        scan(tmp_path)


def test_a_link_that_vanishes_before_it_is_read_is_a_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "l").symlink_to("x")
    monkeypatch.setattr(os, "readlink", vanishing(os.readlink, tmp_path / "l"))
    with pytest.raises(Conflict, match=f"^{tmp_path}/l changed or vanished"):
        scan(tmp_path)


def test_what_is_unchanged_is_no_conflict(tmp_path: Path) -> None:
    make(tmp_path, "d/x", "y")
    (tmp_path / "l").symlink_to("y")
    listing = scan(tmp_path)
    (tmp_path / "y").read_bytes()
    check_unchanged(listing)


def replace_link(root: Path) -> None:
    (root / "l").unlink()
    (root / "l").symlink_to("z")


def replace_link_by_directory(root: Path) -> None:
    (root / "l").unlink()
    (root / "l").mkdir()


CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "content": ("d/x", lambda root: (root / "d/x").write_text("d-x")),
    "size": ("d/x", lambda root: os.truncate(root / "d/x", 9)),
    "mode": ("d/x", lambda root: (root / "d/x").chmod(0o600)),
    "time": ("d/x", lambda root: os.utime(root / "d/x", (1, 1))),
    "an attribute": ("d/x", lambda root: os.setxattr(root / "d/x", "user.a", b"")),
    "gone": ("d/x", lambda root: (root / "d/x").unlink()),
    "another file": ("d/x", lambda root: (root / "d/z").rename(root / "d/x")),
    "one file more": ("d", lambda root: (root / "d/new").touch()),
    "one file more at the root": (".", lambda root: (root / "new").touch()),
    "a directory is gone": ("e", lambda root: (root / "e").rmdir()),
    "a link": ("l", replace_link),
    "a directory for a link": ("l", replace_link_by_directory),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_a_conflict_that_names_the_entry(tmp_path: Path, change: str) -> None:
    make(tmp_path, "d/x", "d/z", "e/", "y")
    (tmp_path / "l").symlink_to("y")
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.utime(path, (9, 9), follow_symlinks=False)
    listing = scan(tmp_path)
    name, apply = CHANGES[change]
    apply(tmp_path)
    with pytest.raises(Conflict, match=f"^{re.escape(str(tmp_path / name))} changed or vanished"):
        check_unchanged(listing)


def test_messages_about_odd_names_are_one_line(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/a\nb\xff"
    os.mkfifo(odd)
    with pytest.raises(ImageError) as caught:
        scan(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert r"a\nb\xff" in str(caught.value)
