"""What a directory holds, before any of its bytes are read: entries in tree order, and their files.

Does not follow symbolic links below the root. What a tree can't describe is refused by name.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from imgfmt.errors import Conflict, ImageError, InvalidInput
from imgfmt.tree import Entry, EntryType
from imgfmt.tree_check import MAX_PATH_BYTES, xattr_is_stored
from transfer.oserrors import printable, translate
from transfer.pulling.names import IN_PLACE, MARKER, NOTE, PARTIAL, is_marker, unfinished_among

_SPECIAL = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a fifo",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}
_N_EXAMPLES = 3
_NO_XATTRS = (errno.ENOTSUP, errno.ENODATA, errno.EPERM)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What must stay the same of an entry while it is read."""

    device: int
    inode: int
    mode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> FileIdentity:
        """The identity in a stat result."""
        return cls(found.st_dev, found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns,
                   found.st_ctime_ns)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A regular file with bytes, and its entry's index. `sparse`: fewer blocks than bytes."""

    entry: int
    path: bytes
    size_bytes: int
    identity: FileIdentity
    sparse: bool


@dataclass(frozen=True, slots=True)
class Listing:
    """One directory. `files`: each hard-linked one once; `paths`, `identities`: one an entry."""

    root: bytes
    entries: list[Entry]
    files: list[SourceFile]
    paths: list[bytes]
    identities: list[FileIdentity]
    warnings: list[str]

    @property
    def logical_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)


def scan_directory(root: str | bytes, *, skip_special: bool = False) -> Listing:
    """List `root` without the marker of a pull that filled it.

    Raises InvalidInput, NotFound or AccessDenied naming the entry at fault, and InvalidInput where
    an unfinished pull lies in it, at any depth, or is what is to be listed.
    """
    return _Scan(os.fsencode(root), skip_special).run()


