"""What lies where in a cache, and whether a directory can be one. See docs/node-cache.md."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from imgfmt.digest import Digest, digest_of
from imgfmt.errors import AccessDenied, Conflict, InvalidInput, NotFound
from transfer.cache.durable import read_file, replace_file, sync_folder
from transfer.cache.records import CacheRecord, DomainRecord
from transfer.filesystems import filesystem_type, is_remote
from transfer.oserrors import printable, translate
from transfer.session import session_of

DEFAULT_ROOT = "/var/lib/snapcask"

_DOMAIN_FOLDERS = (
    "images", "objects", "owners", "trees", "marks", "damage", "used", "pins", "partial", "locks",
    "flights",
)  # fmt: skip
_DOMAIN_DIGITS = 32


@dataclass(frozen=True, slots=True)
class DomainPaths:
    """Paths in one security domain, for who was let into it. `name` is its folder's."""

    root: str
    name: str

    @property
    def folder(self) -> str:
        """The domain's own folder."""
        return os.path.join(self.root, "domains", self.name)

    def _of(self, kind: str, name: str) -> str:
        return os.path.join(self.folder, kind, name)

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
        return os.path.join(self.root, "plan.lock")

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
    """The directory of a cache, opened and checked. `session` is that of its filesystem."""

    def __init__(self, path: str, *, allow_root_filesystem: bool = False) -> None:
        self.path = os.path.realpath(path)
        self.shown = printable(self.path)
        try:
            self._make(allow_root_filesystem=allow_root_filesystem)
            there = os.stat(self.path)
            self._identity = there.st_dev, there.st_ino
            self.session = session_of(self.path)
        except OSError as error:
            raise translate(error, f"cache {self.shown}") from error

    def _make(self, *, allow_root_filesystem: bool) -> None:
        existed = os.path.isdir(self.path)
        if not existed:
            above = os.path.dirname(self.path)
            if not os.path.isdir(above):
                raise NotFound(f"cache {self.shown}: {printable(above)} does not exist; make it")
            _check_filesystem(above, self.shown, allow_root_filesystem=allow_root_filesystem)
            os.mkdir(self.path, 0o700)
        _check_filesystem(self.path, self.shown, allow_root_filesystem=allow_root_filesystem)
        _check_owner(self.path, self.shown)
        record_path = os.path.join(self.path, "cache.msgpack")
        raw = read_file(record_path)
        if raw is None:
            names = set(os.listdir(self.path)) - {"lost+found"}
            if names - {"empty", "trash", "domains"} and not all(n[:5] == ".new-" for n in names):
                raise InvalidInput(
                    f"cache {self.shown} is no cache and not empty; name another directory"
                )
            for name in ("empty", "trash", "domains"):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.join(self.path, name), 0o755 if name == "empty" else 0o700)
            replace_file(record_path, [CacheRecord(os.urandom(16)).encode()], fsync=True)
        else:
            CacheRecord.decode(raw, f"record of cache {self.shown}")

    @property
    def empty(self) -> str:
        """The empty folder."""
        return os.path.join(self.path, "empty")

    @property
    def trash(self) -> str:
        """Where things are moved that are to be removed."""
        return os.path.join(self.path, "trash")

    def check_there(self) -> None:
        """Raise Conflict if the path leads elsewhere by now: removed, or hidden by a mount."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            raise Conflict(f"cache {self.shown} was removed meanwhile; start again") from None
        if (there.st_dev, there.st_ino) != self._identity:
            raise Conflict(
                f"cache {self.shown} is hidden by a later mount or was replaced; start again"
            )

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
        paths = DomainPaths(self.path, domain_name(store_uuid, scope))
        record_path = os.path.join(paths.folder, "domain.msgpack")
        record = DomainRecord(store_uuid, scope, url)
        with self.told():
            for folder in ("", *_DOMAIN_FOLDERS):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(os.path.join(paths.folder, folder), 0o700)
            if read_file(record_path) != record.encode():
                replace_file(record_path, [record.encode()], fsync=True)
                sync_folder(os.path.dirname(paths.folder))
        return paths

    def domains(self) -> list[tuple[DomainPaths, DomainRecord]]:
        """All security domains, for who looks after the cache."""
        found = []
        for name in sorted(os.listdir(os.path.join(self.path, "domains"))):
            paths = DomainPaths(self.path, name)
            raw = read_file(os.path.join(paths.folder, "domain.msgpack"))
            if raw is not None:
                what = f"record of domain {name} of cache {self.shown}"
                found.append((paths, DomainRecord.decode(raw, what)))
        return found


def _check_filesystem(path: str, shown: str, *, allow_root_filesystem: bool) -> None:
    kind = filesystem_type(path)
    if is_remote(path):
        raise InvalidInput(
            f"cache {shown} lies on {kind}, where locks do not end with a process; use a local disk"
        )
    if kind == "overlay":
        raise InvalidInput(
            f"cache {shown} lies on overlayfs, which vanishes with its container; name a local disk"
        )
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise AccessDenied(f"cache {shown}: its filesystem is mounted read-only")
    if not allow_root_filesystem and os.stat(path).st_dev == os.stat("/").st_dev:
        raise InvalidInput(
            f"cache {shown} lies on the root filesystem, which a full cache would stop; name a"
            " directory on another disk, or allow it with --allow-root-filesystem"
        )


def _check_owner(path: str, shown: str) -> None:
    there = os.stat(path)
    if there.st_uid != os.geteuid():
        raise AccessDenied(
            f"cache {shown} belongs to user {there.st_uid}, not to {os.geteuid()}; run as its owner"
        )
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(there.st_mode)
        raise AccessDenied(
            f"cache {shown} has mode {mode:04o}, so others can write to it; `chmod 0700` it"
        )
