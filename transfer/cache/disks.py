"""The further disks of a cache: adding, opening and forgetting them. See docs/node-cache.md.

A disk is a directory on another filesystem than the cache. It counts while its path leads to the
directory that has its record; what does not count is told of, and never written to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imgfmt.digest import Octets, digest_of
from imgfmt.errors import ImageError, InvalidInput, NotFound
from imgfmt.wire import decode_record, encode_record
from transfer.cache.durable import TEMPORARY, read_file, replace_file
from transfer.cache.folders import check_owner, check_writable, make_folder
from transfer.cache.locks import waited
from transfer.cache.records import ID_BYTES, MAX_DISKS
from transfer.oserrors import printable, translate
from transfer.session import SESSION_BYTES, session_of

MAIN = b""
"""Stands for the id of the main disk, which is the cache's own directory."""

ByDisk = Mapping[bytes, int]
"""Bytes for ids of disks; 0 for those that are not in it."""

_RECORD = "disk.msgpack"
_ALL = "disks.msgpack"
_PATH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NewDisk:
    """A directory that is to be a disk of the cache, if it is not one already."""

    path: str
    on_root: bool = False


@dataclass(frozen=True, slots=True)
class Disk:
    """A further disk as it was found. `problem` says why it does not count, or is empty.

    `identity` are device and inode of the directory, `session` is that of its filesystem.
    """

    id: bytes
    path: str
    identity: tuple[int, int] = (0, 0)
    session: bytes = bytes(SESSION_BYTES)
    problem: str = ""

    def is_there(self) -> bool:
        """Whether its path still leads to it. Blocks."""
        if self.problem:
            return False
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == self.identity


class Disks:
    """All further disks of the cache at `cache`, in the order in which they were added.

    One that does not count, or is not known, is looked for again whenever it is asked for, since
    it may have been mounted or added meanwhile.
    """

    def __init__(self, cache: str = "", cache_id: bytes = b"") -> None:
        self._cache = cache
        self._cache_id = cache_id
        self._by_id: dict[bytes, Disk] = {}
        if cache:
            self._read()

    def _read(self) -> None:
        known = _read_all(self._cache)
        self._by_id = {i: _look(self._cache, self._cache_id, i, path) for i, path in known.items()}

    def __iter__(self) -> Iterator[Disk]:
        return iter(self._by_id.values())

    def there(self) -> list[Disk]:
        """Those that count. Blocks."""
        found = [self.find(disk_id) for disk_id in self._by_id]
        return [disk for disk in found if disk is not None]

    def find(self, disk_id: bytes) -> Disk | None:
        """The disk with this id, if it counts. Blocks."""
        disk = self._by_id.get(disk_id)
        if (disk is None or not disk.is_there()) and self._cache:
            self._read()
            disk = self._by_id.get(disk_id)
        return disk if disk is not None and disk.is_there() else None

    def shown(self, disk_id: bytes) -> str:
        """The path of a disk for messages, or its id if it was forgotten."""
        disk = self._by_id.get(disk_id)
        return printable(disk.path) if disk is not None else f"of id {disk_id.hex()[:8]}"

    def session(self, main: bytes, ids: Iterable[bytes]) -> bytes:
        """The session of what lies on the main disk, whose session is `main`, and on these."""
        sessions = [self._by_id[disk].session for disk in sorted(ids) if disk in self._by_id]
        if not sessions:
            return main
        return digest_of(b"snapcask sessions 1\0", main, *sessions).raw[:SESSION_BYTES]


def free_of(path: str) -> tuple[int, int]:
    """Free and all bytes of the filesystem that holds `path`, for this user. Blocks."""
    found = os.statvfs(path)
    used = found.f_blocks - found.f_bfree
    return found.f_bavail * found.f_frsize, (used + found.f_bavail) * found.f_frsize


def open_disks(cache: str, cache_id: bytes, added: Sequence[NewDisk]) -> Disks:
    """The disks of the cache at `cache`, after those of `added` that are new were added.

    Raises InvalidInput, NotFound or AccessDenied for what can't be added. One that is known and
    does not count has a `problem`. Blocks.
    """
    if not all(new.path for new in added):
        raise InvalidInput(
            "a disk of the cache has an empty path; leave it out, or name a directory"
        )
    wanted = [NewDisk(os.path.realpath(new.path), new.on_root) for new in added]
    known = _read_all(cache)
    if any(new.path not in known.values() for new in wanted):
        with waited(os.path.join(cache, "plan.lock")):
            known = _read_all(cache)
            for new in wanted:
                if new.path not in known.values():
                    known = {**known, **_add(cache, cache_id, known, new)}
            _write_all(cache, known)
    return Disks(cache, cache_id)