class _Scan:
    def __init__(self, root: bytes, skip_special: bool) -> None:
        self._root = root
        self._skip_special = skip_special
        self._listing = Listing(root, [], [], [], [], [])
        self._groups: dict[tuple[int, int], int] = {}
        self._skipped: dict[str, _Examples] = {}
        self._unstored: dict[str, _Examples] = {}

    def run(self) -> Listing:
        try:
            status = os.stat(self._root)
        except OSError as error:
            raise translate(error, printable(self._root)) from error
        if not stat.S_ISDIR(status.st_mode):
            raise InvalidInput(f"{printable(self._root)} is not a directory; give the one to push")
        self._check_own_name()
        self._add(0, b"", self._root, status)
        directory = 0
        while directory < len(self._listing.entries):
            if self._listing.entries[directory].type is EntryType.DIRECTORY:
                self._add_children(directory)
            directory += 1
        for what, found in sorted(self._skipped.items()):
            self._listing.warnings.append(f"skipped: {found.count} x {what}: {found}")
        for name, found in sorted(self._unstored.items()):
            self._listing.warnings.append(
                f"extended attribute {name} of {found.count} entries is not stored: {found}"
            )
        return self._listing

    def _check_own_name(self) -> None:
        name = os.path.basename(os.path.realpath(self._root))
        if unfinished_among([name]):
            raise InvalidInput(
                f"{printable(self._root)} is what an unfinished pull left; finish it by the same"
                " pull, or rename it"
            )

    def _contents(self, path: bytes, *, is_root: bool) -> list[bytes]:
        """Names in a directory, ascending, without the marker of a pull that filled the root."""
        try:
            names = sorted(os.listdir(path))
            if is_root and MARKER in names and is_marker(path + b"/" + MARKER):
                names.remove(MARKER)
                if NOTE in names and PARTIAL not in names:  # killed after all was there
                    return [name for name in names if name not in IN_PLACE]
        except OSError as error:
            raise _refused(error, path) from error
        if left := unfinished_among(names):
            remedy = "empty it" if NOTE in left else f"remove {', '.join(map(printable, left))}"
            raise InvalidInput(
                f"{printable(path)} holds an unfinished pull; finish it by the same pull, or"
                f" {remedy}"
            )
        return names

    def _add_children(self, directory: int) -> None:
        path = self._listing.paths[directory]
        for name in self._contents(path, is_root=directory == 0):
            child = path + b"/" + name
            try:
                status = os.lstat(child)
            except OSError as error:
                raise _refused(error, child) from error
            self._add(directory, name, child, status)

    def _add(self, parent: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        index = len(self._listing.entries)
        kind = self._type_of(path, status)
        if kind is None:
            return
        if len(path) - len(self._root) > MAX_PATH_BYTES:
            raise InvalidInput(f"{printable(path)}: its path is longer than {MAX_PATH_BYTES} bytes")
        group = index
        if kind is not EntryType.DIRECTORY and status.st_nlink > 1:
            group = self._groups.setdefault((status.st_dev, status.st_ino), index)
        first = group == index
        is_file = kind is EntryType.FILE and first
        target = _read_link(path) if kind is EntryType.SYMLINK else b""
        size_bytes = status.st_size if is_file else len(target) if first else 0
        seconds, nanoseconds = divmod(status.st_mtime_ns, 1_000_000_000)
        entry = Entry(
            parent, name, kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid,
            seconds, nanoseconds, size_bytes, group, target,
            self._xattrs(path) if first else (),
        )  # fmt: skip
        identity = FileIdentity.of(status)
        self._listing.entries.append(entry)
        self._listing.paths.append(path)
        self._listing.identities.append(identity)
        if is_file and status.st_size:
            sparse = status.st_blocks * 512 < status.st_size
            self._listing.files.append(SourceFile(index, path, status.st_size, identity, sparse))

    def _type_of(self, path: bytes, status: os.stat_result) -> EntryType | None:
        """The entry's type; None if it is special and to be skipped."""
        if stat.S_ISDIR(status.st_mode):
            return EntryType.DIRECTORY
        if stat.S_ISREG(status.st_mode):
            return EntryType.FILE
        if stat.S_ISLNK(status.st_mode):
            return EntryType.SYMLINK
        what = _SPECIAL.get(stat.S_IFMT(status.st_mode), "of an unknown type")
        if not self._skip_special:
            raise InvalidInput(
                f"{printable(path)} is {what}, which can't be stored;"
                " remove it or use --skip-special"
            )
        self._skipped.setdefault(what, _Examples()).add(path)
        return None

    def _xattrs(self, path: bytes) -> tuple[tuple[bytes, bytes], ...]:
        found = []
        try:
            for name in os.listxattr(path, follow_symlinks=False):
                raw_name = os.fsencode(name)
                if xattr_is_stored(raw_name):
                    found.append((raw_name, os.getxattr(path, name, follow_symlinks=False)))
                else:
                    self._unstored.setdefault(printable(raw_name), _Examples()).add(path)
        except OSError as error:
            if error.errno not in _NO_XATTRS:
                raise _refused(error, path) from error
        return tuple(sorted(found))


class _Examples:
    """Paths of which the first few are told, and how many there are."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[bytes] = []

    def add(self, path: bytes) -> None:
        self.count += 1
        if len(self._first) < _N_EXAMPLES:
            self._first.append(path)

    def __str__(self) -> str:
        more = self.count - len(self._first)
        return ", ".join(map(printable, self._first)) + (f" and {more} more" if more else "")


def _read_link(path: bytes) -> bytes:
    try:
        return os.readlink(path)
    except OSError as error:
        raise _refused(error, path) from error


def _refused(error: OSError, path: bytes) -> ImageError:
    """The error to raise where the system refused something about an entry that was there."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return changed(path)
    return translate(error, printable(path))


def changed(path: bytes) -> Conflict:
    """The error for an entry that is no longer what it was when the push began."""
    return Conflict(
        f"{printable(path)} changed or vanished while it was being pushed; nothing was published,"
        " push again when it is at rest"
    )


def check_unchanged(listing: Listing) -> None:
    """Raise Conflict naming an entry that differs from what `scan_directory` saw.

    A file is named rather than its directory, which differs too if the file was replaced.
    """
    differing: list[bytes] = []
    for path, before in zip(listing.paths, listing.identities, strict=True):
        try:
            now = FileIdentity.of(os.stat(path) if path == listing.root else os.lstat(path))
        except OSError as error:
            raise _refused(error, path) from error
        if now != before:
            differing.append(path)
            if not stat.S_ISDIR(before.mode):
                raise changed(path)
    if differing:
        raise changed(differing[0])
