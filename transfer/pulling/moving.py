"""Moving and removing what lies in a directory, by its descriptor. Follows no link. Blocks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat

_RENAME_NOREPLACE = 1
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def remove_tree(name: bytes, folder: int) -> None:
    """Remove a file, or a directory and all below it whatever its modes. Follows no link."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        pass
    else:
        return
    directories = [name]
    for directory in directories:  # grows on the way
        os.chmod(directory, 0o700, dir_fd=folder)
        descriptor = os.open(directory, _DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            for entry in list(os.scandir(descriptor)):
                if entry.is_dir(follow_symlinks=False):
                    directories.append(os.path.join(directory, os.fsencode(entry.name)))
                else:
                    os.unlink(entry.name, dir_fd=descriptor)
        finally:
            os.close(descriptor)
    for directory in reversed(directories):
        os.rmdir(directory, dir_fd=folder)


def move(name: bytes, source: int, target: int) -> None:
    """Move `name` to another directory. To be moved, a directory must be writable."""
    try:
        rename(name, source, name, target)
    except PermissionError:
        there = os.stat(name, dir_fd=source, follow_symlinks=False)
        if not stat.S_ISDIR(there.st_mode):
            raise
        mode = stat.S_IMODE(there.st_mode)
        os.chmod(name, mode | stat.S_IWUSR, dir_fd=source)
        rename(name, source, name, target)
        os.chmod(name, mode, dir_fd=target)


def rename(name: bytes, folder: int, new_name: bytes, new_folder: int) -> None:
    """Rename without replacing anything, atomically where the filesystem can."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if libc.renameat2(folder, name, new_folder, new_name, _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
    with contextlib.suppress(FileNotFoundError):
        os.stat(new_name, dir_fd=new_folder, follow_symlinks=False)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=new_folder)
