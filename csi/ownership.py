"""A volume whose files have another owner or mode than in the image, without copying their bytes.

A layer above the tree has every name again, with the attributes that are wanted and no content:
overlayfs (`metacopy=on`) takes the content from below. It costs one inode a file. All of it blocks.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass

from imgfmt.errors import Unsupported

OPTIONS = (("metacopy", "on"),)
"""Mount options that such a layer needs."""

_NO_CONTENT = "trusted.overlay.metacopy"


@dataclass(frozen=True, slots=True)
class Owner:
    """What all files are to have; None leaves it as it is.

    `mode` are the nine permission bits of files; directories can be searched by whom they can be
    read.
    """

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    def apply(self, path: str, like: os.stat_result) -> None:
        """Give `path`, just made, its attributes; all else is as in `like`."""
        uid = like.st_uid if self.uid is None else self.uid
        gid = like.st_gid if self.gid is None else self.gid
        os.chown(path, uid, gid, follow_symlinks=False)
        if not stat.S_ISLNK(like.st_mode):
            os.chmod(path, self._mode(like.st_mode))
        times = like.st_mtime_ns, like.st_mtime_ns
        os.utime(path, ns=times, follow_symlinks=False)

    def _mode(self, mode: int) -> int:
        if self.mode is None:
            return stat.S_IMODE(mode)
        searchable = (self.mode & 0o444) >> 2 if stat.S_ISDIR(mode) else 0
        return self.mode | searchable


AS_STORED = Owner()


def make_layer(tree: str, layer: str, owner: Owner) -> None:
    """Make the folder `layer`, in place of any that is there, to lie above the folder `tree`."""
    shutil.rmtree(layer, ignore_errors=True)
    os.makedirs(layer, mode=0o700)
    for above, folders, files in os.walk(tree):
        there = layer if above == tree else os.path.join(layer, os.path.relpath(above, tree))
        for name in folders + files:
            _make_entry(os.path.join(above, name), os.path.join(there, name), owner)
    for above, _, _ in os.walk(tree, topdown=False):  # last: making entries changes times
        there = layer if above == tree else os.path.join(layer, os.path.relpath(above, tree))
        owner.apply(there, os.lstat(above))


def _make_entry(original: str, path: str, owner: Owner) -> None:
    like = os.lstat(original)
    if stat.S_ISDIR(like.st_mode):
        os.mkdir(path, 0o700)
        return
    if stat.S_ISLNK(like.st_mode):
        os.symlink(os.readlink(original), path)
    else:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, like.st_size)
            if like.st_size:
                os.setxattr(descriptor, _NO_CONTENT, b"")
        except OSError as error:
            raise Unsupported(
                "uid, gid and mode need a cache on a filesystem with trusted attributes"
            ) from error
        finally:
            os.close(descriptor)
    owner.apply(path, like)
