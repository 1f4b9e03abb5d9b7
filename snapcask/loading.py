"""Loading tensors to a device: the calls of `snapcask.aio`, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from imgfmt.errors import InvalidInput
from restore.compat import OnMismatch
from restore.devices import named_devices
from restore.load import Deliver, FileRange, TensorTarget
from restore.load import load as load_tensors
from restore.load import load_ranges as load_file_ranges
from restore.load_config import LoadConfig, Verify
from restore.load_job import LoadReport
from restore.pinned import PinnedPool
from restore.tensor import Tensor
from snapcask.load_source import CacheName, Fit, SourceName, opened_source
from snapcask.stores import StoreName
from transfer.cache.layout import DEFAULT_ROOT
from transfer.progress import Progress


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, in the order of files and bytes, and the report of the load.

    Memory is given back once neither this, nor a tensor, nor what was made of one, is used.
    """

    def __init__(self, tensors: Mapping[str, Tensor], report: LoadReport) -> None:
        self._tensors = tensors
        self.report = report

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


async def load(
    source: SourceName,
    *,
    device: str = "cuda:0",
    store: StoreName | None = None,
    cache: CacheName | None = DEFAULT_ROOT,
    image: str | None = None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    on_mismatch: str = "fail",
    override: Sequence[str] = (),
    files: Sequence[str] = (),
    names: Callable[[str], bool] | None = None,
    verify: str = "auto",
    pinned: bool = False,
    pool: PinnedPool | None = None,
    max_pinned_bytes: int | None = None,
    n_threads: int | None = None,
    gpudirect: bool = False,
    progress: Progress | None = None,
) -> Tensors:
    """Load tensors to a device: "cuda:0", "cuda:1", ... or "cpu". Returns them by name.

    Loaded are safetensors files, or where there are none, the GPU payloads that a GMS or CUDA
    CustomStorage manifest lists; of the paths that match one of `files`, and the tensors for whose
    name `names` is true. Nothing is returned unless all is complete.

    What exists as a directory is one; its bytes are compared with `image` of the store if that is
    given. Else the source is an image, of which every chunk is verified: "cpu" before the copy,
    "device" after it by a kernel, "auto" by whichever is faster here; "off" is for directories.

    An image that is complete in the node's `cache` is read from its files there, if what the store
    may be read with gives access to them; None looks at no cache. A damaged chunk comes from the
    store, and is told of in the report's warnings. As for a mount, a digest needs no store then.

    Host memory for transfers is `max_pinned_bytes` (128 MiB) of page-locked memory, or a `pool`
    made once for many loads. `pinned` page-locks what is loaded to "cpu". With `gpudirect` the
    device reads files itself where that is proven to work, else they are read as usual.

    An image may have rules about the machine: what it states itself, and of what it records the
    processor's architecture and the GPUs' compute capability. Where one differs, `on_mismatch` is
    "fail", "warn" (in the report) or "ignore"; rules named in `override` may differ. `facts` go
    before what is found of this machine. Raises besides what every call may raise `DoesNotFit`,
    `DeviceFailed`, and `OutOfResources` where the device has no room.
    """
    (tensors,) = await load_replicas(
        source, devices=[device], store=store, cache=cache, image=image, member=member,
        facts=facts, on_mismatch=on_mismatch, override=override, files=files, names=names,
        verify=verify, pinned=pinned, pool=pool, max_pinned_bytes=max_pinned_bytes,
        n_threads=n_threads, gpudirect=gpudirect, progress=progress,
    )  # fmt: skip
    return tensors


async def load_replicas(
    source: SourceName,
    *,
    devices: Sequence[str],
    store: StoreName | None = None,
    cache: CacheName | None = DEFAULT_ROOT,
    image: str | None = None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    on_mismatch: str = "fail",
    override: Sequence[str] = (),
    files: Sequence[str] = (),
    names: Callable[[str], bool] | None = None,
    verify: str = "auto",
    pinned: bool = False,
    pool: PinnedPool | None = None,
    max_pinned_bytes: int | None = None,
    n_threads: int | None = None,
    gpudirect: bool = False,
    deliver: Deliver | None = None,
    progress: Progress | None = None,
) -> list[Tensors]:
    """As `load`, but to each of several GPUs: every byte is read once. Returns one map a device.

    `deliver` is called with each tensor, one a device, when it is complete; from several threads.
    """
    targets = named_devices(devices, pinned=pinned, pool=pool)
    config = load_config(verify, max_pinned_bytes, n_threads, gpudirect=gpudirect)
    fit = Fit(facts, OnMismatch.parse(on_mismatch), override)
    async with opened_source(
        source, store=store, cache=cache, image=image, member=member, fit=fit
    ) as (opened, threads):
        loaded = await load_tensors(
            opened, targets, threads, config,
            patterns=files, names=names, deliver=deliver, progress=progress,
        )  # fmt: skip
    report = replace(loaded.report, warnings=(*fit.warnings, *loaded.report.warnings))
    return [Tensors(tensors, report) for tensors in loaded.replicas]


async def load_ranges(
    source: SourceName,
    ranges: Sequence[FileRange | TensorTarget],
    *,
    device: str = "cuda:0",
    store: StoreName | None = None,
    cache: CacheName | None = DEFAULT_ROOT,
    image: str | None = None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    on_mismatch: str = "fail",
    override: Sequence[str] = (),
    verify: str = "auto",
    pool: PinnedPool | None = None,
    max_pinned_bytes: int | None = None,
    n_threads: int | None = None,
    gpudirect: bool = False,
    progress: Progress | None = None,
) -> LoadReport:
    """Load ranges of files to memory of the device that is the caller's, given by its address.

    A `TensorTarget` is a range that is named by its tensor: new weights for what a model holds.
    Sources, verification and errors are those of `load`. What the memory holds after an error is
    not defined.
    """
    targets = named_devices([device], pool=pool)
    config = load_config(verify, max_pinned_bytes, n_threads, gpudirect=gpudirect)
    fit = Fit(facts, OnMismatch.parse(on_mismatch), override)
    async with opened_source(
        source, store=store, cache=cache, image=image, member=member, fit=fit
    ) as (opened, threads):
        report = await load_file_ranges(opened, ranges, targets, threads, config, progress=progress)
    return replace(report, warnings=(*fit.warnings, *report.warnings))


def load_config(
    verify: str,
    max_pinned_bytes: int | None = None,
    n_threads: int | None = None,
    *,
    gpudirect: bool = False,
) -> LoadConfig:
    """The configuration with what was given; slots shrink to fit. Raises InvalidInput."""
    if verify not in list(Verify):
        raise InvalidInput(f"verify {verify!r} is not one of {', '.join(Verify)}")
    config = LoadConfig(verify=Verify(verify), gpudirect=gpudirect)
    if max_pinned_bytes is not None:
        slot_bytes = config.slot_bytes
        while slot_bytes > (2 << 20) and max_pinned_bytes < 8 * slot_bytes:
            slot_bytes //= 2
        config = replace(config, pinned_bytes=max_pinned_bytes, slot_bytes=slot_bytes)
    return config if n_threads is None else replace(config, n_threads=n_threads)
