"""The front door: the public Python API and the command line; nothing imports it.

    import snapcask

    snapcask.init_store("/data/store")
    report = snapcask.push("/dumps/worker-3", "llama/worker:v3", store="/data/store")
    snapcask.pull("llama/worker:v3", "/restore/worker", store="/data/store")
    with snapcask.open_image("llama/worker:v3", store="/data/store") as image:
        header = image.read("pagemap-1.img", 0, 4096)
    tensors = snapcask.load("llama/weights:v3", store="/data/store", device="cuda:0")
    weight = torch.from_dlpack(tensors["lm_head.weight"])

These calls block, also where an event loop is running; `snapcask.aio` has the same as coroutines.
They raise subclasses of `ImageError` and nothing else of their own; each has a `kind`. A name is
loaded when it is first used, so that importing this costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from imgfmt.compat import Check as Check
    from imgfmt.compat import Verdict as Verdict
    from imgfmt.digest import Digest as Digest
    from imgfmt.errors import AccessDenied as AccessDenied
    from imgfmt.errors import Conflict as Conflict
    from imgfmt.errors import CorruptData as CorruptData
    from imgfmt.errors import DoesNotFit as DoesNotFit
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
    from restore.compat import CompatReport as CompatReport
    from restore.devices import pinned_pool as pinned_pool
    from restore.driver import DeviceFailed as DeviceFailed
    from restore.load import FileRange as FileRange
    from restore.load import TensorTarget as TensorTarget
    from restore.load_job import LoadReport as LoadReport
    from restore.pinned import PinnedPool as PinnedPool
    from restore.tensor import Tensor as Tensor
    from snapcask import aio as aio
    from snapcask.api import ImageHandle as ImageHandle
    from snapcask.api import check as check
    from snapcask.api import gc as gc
    from snapcask.api import init_store as init_store
    from snapcask.api import open_image as open_image
    from snapcask.api import plan_pull as plan_pull
    from snapcask.api import pull as pull
    from snapcask.api import push as push
    from snapcask.api import verify as verify
    from snapcask.api_loading import load as load
    from snapcask.api_loading import load_ranges as load_ranges
    from snapcask.api_loading import load_replicas as load_replicas
    from snapcask.handles import EntryStat as EntryStat
    from snapcask.loading import Tensors as Tensors
    from snapcask.requests import MemberSource as MemberSource
    from snapcask.streaming import iter_tensors as iter_tensors
    from transfer.collect import CollectReport as CollectReport
    from transfer.progress import Progress as Progress
    from transfer.pull import PullReport as PullReport
    from transfer.pulling.pull_plan import PullPlan as PullPlan
    from transfer.push import PushReport as PushReport
    from transfer.reader import ChunkSpan as ChunkSpan
    from transfer.verify import VerifyReport as VerifyReport

__version__ = "0.1.0"  # the build reads it from here, so printing it needs no metadata look-up

_ERRORS = (
    "AccessDenied", "Conflict", "CorruptData", "DoesNotFit", "ErrorKind", "ImageError", "Internal",
    "InvalidImage", "InvalidInput", "NotFound", "OutOfResources", "StoreUnavailable", "Unsupported",
)  # fmt: skip
_CALLS = (
    "ImageHandle", "check", "gc", "init_store", "open_image", "plan_pull", "pull", "push",
    "verify",
)  # fmt: skip
_LOADS = ("load", "load_ranges", "load_replicas")
_HOMES = {
    **dict.fromkeys(_ERRORS, "imgfmt.errors"),
    **dict.fromkeys(_CALLS, "snapcask.api"),
    **dict.fromkeys(_LOADS, "snapcask.api_loading"),
    "Check": "imgfmt.compat",
    "ChunkSpan": "transfer.reader",
    "CollectReport": "transfer.collect",
    "CompatReport": "restore.compat",
    "DeviceFailed": "restore.driver",
    "Digest": "imgfmt.digest",
    "EntryStat": "snapcask.handles",
    "EntryType": "imgfmt.tree",
    "FileRange": "restore.load",
    "LoadReport": "restore.load_job",
    "MemberSource": "snapcask.requests",
    "PinnedPool": "restore.pinned",
    "Progress": "transfer.progress",
    "PullPlan": "transfer.pulling.pull_plan",
    "PullReport": "transfer.pull",
    "PushReport": "transfer.push",
    "StoreRecord": "imgfmt.store_record",
    "Tensor": "restore.tensor",
    "TensorTarget": "restore.load",
    "Tensors": "snapcask.loading",
    "Verdict": "imgfmt.compat",
    "VerifyReport": "transfer.verify",
    "iter_tensors": "snapcask.streaming",
    "pinned_pool": "restore.devices",
}  # fmt: skip

__all__ = [
    "AccessDenied",
    "Check",
    "ChunkSpan",
    "CollectReport",
    "CompatReport",
    "Conflict",
    "CorruptData",
    "DeviceFailed",
    "Digest",
    "DoesNotFit",
    "EntryStat",
    "EntryType",
    "ErrorKind",
    "FileRange",
    "ImageError",
    "ImageHandle",
    "Internal",
    "InvalidImage",
    "InvalidInput",
    "LoadReport",
    "MemberSource",
    "NotFound",
    "OutOfResources",
    "PinnedPool",
    "Progress",
    "PullPlan",
    "PullReport",
    "PushReport",
    "StoreRecord",
    "StoreUnavailable",
    "Tensor",
    "TensorTarget",
    "Tensors",
    "Unsupported",
    "Verdict",
    "VerifyReport",
    "__version__",
    "aio",
    "check",
    "gc",
    "init_store",
    "iter_tensors",
    "load",
    "load_ranges",
    "load_replicas",
    "open_image",
    "pinned_pool",
    "plan_pull",
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
