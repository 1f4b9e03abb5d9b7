"""What lies where in a cache, and whether a directory can be one. See docs/node-cache.md."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from imgfmt.digest import Digest, digest_of
from imgfmt.errors import Conflict, InvalidImage, InvalidInput, NotFound
from transfer.cache.disks import MAIN, Disk, Disks, NewDisk, open_disks
from transfer.cache.durable import TEMPORARY, read_file, replace_file, sync_folder
from transfer.cache.folders import make_folder
from transfer.cache.locks import waited
from transfer.cache.records import CacheRecord, DomainRecord
from transfer.oserrors import printable, translate
from transfer.session import session_of

DEFAULT_ROOT = "/var/lib/snapcask"

_RECORD = "cache.msgpack"
_PLAN_LOCK = "plan.lock"
_FOLDERS = ("empty", "trash", "domains")
_DOMAIN_FOLDERS = (
    "images", "objects", "owners", "trees", "marks", "damage", "used", "pins", "partial", "locks",
    "flights", "places",
)  # fmt: skip
_DISK_FOLDERS = ("trees", "partial")
_DOMAIN_DIGITS = 32

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DomainPaths:
    """Paths in one security domain, for who was let into it. `name` is its folder's.

    `disks` are further disks, where the parts of trees lie.
    """

    root: str
    name: str
    disks: Disks = field(default_factory=Disks, compare=False)

    @property
    def folder(self) -> str:
        """The domain's own folder."""
        return os.path.join(self.root, "domains", self.name)

    def _of(self, kind: str, name: str) -> str:
        return os.path.join(self.folder, kind, name)

    def on(self, disk: Disk) -> DomainPaths:
        """The same domain on a further disk, which has parts of trees only."""
        return DomainPaths(disk.path, self.name)

    def make_on_disks(self) -> None:
        """Make the domain's folders on the further disks that count. Blocks."""
        for disk in self.disks.there():
            for folder in ("", *_DISK_FOLDERS):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.join(self.on(disk).folder, folder), 0o700)

    def image(self, image: Digest) -> str:
        """The image record."""
        return self._of("images", image.hex)

    def object(self, tree: Digest) -> str:
        """The tree object."""
        return self._of("objects", tree.hex)

    def owners(self, tree: Digest) -> str:
        """The tree's chunks by digest."""
        return self._of("owners", tree.hex)

    def tree(self, tree: Digest) -> str:
        """The tree's files."""
        return self._of("trees", tree.hex)

    def mark(self, tree: Digest) -> str:
        """What says that the tree is complete."""
        return self._of("marks", tree.hex)

    def damage(self, tree: Digest) -> str:
        """What says that the tree has bad chunks."""
        return self._of("damage", tree.hex)

    def used(self, tree: Digest) -> str:
        """Whose time is that of the last use."""
        return self._of("used", tree.hex)

    def pins(self, tree: Digest) -> str:
        """The folder of the tree's pins."""
        return self._of("pins", tree.hex)

    def partial(self, tree: Digest) -> str:
        """The tree while it is being built."""
        return self._of("partial", tree.hex)

    def journal(self, tree: Digest) -> str:
        """The chunks of the tree that is being built."""
        return self._of("partial", f"{tree.hex}.journal")

    def places(self, tree: Digest) -> str:
        """On which disk each entry of the tree lies."""
        return self._of("places", tree.hex)

    def lock(self, tree: Digest) -> str:
        """The tree's lock."""
        return self._of("locks", tree.hex)

    @property
    def flights(self) -> str:
        """The folder of what is being fetched."""
        return os.path.join(self.folder, "flights")

    @property
    def plan_lock(self) -> str:
        """Held while a plan is made; one for all domains, which share the space."""
        return os.path.join(self.root, _PLAN_LOCK)

    def listed(self, kind: str) -> list[Digest]:
        """The digests that are names in one of the domain's folders, ascending."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(filter(None, map(digest_named, os.listdir(self._of(kind, "")))))
        return []


def digest_named(name: str) -> Digest | None:
    """The digest that a name of 64 hexadecimal digits is; None for any other name."""
    try:
        return Digest.parse(f"blake3:{name}")
    except InvalidInput:
        return None


def domain_name(store_uuid: bytes, scope: str) -> str:
    """The name of the security domain of a store's UUID and a scope of credentials."""
    return digest_of(b"snapcask cache domain 1\0", store_uuid, scope.encode()).hex[:_DOMAIN_DIGITS]


