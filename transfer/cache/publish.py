"""Mounting complete images of the cache, and undoing it. No store is asked. All of it blocks."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Sequence

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, CorruptData, InvalidInput, NotFound, Unsupported
from imgfmt.image import Member
from transfer.cache.layout import CacheRoot, DomainPaths, digest_named
from transfer.cache.locks import Lock, lock
from transfer.cache.merged import merged
from transfer.cache.owners import is_sound, read_mark
from transfer.cache.places import missing_part, part_folders
from transfer.cache.usage import (
    MOUNT_PIN,
    add_pin,
    new_pin,
    remove_mount_pin,
    remove_pin,
    touch,
    volume_id,
)
from transfer.cache.warm import local_image
from transfer.mounts import Mounted, mount_tree, mounts, unmount
from transfer.oserrors import printable, translate
from transfer.pull import choose_members

_TRIES = 20
_PAUSE_S = 0.01


def mount_image(
    cache: CacheRoot,
    paths: DomainPaths,
    digest: Digest,
    directory: str,
    *,
    member: str | None = None,
    volume: str | None = None,
) -> list[Mounted]:
    """Mount an image of the domain at the existing `directory`, read-only at the superblock.

    The only member, or the one named, is the directory; else each is a subdirectory of its name,
    which is made. Raises NotFound unless it is all in the cache; then nothing is mounted.
    InvalidInput for a directory that would hide the cache or lies in it.
    """
    directory = _place(cache, directory)
    members = choose_members(local_image(paths, digest), digest, member)
    volume = volume or volume_id()
    done: list[Mounted] = []
    made: list[str] = []
    try:
        for at, own_volume, tree in _places(members, directory, volume):
            if len(members) > 1 and _make_place(at):
                made.append(at)
            mount_one(cache, paths, tree, at, own_volume)
            done.append(Mounted(own_volume, tree.hex, at))
    except BaseException:
        for mounted in reversed(done):
            _undo(cache, mounted)
        for at in made:
            with contextlib.suppress(OSError):
                os.rmdir(at)
        raise
    return done


def _place(cache: CacheRoot, directory: str) -> str:
    """The directory without links. Raises InvalidInput where nothing may be mounted."""
    if not directory:
        raise InvalidInput("no directory to mount at is given")
    place = os.path.realpath(directory)
    for root in cache.roots().values():
        own = os.path.realpath(root)
        if os.path.commonpath((place, own)) in (place, own):
            raise InvalidInput(
                f"a mount at {printable(directory)} would hide the cache at {printable(root)} or"
                " parts of it; mount somewhere else"
            )
    return place


def _places(
    members: Sequence[Member], directory: str, volume: str
) -> list[tuple[str, str, Digest]]:
    if len(members) == 1:
        return [(directory, volume, members[0].tree)]
    return [
        (os.path.join(directory, member.name.replace("/", "+")), f"{volume}.{i}", member.tree)
        for i, member in enumerate(members)
    ]


def _make_place(at: str) -> bool:
    """Make the directory of a member; says whether it is new. Raises where a link or file is."""
    try:
        os.mkdir(at)
    except FileExistsError:
        if stat.S_ISDIR(os.lstat(at).st_mode):
            return False
        raise InvalidInput(
            f"{printable(at)} is in the way: a member is to be mounted there, and it is no"
            " directory; remove it"
        ) from None
    except OSError as error:
        raise translate(error, printable(at)) from error
    return True


def mount_one(
    cache: CacheRoot,
    paths: DomainPaths,
    tree: Digest,
    directory: str,
    volume: str,
    *,
    mount: Callable[[str], None] | None = None,
    in_table: bool = True,
) -> None:
    """Mount one tree of the domain. It is pinned before, and kept from removal meanwhile.

    `mount`, where given, mounts the folder that it is handed in a way of its own; a tree on several
    disks is merged there, until it returns. Where that can't
    be told from the mount table (`in_table`), the pin stays until somebody removes it.
    """
    pin_id = MOUNT_PIN + volume
    pin = new_pin("mounted", directory=directory if in_table else "")
    with cache.told(), _reading(paths, tree):
        if not is_sound(paths, tree, cache.session):
            _refuse(paths, tree)
        mark = read_mark(paths, tree)
        folders = part_folders(paths, tree, mark.disks if mark is not None else ())
        if len(folders) > 1 and not in_table:
            raise Unsupported(
                f"tree {tree.short} lies on several disks, which a bind mount can't merge; use an"
                " overlay"
            )
        add_pin(paths, tree, pin_id, pin, fsync=False)
        try:
            if mount is None:
                mount_tree(folders[0], cache.empty, volume, directory, parts=folders[1:])
            else:
                with merged(cache, folders) as folder:
                    mount(folder)
        except BaseException:
            remove_pin(paths, tree, pin_id)
            raise
        touch(paths, tree)


def _reading(paths: DomainPaths, tree: Digest) -> Lock:
    for _ in range(_TRIES):
        held = lock(paths.lock(tree), shared=True, wait=False)
        if held is not None:
            return held
        time.sleep(_PAUSE_S)
    raise Conflict(f"tree {tree.short} is being built or removed; try again")


def _refuse(paths: DomainPaths, tree: Digest) -> None:
    if os.path.exists(paths.damage(tree)):
        raise CorruptData(f"tree {tree.short} has damaged chunks; `snapcask prefetch` mends it")
    mark = read_mark(paths, tree)
    if mark is not None and (missing := missing_part(paths, mark)):
        raise NotFound(
            f"tree {tree.short} {missing}; mount the disk, or `snapcask prefetch` builds it again"
        )
    if mark is not None:
        raise NotFound(
            f"tree {tree.short} was written without fsync before a restart; `snapcask prefetch`"
            " reads it again"
        )
    raise NotFound(f"tree {tree.short} is not in the cache; `snapcask prefetch` fetches it")


def unmount_image(cache: CacheRoot | None, directory: str) -> list[Mounted]:
    """Undo `mount_image`: at `directory`, or else at its subdirectories. Raises NotFound.

    Without the `cache` the pins of the mounts stay in it until the machine starts again.
    """
    at = os.path.realpath(directory)
    found = [m for m in mounts() if m.directory == at]
    found = found or [m for m in mounts() if os.path.dirname(m.directory) == at]
    if not found:
        raise NotFound(f"nothing of snapcask is mounted at {printable(at)}")
    for mounted in reversed(found):
        _undo(cache, mounted)
    return found


def _undo(cache: CacheRoot | None, mounted: Mounted) -> None:
    unmount(mounted.directory)
    tree = digest_named(mounted.tree)
    if tree is not None and cache is not None:
        for paths, _ in cache.domains():
            remove_mount_pin(paths, tree, mounted.volume)
