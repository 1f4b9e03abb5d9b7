"""The front door: the public Python API and the command line; nothing imports it.

    import snapcask

    snapcask.init_store("/data/store")
    report = snapcask.push("/dumps/worker-3", "llama/worker:v3", store="/data/store")
    snapcask.pull("llama/worker:v3", "/restore/worker", store="/data/store")
    with snapcask.open_image("llama/worker:v3", store="/data/store") as image:
        header = image.read("pagemap-1.img", 0, 4096)

These calls block, also where an event loop is running; `snapcask.aio` has the same as coroutines.
They raise subclasses of `ImageError` and nothing else of their own; each has a `kind`. A name is
loaded when it is first used, so that importing this costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from imgfmt.digest import Digest as Digest
    from imgfmt.errors import AccessDenied as AccessDenied
    from imgfmt.errors import Conflict as Conflict
    from imgfmt.errors import CorruptData as CorruptData
    from imgfmt.errors import ErrorKind as ErrorKind
    from imgfmt.errors import ImageError as ImageError
    from imgfmt.errors import Internal as Internal
    from imgfmt.errors import InvalidImage as InvalidImage
    from imgfmt.errors import InvalidInput as InvalidInput
    from imgfmt.errors import NotFound as NotFound
    from imgfmt.errors import OutOfResources as OutOfResources
    from imgfmt.errors import StoreUnavailable as StoreUnavailable
    from imgfmt.errors import Unsupported as Unsupported
    from imgfmt.store_record import StoreRecord as StoreRecord
    from imgfmt.tree import EntryType as EntryType
    from snapcask import aio as aio
    from snapcask.api import ImageHandle as ImageHandle
    from snapcask.api import init_store as init_store
    from snapcask.api import open_image as open_image
    from snapcask.api import pull as pull
    from snapcask.api import push as push
    from snapcask.api import verify as verify
    from snapcask.handles import EntryStat as EntryStat
    from snapcask.requests import MemberSource as MemberSource
    from transfer.progress import Progress as Progress
    from transfer.pull import PullReport as PullReport
    from transfer.push import PushReport as PushReport
    from transfer.verify import VerifyReport as VerifyReport

__version__ = "0.1.0"  # the build reads it from here, so printing it needs no metadata look-up

_ERRORS = (
    "AccessDenied", "Conflict", "CorruptData", "ErrorKind", "ImageError", "Internal",
    "InvalidImage", "InvalidInput", "NotFound", "OutOfResources", "StoreUnavailable", "Unsupported",
)  # fmt: skip
_HOMES = {
    **dict.fromkeys(_ERRORS, "imgfmt.errors"),
    **dict.fromkeys(("ImageHandle", "init_store", "open_image", "pull", "push", "verify"),
                    "snapcask.api"),
    "Digest": "imgfmt.digest",
    "EntryStat": "snapcask.handles",
    "EntryType": "imgfmt.tree",
    "MemberSource": "snapcask.requests",
    "Progress": "transfer.progress",
    "PullReport": "transfer.pull",
    "PushReport": "transfer.push",
    "StoreRecord": "imgfmt.store_record",
    "VerifyReport": "transfer.verify",
}  # fmt: skip

__all__ = [
    "AccessDenied",
    "Conflict",
    "CorruptData",
    "Digest",
    "EntryStat",
    "EntryType",
    "ErrorKind",
    "ImageError",
    "ImageHandle",
    "Internal",
    "InvalidImage",
    "InvalidInput",
    "MemberSource",
    "NotFound",
    "OutOfResources",
    "Progress",
    "PullReport",
    "PushReport",
    "StoreRecord",
    "StoreUnavailable",
    "Unsupported",
    "VerifyReport",
    "__version__",
    "aio",
    "init_store",
    "open_image",
    "pull",
    "push",
    "verify",
]


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name == "aio":
        return importlib.import_module("snapcask.aio")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