class CacheRoot:
    """The directory of a cache, opened and checked. `session` is that of its filesystem.

    `disks` are the further disks that it has, among them those of the argument `disks`, which are
    added where they are new. Those that do not count are warned of. Without `create` there must be
    a cache, else it raises NotFound.
    """

    def __init__(
        self,
        path: str,
        *,
        allow_root_filesystem: bool = False,
        disks: Sequence[NewDisk] = (),
        create: bool = True,
    ) -> None:
        self.path = os.path.realpath(path)
        self.shown = printable(self.path)
        if not create and not os.path.lexists(os.path.join(self.path, _RECORD)):
            raise NotFound(f"there is no cache at {self.shown}; `snapcask prefetch` makes one")
        try:
            cache_id = self._make(allow_root_filesystem=allow_root_filesystem)
            there = os.stat(self.path)
            self._identity = there.st_dev, there.st_ino
            self.session = session_of(self.path)
            self.disks = open_disks(self.path, cache_id, disks)
        except OSError as error:
            raise translate(error, f"cache {self.shown}") from error
        for disk in self.disks:
            if disk.problem:
                _log.warning(disk.problem)

    def _make(self, *, allow_root_filesystem: bool) -> bytes:
        """Make what is absent, and check what is there; returns the id of the cache."""
        what = f"cache {self.shown}"
        on_root, allow = allow_root_filesystem, "--allow-root-filesystem"
        make_folder(self.path, what, on_root=on_root, allow=allow)
        record_path = os.path.join(self.path, _RECORD)
        raw = read_file(record_path)
        if raw is None and self._is_free():
            with waited(os.path.join(self.path, _PLAN_LOCK)):
                raw = read_file(record_path)  # another process may have been first
                if raw is None:
                    return self._begin(record_path)
        raw = raw or read_file(record_path)
        if raw is None:
            raise InvalidInput(
                f"cache {self.shown} is no cache and not empty; name another directory"
            )
        try:
            record = CacheRecord.decode(raw, f"record of {what}")
        except InvalidImage as error:
            raise InvalidImage(
                f"{error}; empty the directory: all in it can be fetched again"
            ) from error
        self._make_folders()  # someone may have removed one of them
        return record.id

    def _is_free(self) -> bool:
        """Whether a cache can be made here: nothing is there but what was begun of one."""
        names = set(os.listdir(self.path)) - {"lost+found", _PLAN_LOCK, *_FOLDERS}
        return all(name.startswith(TEMPORARY) for name in names)

    def _make_folders(self) -> None:
        for name in _FOLDERS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.join(self.path, name), 0o755 if name == "empty" else 0o700)

    def _begin(self, record_path: str) -> bytes:
        self._make_folders()
        record = CacheRecord(os.urandom(16))
        replace_file(record_path, [record.encode()], fsync=True)
        return record.id

    def roots(self) -> dict[bytes, str]:
        """Paths of the main disk and of the further ones that count, by their ids. Blocks."""
        return {MAIN: self.path, **{disk.id: disk.path for disk in self.disks.there()}}

    @property
    def empty(self) -> str:
        """The empty folder."""
        return os.path.join(self.path, "empty")

    @property
    def trash(self) -> str:
        """Where things are moved that are to be removed."""
        return os.path.join(self.path, "trash")

    def check_disks(self, ids: Iterable[bytes]) -> None:
        """Raise Conflict if one of these further disks does not count any more. Blocks."""
        for disk_id in ids:
            if self.disks.find(disk_id) is None:
                raise Conflict(
                    f"disk {self.disks.shown(disk_id)} of cache {self.shown} was removed, or is"
                    " hidden by a later mount; mount it and start again"
                )

    def check_there(self) -> None:
        """Raise Conflict if the path leads elsewhere by now, or nowhere: removed, or hidden."""
        try:
            there = os.stat(self.path)
            if (there.st_dev, there.st_ino) != self._identity:
                raise Conflict(
                    f"cache {self.shown} is hidden by a later mount or was replaced; start again"
                )
            os.stat(os.path.join(self.path, "domains"))
        except FileNotFoundError:
            raise Conflict(f"cache {self.shown} was removed meanwhile; start again") from None

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Errors of the system become ours; that the cache is gone comes first."""
        try:
            yield
        except NotFound:
            self.check_there()
            raise
        except OSError as error:
            self.check_there()
            raise translate(error, f"cache {self.shown}") from error

    def domain(self, store_uuid: bytes, scope: str, url: str) -> DomainPaths:
        """The security domain of a store and a scope of credentials, made if it is new."""
        paths = DomainPaths(self.path, domain_name(store_uuid, scope), self.disks)
        record_path = os.path.join(paths.folder, "domain.msgpack")
        record = DomainRecord(store_uuid, scope, url)
        with self.told():
            for folder in ("", *_DOMAIN_FOLDERS):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.join(paths.folder, folder), 0o700)
            if read_file(record_path) != record.encode():
                replace_file(record_path, [record.encode()], fsync=True)
                sync_folder(os.path.dirname(paths.folder))
            paths.make_on_disks()
        return paths

    def domains(self) -> list[tuple[DomainPaths, DomainRecord]]:
        """All security domains, for who looks after the cache."""
        found = []
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # somebody may have removed all of them
            names = sorted(os.listdir(os.path.join(self.path, "domains")))
        for name in names:
            paths = DomainPaths(self.path, name, self.disks)
            raw = read_file(os.path.join(paths.folder, "domain.msgpack"))
            if raw is not None:
                what = f"record of domain {name} of cache {self.shown}"
                found.append((paths, DomainRecord.decode(raw, what)))
        return found
