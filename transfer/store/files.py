"""The files of a store in a directory: written whole, read whole or in part, and listed.

Objects appear whole: written under `tmp/`, fsynced, renamed or linked, the folder fsynced. Nothing
relies on advisory locks. All but `Files.run` blocks.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from imgfmt import layout
from imgfmt.digest import Octets
from imgfmt.errors import CorruptData
from transfer.oserrors import printable, translate
from transfer.store.base import UNCHECKED_BYTES, ObjectFacts, SizeCheck
from transfer.threads import Threads

MAP_FROM_BYTES = UNCHECKED_BYTES
_MAX_PIECES = 1024
_MAX_FOLDER_DEPTH = 3
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

T = TypeVar("T")


class Files:
    """The files below the directory `root`, by their keys. Errors are those of the system."""

    def __init__(self, root: str, threads: Threads) -> None:
        self.root = root
        self.threads = threads

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """Do on a thread what blocks. Raises our errors, which name the key and the store."""
        try:
            return await self.threads.run(work)
        except OSError as error:
            raise translate(error, self.named(key)) from error

    def path(self, key: str) -> str:
        """Where a key lies."""
        return os.path.join(self.root, key)

    def named(self, key: str) -> str:
        """The key and the store, for messages."""
        return f"{key} in store {printable(self.root)}"

    def _check_file(self, key: str, mode: int) -> None:
        """Raise CorruptData unless this is the mode of a file."""
        if not stat.S_ISREG(mode):
            place = "a file" if layout.is_object_key(key) else "a file or folder"
            raise CorruptData(
                f"{self.named(key)} is {_kind_of(mode)} where {place} belongs; move it away"
            )

    def check_place(self, key: str) -> None:
        """Raise CorruptData if something else than a file is where an object is to be."""
        with contextlib.suppress(FileNotFoundError):
            self._check_file(key, os.stat(self.path(key), follow_symlinks=False).st_mode)

    def check_folder(self, prefix: str) -> None:
        """Raise CorruptData if something else than a folder is there."""
        path = self.path(prefix.rstrip("/"))
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not os.path.isdir(path):
                raise CorruptData(
                    f"{self.named(prefix)} is {_kind_of(mode)} where a folder belongs; move it away"
                )

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """A descriptor of an object, for reading. Raises CorruptData for all but a file."""
        try:
            descriptor = os.open(self.path(key), _READ)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                self.check_place(key)
            raise
        try:
            self._check_file(key, os.fstat(descriptor).st_mode)
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, key: str, check: SizeCheck | None, *, map_large: bool) -> Octets:
        """All of an object, after `check`; with `map_large` a large one is mapped."""
        with self._opened(key) as descriptor:
            return _read_whole(descriptor, check, map_large=map_large)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset`; returns the bytes read, fewer only at the object's end."""
        with self._opened(key) as descriptor:
            return _read_full(descriptor, buffer, offset)

    def facts(self, key: str) -> ObjectFacts | None:
        """What is known of an object, if there is one. Raises CorruptData for all but a file."""
        try:
            found = os.stat(self.path(key), follow_symlinks=False)
        except FileNotFoundError:
            return None
        self._check_file(key, found.st_mode)
        return ObjectFacts(key, found.st_size, found.st_mtime_ns)

    def listed(self, prefix: str) -> list[ObjectFacts]:
        """What lies below a folder, by key, also what is no object. Raises CorruptData."""
        self.check_folder(prefix)
        return _list(self.root, prefix)

    def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """Write an object, over the one that is there."""
        temporary = self._write_temporary(pieces)
        with _removed_on_error(temporary):
            self.publish(temporary, key)

    def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """Write an object if there is none: by `link(2)`, which is atomic on NFS too."""
        temporary = self._write_temporary(pieces)
        try:
            _make_folder(self.root, os.path.dirname(key))
            created = _link(temporary, self.path(key))
            if created:
                _sync_folder(os.path.dirname(self.path(key)))
            return created
        finally:
            os.unlink(temporary)

    def delete(self, key: str) -> None:
        """Remove an object if it is there."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(key))
        except IsADirectoryError:
            self.check_place(key)
            raise

    def publish(self, temporary: str, key: str) -> None:
        """Give a file its key, durably. Raises CorruptData if a directory is in its place."""
        _make_folder(self.root, os.path.dirname(key))
        try:
            os.rename(temporary, self.path(key))
        except IsADirectoryError:
            self.check_place(key)
            raise
        _sync_folder(os.path.dirname(self.path(key)))

    def temporary(self) -> str:
        """A path under `tmp/` that is new."""
        _make_folder(self.root, layout.TMP)
        return os.path.join(self.root, layout.TMP, secrets.token_hex(16))

    def _write_temporary(self, pieces: Sequence[Octets]) -> str:
        """Write and fsync a temporary file; returns its path."""
        path = self.temporary()
        descriptor = os.open(path, _WRITE, 0o644)
        with _removed_on_error(path):
            try:
                write_full(descriptor, [memoryview(piece) for piece in pieces], 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return path


def write_full(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    """Write all of `pieces` at `offset`. With O_DIRECT a short write goes on at a page boundary."""
    pieces = [piece.cast("B") for piece in pieces if len(piece)]
    while pieces:
        done = os.pwritev(descriptor, pieces[:_MAX_PIECES], offset)
        offset += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = pieces[0][done:]


def open_direct(path: str) -> int:
    """A new file for writing, past the page cache where the filesystem has O_DIRECT."""
    try:
        return os.open(path, _WRITE | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, _WRITE, 0o644)


def _kind_of(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    return "a directory" if stat.S_ISDIR(mode) else "something else"


def _read_whole(descriptor: int, check: SizeCheck | None, *, map_large: bool) -> Octets:
    size = os.fstat(descriptor).st_size
    if check is not None and size > UNCHECKED_BYTES:
        beginning = bytearray(UNCHECKED_BYTES)
        check(size, memoryview(beginning)[: _read_full(descriptor, memoryview(beginning), 0)])
    if map_large and size >= MAP_FROM_BYTES:
        return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
    raw = bytearray(size)
    return memoryview(raw)[: _read_full(descriptor, memoryview(raw), 0)].toreadonly()


def _read_full(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset`; returns the bytes read, fewer only at the end of the file."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not got:
            break
        done += got
    return done


def _link(existing: str, new: str) -> bool:
    """`link(2)`; True if this call made `new`, even where the answer was lost on the way."""
    try:
        os.link(existing, new)
    except FileExistsError:
        return os.stat(existing).st_nlink == 2
    return True


@contextlib.contextmanager
def _removed_on_error(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _make_folder(root: str, relative: str) -> None:
    """Create a folder below `root` and make it durable, if it is not there."""
    path = os.path.join(root, relative)
    if os.path.isdir(path):
        return
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(os.path.dirname(folder))


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list(root: str, prefix: str) -> list[ObjectFacts]:
    found: list[ObjectFacts] = []
    folders = [prefix.rstrip("/")]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(os.path.join(root, folder)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            key = f"{folder}/{entry.name}"
            if _is_folder(entry) and not layout.is_object_key(key):
                if key.count("/") < _MAX_FOLDER_DEPTH:
                    folders.append(key)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_object = stat.S_ISREG(status.st_mode)
                found.append(ObjectFacts(key, status.st_size, status.st_mtime_ns, is_object))
    return sorted(found, key=lambda facts: facts.key)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a symbolic link to one: folders may lie on several disks."""
    with contextlib.suppress(OSError):  # a link to itself
        return entry.is_dir()
    return False
