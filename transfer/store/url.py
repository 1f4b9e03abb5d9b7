"""From what a user writes to the store that it names."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote_to_bytes

from imgfmt.errors import InvalidInput, Unsupported
from transfer.store.posix import PosixStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_HOSTS = ("", "localhost")


def open_store(url: str) -> PosixStore:
    """The store at a directory's path or `file://` URL. Nothing is read yet; close it in the end.

    Raises Unsupported for `s3://`, InvalidInput for anything else that names no directory here.
    """
    found = _SCHEME.fullmatch(url)
    if found is None:
        return PosixStore(_checked(url, url))
    match found[1].lower():
        case "file":
            return PosixStore(_checked(_path_of(found[2], url), url))
        case "s3":
            raise Unsupported(
                f"store {url}: this version has no S3 stores; use a directory, also of a mounted"
                " filesystem"
            )
        case scheme:
            raise InvalidInput(
                f"store {url}: {scheme}:// is not known; use a directory's path or file:// URL"
            )


def _path_of(rest: str, url: str) -> str:
    """The path in what follows `file://`, percent signs decoded."""
    host, slash, path = rest.partition("/")
    if host not in _LOCAL_HOSTS:
        raise InvalidInput(f"store {url}: a file:// URL names no host; use file:///path")
    return os.fsdecode(unquote_to_bytes(slash + path))


def _checked(path: str, url: str) -> str:
    if not path or "\0" in path:
        raise InvalidInput(f"store {url!r} names no directory")
    return path
