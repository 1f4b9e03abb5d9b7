"""From the operating system's errors to ours: the one table, and the one sentence for each."""

from __future__ import annotations

import errno
import os

from imgfmt.errors import (
    AccessDenied,
    ImageError,
    InvalidInput,
    NotFound,
    OutOfResources,
    StoreUnavailable,
)

_ADVICE: dict[int, tuple[type[ImageError], str]] = {
    errno.ENOENT: (NotFound, "it does not exist"),
    errno.ENOTDIR: (NotFound, "a part of its path is not a directory"),
    errno.EACCES: (AccessDenied, "permission denied; check owner and mode, or run as another user"),
    errno.EPERM: (AccessDenied, "operation not permitted; check owner and mode, or run as root"),
    errno.EROFS: (AccessDenied, "its filesystem is mounted read-only"),
    errno.ENOSPC: (OutOfResources, "no space left on its filesystem; free some and try again"),
    errno.EDQUOT: (OutOfResources, "the disk quota is used up; free some space and try again"),
    errno.EFBIG: (OutOfResources, "the filesystem does not take a file of this size"),
    errno.EMFILE: (OutOfResources, "too many open files; raise `ulimit -n`"),
    errno.ENFILE: (OutOfResources, "the system has too many open files"),
    errno.ENOMEM: (OutOfResources, "out of memory"),
    errno.ENAMETOOLONG: (InvalidInput, "the path is too long; use a shorter directory"),
    errno.ELOOP: (InvalidInput, "it is a symbolic link where none is expected"),
    errno.EISDIR: (InvalidInput, "it is a directory"),
    errno.EEXIST: (InvalidInput, "it exists already"),
    errno.ENOTEMPTY: (InvalidInput, "it is not empty"),
    errno.ESTALE: (StoreUnavailable, "its network filesystem lost it (stale handle); try again"),
}


def translate(error: OSError, what: str) -> ImageError:
    """The error to raise (`from error`) when the system refused something about `what`."""
    code = error.errno or 0
    kind, advice = _ADVICE.get(
        code, (StoreUnavailable, f"{os.strerror(code) if code else error}; try again")
    )
    return kind(f"{what}: {advice}")


def printable(path: str | bytes) -> str:
    """A path for a message: one line, whatever bytes it has."""
    text = os.fsdecode(path)
    return text if text.isprintable() else repr(os.fsencode(path))[2:-1]