def forget_disk(cache: str, path: str) -> None:
    """Take a disk out of the cache; what lies on it stays there. Raises NotFound. Blocks."""
    with waited(os.path.join(cache, "plan.lock")):
        known = _read_all(cache)
        left = {i: p for i, p in known.items() if p not in (path, os.path.realpath(path))}
        if left == known:
            listed = ", ".join(map(printable, known.values())) or "none"
            raise NotFound(f"{printable(path)} is no disk of the cache, which has: {listed}")
        _write_all(cache, left)


def _read_all(cache: str) -> dict[bytes, str]:
    """Ids and paths of the disks, as the cache has them. Raises InvalidImage or Unsupported."""
    raw = read_file(os.path.join(cache, _ALL))
    if raw is None:
        return {}
    fields = decode_record(raw, "cache-disks", f"list of disks of cache {printable(cache)}")
    found = {}
    for item in fields.array("disks", MAX_DISKS):
        if not (isinstance(item, list) and len(item) == 2):
            fields.fail("'disks' holds something that is no disk")
        disk, path = item
        if not (isinstance(disk, bytes) and len(disk) == ID_BYTES and isinstance(path, bytes)):
            fields.fail("'disks' holds something that is no disk")
        found[disk] = os.fsdecode(path)
    fields.done()
    return found


def _write_all(cache: str, disks: Mapping[bytes, str]) -> None:
    listed = [[disk, os.fsencode(path)] for disk, path in disks.items()]
    raw = encode_record("cache-disks", {"disks": listed})
    replace_file(os.path.join(cache, _ALL), [raw], fsync=True)


def _add(cache: str, cache_id: bytes, known: Mapping[bytes, str], new: NewDisk) -> dict[bytes, str]:
    """Make a directory a disk of the cache; returns its id and path."""
    what = f"disk {printable(new.path)}"
    if len(known) >= MAX_DISKS or len(os.fsencode(new.path)) > _PATH_BYTES:
        raise InvalidInput(f"{what}: a cache has at most {MAX_DISKS} disks, by usual paths")
    try:
        existed = os.path.isdir(new.path)
        make_folder(new.path, what, on_root=new.on_root, allow="--allow-root-disk")
        try:
            _check_apart(cache, known, new.path, what)
        except InvalidInput:
            if not existed:
                os.rmdir(new.path)
            raise
        disk_id = _record_of(new.path, cache_id, what)
        if disk_id is None:
            names = set(os.listdir(new.path)) - {"lost+found", "trash", "domains"}
            if not all(name.startswith(TEMPORARY) for name in names):
                raise InvalidInput(f"{what} is not empty; name another directory")
            disk_id = os.urandom(ID_BYTES)
        for name in ("trash", "domains"):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(new.path, name), 0o700)
        record = encode_record("cache-disk", {"cache": cache_id, "disk": disk_id})
        replace_file(os.path.join(new.path, _RECORD), [record], fsync=True)
    except OSError as error:
        raise translate(error, what) from error
    return {disk_id: new.path}


def _check_apart(cache: str, known: Mapping[bytes, str], path: str, what: str) -> None:
    """Raise InvalidInput if a directory lies on the filesystem of the cache or another disk."""
    for other in (cache, *known.values()):
        with contextlib.suppress(OSError):
            if os.stat(other).st_dev == os.stat(path).st_dev:
                raise InvalidInput(
                    f"{what} lies on the same filesystem as {printable(other)}; name a directory"
                    " on another disk"
                )


def _record_of(path: str, cache_id: bytes, what: str) -> bytes | None:
    """The id of the disk in a directory, if there is one. Raises InvalidInput for another cache's.

    Also raises InvalidImage or Unsupported.
    """
    raw: Octets | None = read_file(os.path.join(path, _RECORD))
    if raw is None:
        return None
    fields = decode_record(raw, "cache-disk", f"record of {what}")
    cache, disk = fields.raw("cache", ID_BYTES), fields.raw("disk", ID_BYTES)
    fields.done()
    if cache != cache_id:
        raise InvalidInput(f"{what} belongs to another cache; name another directory")
    return disk


def _look(cache: str, cache_id: bytes, disk_id: bytes, path: str) -> Disk:
    """Find out whether a known disk counts."""
    what = f"disk {printable(path)} of cache {printable(cache)}"
    tell = "; mount it, or take it out with `snapcask cache forget`"
    try:
        there = os.stat(path)
        found = _record_of(path, cache_id, what)
        if found is None:
            return Disk(
                disk_id, path, problem=f"{what} is hidden by another mount, or not mounted{tell}"
            )
        if found != disk_id:
            return Disk(
                disk_id, path, problem=f"{what} is another disk than the one recorded{tell}"
            )
        check_owner(path, what)
        check_writable(path, what)
        return Disk(disk_id, path, (there.st_dev, there.st_ino), session_of(path))
    except (FileNotFoundError, NotADirectoryError):
        return Disk(disk_id, path, problem=f"{what} is not there{tell}")
    except OSError as error:
        return Disk(disk_id, path, problem=f"{what}: {error.strerror}{tell}")
    except ImageError as error:
        return Disk(disk_id, path, problem=f"{what} is not used: {error}")
