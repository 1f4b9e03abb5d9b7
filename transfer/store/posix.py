"""A store in a directory: a local disk, an NFS mount, a PVC (SPEC.md sections 6.1, 8 and 9).

Objects appear whole: written under `tmp/`, fsynced, renamed or linked, the folder fsynced. Nothing
relies on advisory locks.
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
from imgfmt.errors import Conflict, CorruptData, InvalidImage, Unsupported
from imgfmt.reference import ReferenceRecord, standing_in
from imgfmt.sizes import check_size
from transfer.filesystems import is_remote
from transfer.oserrors import printable, translate
from transfer.store import surroundings
from transfer.store.base import (
    UNCHECKED_BYTES,
    ObjectFacts,
    PackSink,
    SizeCheck,
    StoredReference,
)
from transfer.store.unfinished import is_temporary
from transfer.tasks import finished
from transfer.threads import Threads

MAP_FROM_BYTES = UNCHECKED_BYTES
KEPT_GENERATIONS = 32
_N_WRITES = 2
_MAX_PIECES = 1024
_MAX_FOLDER_DEPTH = 3
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

T = TypeVar("T")


class PosixStore:
    """A `transfer.store.base.Store` below the directory `root`, which need not exist yet."""

    def __init__(self, root: str, *, n_threads: int = 4) -> None:
        self.root = os.path.abspath(root)
        self._threads = Threads("store", n_threads)
        self._map = not (os.path.isdir(self.root) and is_remote(self.root))

    @property
    def url(self) -> str:
        """The directory's path."""
        return self.root

    @property
    def n_writes(self) -> int:
        """See `Store.n_writes`: a disk is busy with few, and more fill the CPU's cache."""
        return _N_WRITES

    def close(self) -> None:
        """End the store's threads."""
        self._threads.close()

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key)

    def _name(self, key: str) -> str:
        return f"{key} in store {printable(self.root)}"

    async def _run(self, key: str, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except OSError as error:
            raise translate(error, self._name(key)) from error

    def _check_file(self, key: str, mode: int) -> None:
        """Raise CorruptData unless this is the mode of a file."""
        if not stat.S_ISREG(mode):
            place = "a file" if layout.is_object_key(key) else "a file or folder"
            raise CorruptData(
                f"{self._name(key)} is {_kind_of(mode)} where {place} belongs; move it away"
            )

    def _check_place(self, key: str) -> None:
        """Raise CorruptData if something else than a file is where an object is to be."""
        with contextlib.suppress(FileNotFoundError):
            self._check_file(key, os.stat(self._path(key), follow_symlinks=False).st_mode)

    def _check_folder(self, prefix: str) -> None:
        """Raise CorruptData if something else than a folder is there."""
        path = self._path(prefix.rstrip("/"))
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not os.path.isdir(path):
                raise CorruptData(
                    f"{self._name(prefix)} is {_kind_of(mode)} where a folder belongs; move it away"
                )

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """A descriptor of an object, for reading. Raises CorruptData for all but a file."""
        try:
            descriptor = os.open(self._path(key), _READ)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                self._check_place(key)
            raise
        try:
            self._check_file(key, os.fstat(descriptor).st_mode)
            yield descriptor
        finally:
            os.close(descriptor)

    async def get(self, key: str, check: SizeCheck | None = None) -> Octets:
        """See `Store.get`. Large objects on local filesystems are mapped, not read."""

        def read() -> Octets:
            with self._opened(key) as descriptor:
                return _read_whole(descriptor, check, map_large=self._map)

        return await self._run(key, read)

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""

        def read() -> int:
            with self._opened(key) as descriptor:
                return _read_full(descriptor, buffer, offset)

        found = await self._run(key, read)
        if found != len(buffer):
            end = offset + len(buffer)
            raise CorruptData(f"{self._name(key)} is cut short: it ends before byte {end}")

    async def facts(self, key: str) -> ObjectFacts | None:
        """See `Store.facts`."""

        def look() -> ObjectFacts | None:
            try:
                found = os.stat(self._path(key), follow_symlinks=False)
            except FileNotFoundError:
                return None
            self._check_file(key, found.st_mode)
            return ObjectFacts(key, found.st_size, found.st_mtime_ns)

        return await self._run(key, look)

    async def list_objects(self, prefix: str) -> list[ObjectFacts]:
        """See `Store.list_objects`."""

        def look() -> list[ObjectFacts]:
            self._check_folder(prefix)
            return _list(self.root, prefix)

        return await self._run(prefix, look)

    async def put(self, key: str, pieces: Sequence[Octets]) -> None:
        """See `Store.put`."""

        def write() -> None:
            temporary = self._write_temporary(pieces)
            with _removed_on_error(temporary):
                _make_folder(self.root, os.path.dirname(key))
                self._rename(temporary, key)

        await self._run(key, write)

    def _rename(self, temporary: str, key: str) -> None:
        """Give a file its key, durably. Raises CorruptData if a directory is in its place."""
        try:
            os.rename(temporary, self._path(key))
        except IsADirectoryError:
            self._check_place(key)
            raise
        _sync_folder(os.path.dirname(self._path(key)))

    async def create(self, key: str, pieces: Sequence[Octets]) -> bool:
        """See `Store.create`: by `link(2)`, which is atomic on NFS too."""

        def write() -> bool:
            temporary = self._write_temporary(pieces)
            try:
                _make_folder(self.root, os.path.dirname(key))
                created = _link(temporary, self._path(key))
                if created:
                    _sync_folder(os.path.dirname(self._path(key)))
                return created
            finally:
                os.unlink(temporary)

        return await self._run(key, write)

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""

        def remove() -> None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(key))
            except IsADirectoryError:
                self._check_place(key)
                raise

        await self._run(key, remove)

    def _temporary(self) -> str:
        _make_folder(self.root, layout.TMP)
        return os.path.join(self.root, layout.TMP, secrets.token_hex(16))

    def _write_temporary(self, pieces: Sequence[Octets]) -> str:
        """Write and fsync a temporary file; returns its path."""
        path = self._temporary()
        descriptor = os.open(path, _WRITE, 0o644)
        with _removed_on_error(path):
            try:
                _write_full(descriptor, [memoryview(piece) for piece in pieces], 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return path

    async def open_pack(self, key: str) -> PackSink:
        """See `Store.open_pack`: O_DIRECT where the filesystem has it."""
        pack = _PosixPack(self, key)
        try:
            await self._run(key, pack.open)
        except BaseException:
            await finished(pack.abort())
            raise
        return pack

    async def in_the_way(self) -> str | None:
        """See `Placed.in_the_way`."""
        return await self._run(layout.STORE_KEY, lambda: surroundings.in_the_way(self.root))

    async def enclosing_store(self) -> str | None:
        """See `Placed.enclosing_store`."""
        return await self._run(layout.STORE_KEY, lambda: surroundings.enclosing_store(self.root))

    async def unfinished_since_ns(self) -> list[int]:
        """See `Sweepable.unfinished_since_ns`."""
        return [facts.written_ns for facts in await self._temporaries()]

    async def remove_unfinished(self, before_ns: int) -> int:
        """See `Sweepable.remove_unfinished`."""
        old = [facts for facts in await self._temporaries() if facts.written_ns < before_ns]
        for facts in old:
            await self.delete(facts.key)
        return len(old)

    async def _temporaries(self) -> list[ObjectFacts]:
        found = await self.list_objects(layout.TMP)
        return [facts for facts in found if facts.is_object and is_temporary(facts.key)]

    async def read_reference(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.read_reference`. The version is the generation."""
        for _ in range(8):
            generations = await self._generations(name, tag)
            if not generations:
                return None
            newest = await self._read_generation(name, tag, generations[-1])
            if newest is not None:
                return newest
        raise Conflict(f"{name}:{tag} in store {self.root} changes too fast to be read; try again")

    async def reference_to_change(self, name: str, tag: str) -> StoredReference | None:
        """See `Store.reference_to_change`. The newest generation that can be read gives history."""
        try:
            return await self.read_reference(name, tag)
        except (CorruptData, InvalidImage) as error:
            problem = str(error)
        generations = await self._generations(name, tag)
        if not generations:
            return None
        newest, before = generations[-1], None
        for generation in reversed(generations):
            try:
                before = await self._read_generation(name, tag, generation)
            except (CorruptData, InvalidImage):
                continue
            if before is not None:
                break
        if before is not None and before.version == newest:
            return before  # it was mended meanwhile
        return await self._stand_in(name, tag, newest, before, problem)

    async def _stand_in(
        self, name: str, tag: str, newest: int, before: StoredReference | None, problem: str
    ) -> StoredReference:
        """What stands for generations up to `newest` that can't be read."""
        path = self._path(layout.generation_key(name, tag, newest))

        def written_ns() -> int:
            try:
                return os.stat(path, follow_symlinks=False).st_mtime_ns
            except FileNotFoundError:
                return 0

        record = standing_in(
            name,
            tag,
            before.record if before else None,
            newest - before.version if before else 1,
            await self._run(layout.REFS, written_ns),
        )
        return StoredReference(record, newest, problem)

    async def _generations(self, name: str, tag: str) -> list[int]:
        prefix = layout.reference_prefix(name, tag)

        def look() -> list[int]:
            self._check_folder(prefix)
            return _generations(self._path(prefix))

        return await self._run(prefix, look)

    async def _read_generation(
        self, name: str, tag: str, generation: int
    ) -> StoredReference | None:
        key = layout.generation_key(name, tag, generation)

        def check(size_bytes: int, beginning: Octets) -> None:
            check_size(key, size_bytes, beginning, self._name(key))

        def read() -> Octets | None:
            try:
                with self._opened(key) as descriptor:
                    return _read_whole(descriptor, check, map_large=False)
            except FileNotFoundError:
                return None

        raw = await self._run(key, read)
        if raw is None:
            return None
        record = ReferenceRecord.decode(raw, self._name(key))
        if (record.name, record.tag) != (name, tag):
            raise InvalidImage(f"{self._name(key)} is a record of {record.name}:{record.tag}")
        return StoredReference(record, generation)

    async def change_reference(self, record: ReferenceRecord, seen: StoredReference | None) -> None:
        """See `Store.change_reference`: SPEC.md section 6.1, file stores."""
        name, tag = record.name, record.tag
        generation = seen.version + 1 if seen else 1
        key = layout.generation_key(name, tag, generation)
        if not await self.create(key, [record.encode()]):
            there = await self._read_generation(name, tag, generation)
            if there is None or there.record.write_id != record.write_id:
                raise Conflict(
                    f"{name}:{tag} in store {self.root} was changed by someone else meanwhile"
                )
        newest = await self.read_reference(name, tag)
        if newest is None or not _holds(newest, record, generation):
            raise Conflict(
                f"{name}:{tag} in store {self.root} was changed by someone else meanwhile"
            )
        prefix = layout.reference_prefix(name, tag)
        await self._run(prefix, lambda: _remove_old_generations(self._path(prefix), newest.version))

    async def list_references(self) -> list[StoredReference]:
        """See `Store.list_references`."""
        found: set[tuple[str, str]] = set()
        for facts in await self.list_objects(layout.REFS):
            if facts.is_object or layout.is_object_key(facts.key):
                parsed = layout.parse_generation_key(facts.key)
            else:
                parsed = layout.parse_generation_key(f"{facts.key}/{0:016d}")
                if parsed is None:  # references may lie behind it
                    self._check_place(facts.key)
            if parsed is not None:
                found.add(parsed[:2])
        states = [await self._listed(name, tag) for name, tag in sorted(found)]
        return [state for state in states if state is not None]

    async def _listed(self, name: str, tag: str) -> StoredReference | None:
        try:
            return await self.reference_to_change(name, tag)
        except (CorruptData, InvalidImage, Unsupported) as error:
            return await self._stand_in(name, tag, 0, None, str(error))


class _PosixPack:
    """A pack under `tmp/`. See `transfer.store.base.PackSink`."""

    def __init__(self, store: PosixStore, key: str) -> None:
        self._store = store
        self._key = key
        self._path = ""
        self._descriptor: int | None = None

    def open(self) -> None:
        """Begin the file. Runs on a thread, which goes on where its caller is cancelled."""
        self._path = self._store._temporary()
        self._descriptor = _open_direct(self._path)

    async def write(self, offset: int, pieces: Sequence[memoryview]) -> None:
        descriptor = self._descriptor
        assert descriptor is not None
        await self._store._run(self._key, lambda: _write_full(descriptor, list(pieces), offset))

    async def commit(self) -> None:
        def publish() -> None:
            assert self._descriptor is not None
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            _make_folder(self._store.root, os.path.dirname(self._key))
            self._store._rename(self._path, self._key)

        await self._store._run(self._key, publish)

    async def abort(self) -> None:
        def drop() -> None:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

        await self._store._run(self._key, drop)


def _holds(newest: StoredReference, change: ReferenceRecord, generation: int) -> bool:
    """Whether `change` is the newest state, or was that `generation` by the newest one's history.

    It is neither if it was written where an old generation had been removed.
    """
    if newest.version <= generation:
        return newest.record.write_id == change.write_id
    past = newest.record.history[newest.version - generation - 1 :][:1]
    return bool(past) and past[0].target == change.target


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


def _write_full(descriptor: int, pieces: list[memoryview], offset: int) -> None:
    """Write all of `pieces` at `offset`. With O_DIRECT a short write goes on at a page boundary."""
    pieces = [piece.cast("B") for piece in pieces if len(piece)]
    while pieces:
        done = os.pwritev(descriptor, pieces[:_MAX_PIECES], offset)
        offset += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = pieces[0][done:]


def _open_direct(path: str) -> int:
    try:
        return os.open(path, _WRITE | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, _WRITE, 0o644)


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


def _generations(folder: str) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if len(name) == 16 and name.isdecimal())


def _remove_old_generations(folder: str, newest: int) -> None:
    for generation in _generations(folder):
        if generation <= newest - KEPT_GENERATIONS:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, f"{generation:016d}"))
