"""From what a user writes to the store that it names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from imgfmt.errors import InvalidInput, Unsupported
from transfer.store.base import ClosableStore
from transfer.store.posix import PosixStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOCAL_HOSTS = ("", "localhost")


def open_store(
    url: str, *, environment: Mapping[str, str] = os.environ, **s3_options: Any
) -> ClosableStore:
    """The store at a directory's path, `file://` or `s3://` URL. Close it in the end.

    Nothing is read yet. `s3_options` are fields of `S3Config` that go before what the AWS variables
    of `environment` say. Raises InvalidInput for anything that can't be a store.
    """
    found = _SCHEME.fullmatch(url)
    if found is None:
        return PosixStore(_checked(url, url))
    match found[1].lower():
        case "file":
            return PosixStore(_checked(_path_of(found[2], url), url))
        case "s3":
            return _open_bucket(url, environment, s3_options)
        case scheme:
            raise InvalidInput(
                f"store {url}: {scheme}:// is not known; use a directory's path, a file:// or"
                " s3:// URL"
            )


def _open_bucket(
    url: str, environment: Mapping[str, str], options: Mapping[str, Any]
) -> ClosableStore:
    try:
        from transfer.store.s3.config import S3Config
        from transfer.store.s3.options import split_options
        from transfer.store.s3.store import S3Store
    except ImportError as error:
        raise Unsupported(
            f"store {url}: S3 needs the package {error.name}; install snapcask[s3]"
        ) from error
    address, stated = split_options(url)
    return S3Store(S3Config.of_url(address, environment, **{**stated, **options}))


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
