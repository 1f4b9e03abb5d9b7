"""Where a pull builds a tree, so that its target is whole or not there at all.

A target that is absent is built beside its place and renamed to it. A target that is an empty
directory, perhaps a mount point, is built in a directory within and moved up; it is whole when its
marker file is there, and until then a note tells what was moved. A lock on the directory tells a
pull that is under way from one that was killed: the kernel drops it with the process. All this
blocks and belongs on a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator

from imgfmt.digest import Digest
from imgfmt.errors import Conflict, InvalidInput, OutOfResources
from transfer.filesystems import sync_filesystem
from transfer.oserrors import printable, translate
from transfer.pulling.move_note import is_untouched, moved_entries, write_note
from transfer.pulling.moving import move, remove_tree, rename
from transfer.pulling.names import (
    IN_PLACE,
    JOURNAL,
    MARKER,
    NEW_JOURNAL,
    NOTE,
    PARTIAL,
    is_marker,
    marker_of,
    name_beside,
)

_LOST_AND_FOUND = b"lost+found"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Staging:
    """One attempt to build `target`: `open`, fill `root`, `publish` or `abandon`, `close`.

    `root` is the descriptor of the directory to fill. `in_place` says that it lies in the target,
    whose top then can't have entries called MARKER or as in IN_PLACE. `journal` is the path of a
    file that may lie beside the directory to fill until the target is whole.
    """

    def __init__(self, target: str, digest: Digest) -> None:
        self.target = os.path.abspath(target)
        self.in_place = os.path.isdir(self.target)
        self.root = -1
        self._digest = digest
        self._shown = printable(self.target)
        self._folder = self.target if self.in_place else os.path.dirname(self.target)
        self._folder_descriptor = -1
        self._final_name = os.fsencode(os.path.basename(self.target))
        self._name = PARTIAL if self.in_place else name_beside(self._final_name, digest)
        self._made: list[bytes] = []
        self.journal = os.path.join(self._folder, os.fsdecode(self._name + JOURNAL))

    @property
    def filled(self) -> str:
        """The path of the directory to fill."""
        return os.path.join(self._folder, os.fsdecode(self._name))

    @property
    def has_left_over(self) -> bool:
        """Whether a pull that was killed left anything for `open` to keep. Needs no `open`."""
        note = os.path.join(self._folder, os.fsdecode(NOTE))
        return os.path.lexists(self.filled) or (self.in_place and os.path.lexists(note))

    def open(self, needed_bytes: int, *, keep: bool = False) -> None:
        """Make the directory to fill, in place of what a killed pull left there unless `keep`.

        Raises InvalidInput for a target that can't be made, Conflict if another pull is making it,
        OutOfResources if its filesystem has less than `needed_bytes` free; nothing is written then.
        """
        with self._told():
            self._open_folder()
            if self.in_place:
                self._lock(self._folder_descriptor)
                self._check_empty()
            moved = self._moved(keep=keep)
            if not self._names(None):
                if not moved:
                    self._drop_journal()  # of a directory that is gone
                self._check_space(needed_bytes)
            self._claim(keep=keep)
            self._move_down(moved)
            self._check_space(needed_bytes)

    def check(self, needed_bytes: int, *, keep: bool) -> None:
        """Raise what `open` would raise, another pull being under way excepted. Changes nothing."""
        with self._told():
            try:
                self._open_folder()
                if self.in_place:
                    self._check_empty()
                if keep or not self._names(None):  # else what is there makes room
                    self._check_space(needed_bytes)
            finally:
                self.close()

    def _open_folder(self) -> None:
        if not self.in_place and os.path.lexists(self.target):
            raise InvalidInput(f"{self._shown} exists; name a new or an empty directory")
        if not os.path.isdir(self._folder):
            raise InvalidInput(f"{printable(self._folder)} is no directory; make it first")
        self._folder_descriptor = os.open(self._folder, _DIRECTORY)

    def publish(self, finish_root: Callable[[int], None] | None, *, fsync: bool) -> None:
        """Make the target appear. `finish_root` is called with a descriptor of its root.

        Without one, a target that was there keeps its attributes and a new one gets usual ones.
        """
        if finish_root is None:
            finish_root = _keep if self.in_place else _open_to_all
        with self._told():
            if self.in_place:
                self._move_up(fsync=fsync)
            if fsync:
                sync_filesystem(self._folder)
            if self.in_place:
                self._mark(fsync=fsync)
                self._drop_journal()
                os.unlink(NOTE, dir_fd=self._folder_descriptor)
                finish_root(self._folder_descriptor)
            else:
                finish_root(self.root)
                if fsync:
                    os.fsync(self.root)
                self._check_ours()
                rename(
                    self._name, self._folder_descriptor, self._final_name, self._folder_descriptor
                )
            self._made.clear()
            if fsync:
                os.fsync(self._folder_descriptor)
            if not self.in_place:
                self._drop_journal()  # in place it was, before the root got its mode

    def leave(self) -> None:
        """Leave what was made to the next pull of the same image."""
        self._made.clear()

    def abandon(self) -> None:
        """Remove all that was made, as far as that is possible. Does nothing after `publish`."""
        if self._made:
            with contextlib.suppress(OSError):
                self._drop_journal()  # before what it speaks for
        for name in reversed(self._made):
            with contextlib.suppress(OSError):
                if name != self._name or self._names(self.root):
                    remove_tree(name, self._folder_descriptor)
        self._made.clear()

    def close(self) -> None:
        """Give up locks and descriptors."""
        for descriptor in {self.root, self._folder_descriptor} - {-1}:
            os.close(descriptor)
        self.root = self._folder_descriptor = -1

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the system become ours, about the target."""
        try:
            yield
        except OSError as error:
            raise translate(error, self._shown) from error

    def _check_empty(self) -> None:
        ignored = set(IN_PLACE)
        if os.path.ismount(self.target):
            ignored.add(_LOST_AND_FOUND)
        there = self._listed()
        if MARKER in there and is_marker(MARKER, self._folder_descriptor):
            raise InvalidInput(f"{self._shown} holds an image already")
        if NOTE in there and MARKER in there and self._is_empty_file(MARKER):
            ignored.add(MARKER)  # made, and not written yet
        names = there - ignored
        if names := names - moved_entries(self._folder_descriptor):
            example = printable(min(names))
            raise InvalidInput(
                f"{self._shown} is not empty, it holds {example}; name a new or an empty directory"
            )

    def _listed(self) -> set[bytes]:
        return {os.fsencode(name) for name in os.listdir(self._folder_descriptor)}

    def _is_empty_file(self, name: bytes) -> bool:
        there = os.stat(name, dir_fd=self._folder_descriptor, follow_symlinks=False)
        return stat.S_ISREG(there.st_mode) and there.st_size == 0

    def _moved(self, *, keep: bool) -> set[bytes]:
        """What a pull had moved up when it was killed and the journal still speaks for.

        Anything else that it had moved up is removed, and has to be fetched again.
        """
        folder = self._folder_descriptor
        if not self.in_place or NOTE not in self._listed():
            return set()
        moved = moved_entries(folder)
        if keep and os.path.lexists(self.journal) and is_untouched(self.filled, folder):
            return moved
        self._drop_journal()
        for name in moved:
            remove_tree(name, folder)
        return set()

    def _move_down(self, names: set[bytes]) -> None:
        """Put what was moved up back to the rest, and remove the note of it."""
        for name in sorted(names):
            move(name, self._folder_descriptor, self.root)
        if self.in_place and NOTE in (there := self._listed()):
            if MARKER in there:  # as `_check_empty` saw it
                os.unlink(MARKER, dir_fd=self._folder_descriptor)
            os.unlink(NOTE, dir_fd=self._folder_descriptor)

    def _drop_journal(self) -> None:
        for suffix in (JOURNAL, NEW_JOURNAL):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name + suffix, dir_fd=self._folder_descriptor)

    def _check_space(self, needed_bytes: int) -> None:
        found = os.fstatvfs(self._folder_descriptor)
        free_bytes = found.f_bavail * found.f_frsize
        if found.f_blocks and free_bytes < needed_bytes:
            raise OutOfResources(
                f"{self._shown} needs {needed_bytes} bytes, its filesystem has {free_bytes} bytes"
                " free; nothing was written"
            )

    def _names(self, descriptor: int | None) -> bool:
        """Whether the name of the directory to fill is taken, by `descriptor` if that is given."""
        try:
            there = os.stat(self._name, dir_fd=self._folder_descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return descriptor is None or os.path.samestat(there, os.fstat(descriptor))

    def _check_ours(self) -> None:
        if not self._names(self.root):
            raise Conflict(f"another pull to {self._shown} took over its directory")

    def _claim(self, *, keep: bool) -> None:
        """Own a directory to fill, new or left behind by a killed pull; empty unless `keep`."""
        while self.root < 0:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._name, 0o700, dir_fd=self._folder_descriptor)
            with contextlib.suppress(FileNotFoundError):
                self._take_over()
        self._made.append(self._name)
        os.fchmod(self.root, 0o700)
        if not keep:
            self.clear()

    def clear(self) -> None:
        """Empty the directory to fill, once there is no journal any more that speaks for it."""
        self._drop_journal()
        for name in os.listdir(self.root):
            remove_tree(os.fsencode(name), self.root)

    def _take_over(self) -> None:
        """Lock the directory to fill and make it `root`, if it still has its name then."""
        root = self._open_left_over()
        try:
            self._lock(root)
            if os.fstat(root).st_uid != os.geteuid() and self._others_write_beside():
                raise InvalidInput(f"{printable(self._name)} beside it belongs to somebody else")
            if self._names(root):
                self.root = root
        finally:
            if self.root != root:
                os.close(root)

    def _open_left_over(self) -> int:
        flags = _DIRECTORY | os.O_NOFOLLOW
        try:
            return os.open(self._name, flags, dir_fd=self._folder_descriptor)
        except PermissionError:  # it has the mode of the image's root already
            there = os.stat(self._name, dir_fd=self._folder_descriptor, follow_symlinks=False)
            if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.geteuid():
                raise
            os.chmod(self._name, 0o700, dir_fd=self._folder_descriptor)
        return os.open(self._name, flags, dir_fd=self._folder_descriptor)

    def _others_write_beside(self) -> bool:
        """Whether somebody else could have made the directory to fill.

        If not, we gave it to the owner of the image's root, and were killed before its rename.
        """
        folder = os.fstat(self._folder_descriptor)
        return folder.st_uid != os.geteuid() or bool(folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH))

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"another pull to {self._shown} is under way") from error
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOLCK, errno.EBADF):
                raise

    def _move_up(self, *, fsync: bool) -> None:
        """Give the target the children of the directory that was filled."""
        names = [os.fsencode(name) for name in os.listdir(self.root)]
        self._made.append(NOTE)
        write_note(names, self.root, self._folder_descriptor, fsync=fsync)
        for name in names:
            move(name, self.root, self._folder_descriptor)
            self._made.append(name)
        os.rmdir(self._name, dir_fd=self._folder_descriptor)
        self._made.remove(self._name)

    def _mark(self, *, fsync: bool) -> None:
        """Say that the target is whole."""
        marker = os.open(MARKER, _NEW_FILE, 0o644, dir_fd=self._folder_descriptor)
        self._made.append(MARKER)
        try:
            os.write(marker, marker_of(self._digest))
            if fsync:
                os.fsync(marker)
        finally:
            os.close(marker)


def _keep(root: int) -> None:
    """Change nothing."""


def _open_to_all(root: int) -> None:
    os.fchmod(root, 0o755)
