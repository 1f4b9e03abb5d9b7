"""Loads tensors, or ranges of files, from a source into the memory of devices: all, or nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from imgfmt.errors import ImageError, InvalidInput, NotFound, OutOfResources
from restore.contents import find_tensors
from restore.cuda_files import cuda_files
from restore.driver import Driver
from restore.host_driver import HostDriver
from restore.lanes import Target
from restore.layout import Layout, Place, lay_out
from restore.load_config import LoadConfig, Verify, Workers
from restore.load_job import LoadJob, LoadReport
from restore.pinned import Arena, PinnedPool
from restore.sources import Source
from restore.spec import TensorSpec, octets
from restore.tensor import Memory, Tensor
from transfer.progress import PhaseClock, Progress, Silent
from transfer.threads import Threads

Deliver = Callable[[Sequence[Tensor]], None]
"""Told of each tensor, one on each device, when it is complete. Called from several threads."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one driver, and page-locked memory for its copies, or None to make some."""

    driver: Driver
    numbers: tuple[int, ...]
    pool: PinnedPool | None = None

    def __post_init__(self) -> None:
        if not self.numbers or len(set(self.numbers)) != len(self.numbers):
            raise InvalidInput("name at least one device, and each once")


@dataclass(frozen=True, slots=True)
class Loaded:
    """For each device its tensors by name, in the order of files and bytes; and what it took."""

    replicas: tuple[dict[str, Tensor], ...]
    report: LoadReport


@dataclass(frozen=True, slots=True)
class FileRange:
    """`n_bytes` of a file from `offset` on, for the `pointer` of a caller, who keeps it alive."""

    file: str
    offset: int
    n_bytes: int
    pointer: int


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """`n_bytes` of memory at the `pointer` of a caller, for the tensor `name` of just that size."""

    name: str
    n_bytes: int
    pointer: int


async def load(
    source: Source,
    devices: Devices,
    threads: Threads,
    config: LoadConfig,
    *,
    patterns: Sequence[str] = (),
    names: Callable[[str], bool] | None = None,
    deliver: Deliver | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load the tensors of a source to each of the devices; every byte is read once.

    `patterns` choose files, `names` tensors. After an error all memory is given back, but that of
    tensors which `deliver` was told of. Raises NotFound, InvalidInput, CorruptData, OutOfResources,
    DeviceFailed, Unsupported.
    """
    clock, progress = PhaseClock(time.monotonic), progress or Silent()
    progress.phase("headers", 0)
    specs = await find_tensors(source.files, source.read, patterns=patterns)
    if names is not None:
        specs = [spec for spec in specs if names(spec.name)]
        if not specs:
            raise NotFound("none of the tensors has a name that was asked for")
    clock.end("headers")
    layout = lay_out(specs)
    memories = await threads.run(_allocate, devices, layout)
    clock.end("allocate")
    replicas = _tensors(specs, layout, memories, len(devices.numbers))
    delivered: list[int] = []

    def arrived(tensor: int) -> None:
        if deliver is not None:
            delivered.append(tensor)
            deliver([tensors[tensor] for tensors in replicas])

    try:
        targets = [Target(memory.device, memory.pointer) for memory in memories]
        report = await _run(
            source, devices, threads, config, specs, layout.places, targets,
            clock=clock, arrived=arrived, eager=deliver is not None, progress=progress,
        )  # fmt: skip
    except BaseException:
        if not delivered:
            await threads.run(_free, memories)
        raise
    return Loaded(tuple({t.name: t for t in tensors} for tensors in replicas), report)


async def load_ranges(
    source: Source,
    ranges: Sequence[FileRange | TensorTarget],
    devices: Devices,
    threads: Threads,
    config: LoadConfig,
    *,
    progress: Progress | None = None,
) -> LoadReport:
    """Load ranges of files, or tensors, to memory of one device that the caller owns.

    After an error what that memory holds is not defined. Errors are those of `load`.
    """
    clock = PhaseClock(time.monotonic)
    if len(devices.numbers) != 1:
        raise InvalidInput("ranges go to one device")
    tensors: dict[str, TensorSpec] = {}
    if any(isinstance(wanted, TensorTarget) for wanted in ranges):
        found = await find_tensors(source.files, source.read)
        tensors = {spec.name: spec for spec in found}
    specs = [_spec(wanted, source, tensors) for wanted in ranges]
    places = [Place(index, 0) for index in range(len(ranges))]
    targets = [Target(devices.numbers[0], r.pointer) for r in ranges]
    return await _run(
        source, devices, threads, config, specs, places, targets,
        clock=clock, arrived=lambda tensor: None, eager=False, progress=progress or Silent(),
    )  # fmt: skip


def _spec(
    wanted: FileRange | TensorTarget, source: Source, tensors: Mapping[str, TensorSpec]
) -> TensorSpec:
    """Where the bytes are. Raises NotFound, InvalidInput."""
    if isinstance(wanted, FileRange):
        name = f"{wanted.file}[{wanted.offset}:]"
        spec = octets(name, wanted.file, wanted.offset, wanted.n_bytes)
        if spec.file not in source.files:
            raise NotFound(f"there is no {spec.file}")
        if spec.start < 0 or spec.n_bytes < 0 or spec.end > source.files[spec.file]:
            raise InvalidInput(f"{spec.file} has no bytes {spec.start} to {spec.end}")
        return spec
    if wanted.name not in tensors:
        raise NotFound(f"there is no tensor {wanted.name!r}")
    spec = tensors[wanted.name]
    if spec.n_bytes != wanted.n_bytes:
        raise InvalidInput(
            f"tensor {wanted.name!r} has {spec.n_bytes} bytes, not the {wanted.n_bytes} that there"
            " is room for"
        )
    return spec


def _allocate(devices: Devices, layout: Layout) -> list[Memory]:
    """Blocks of all devices. Raises OutOfResources before any is made if they can't all be had."""
    needed = sum(layout.block_bytes)
    for device in devices.numbers:
        free = devices.driver.free_bytes(device)
        if needed > free:
            what = f"{devices.driver.kind}:{device}"
            raise OutOfResources(f"{needed} bytes are needed on {what}, {free} are free there")
    memories: list[Memory] = []
    try:
        for device in devices.numbers:
            memories.extend(Memory(devices.driver, device, n) for n in layout.block_bytes)
    except BaseException:
        _free(memories)
        raise
    return memories


def _free(memories: Sequence[Memory]) -> None:
    for memory in memories:
        memory.free()


def _tensors(
    specs: Sequence[TensorSpec], layout: Layout, memories: Sequence[Memory], n_devices: int
) -> list[list[Tensor]]:
    n_blocks = len(layout.block_bytes)
    return [
        [
            Tensor(
                spec.name, memories[place.block + device * n_blocks], place.offset,
                spec.dtype, spec.shape,
            )
            for spec, place in zip(specs, layout.places, strict=True)
        ]
        for device in range(n_devices)
    ]  # fmt: skip


@contextmanager
def _arena(devices: Devices, config: LoadConfig) -> Iterator[Arena]:
    """Pinned memory: the caller's pool, or one for this load."""
    if devices.pool is not None:
        with devices.pool.lend() as arena:
            yield arena
        return
    driver = devices.driver
    with (  # processes that verify are given the memory
        PinnedPool(
            driver,
            config.pinned_bytes,
            device=devices.numbers[0],
            shared=not driver.immediate
            and (config.verify is Verify.CPU or config.workers is Workers.PROCESSES),
        ) as pool,
        pool.lend() as arena,
    ):
        yield arena


async def _run(
    source: Source,
    devices: Devices,
    threads: Threads,
    config: LoadConfig,
    specs: Sequence[TensorSpec],
    places: Sequence[Place],
    targets: Sequence[Target],
    *,
    clock: PhaseClock,
    arrived: Callable[[int], None],
    eager: bool,
    progress: Progress,
) -> LoadReport:
    loop = asyncio.get_running_loop()
    total = sum(spec.n_bytes for spec in specs) * len(devices.numbers)
    lending = _arena(devices, config)
    arena = await threads.run(lending.__enter__)
    try:
        clock.end("pin")
        progress.phase("load", total)
        job = LoadJob(
            specs, places, targets, len(devices.numbers),
            driver=devices.driver, config=config, arena=arena, arrived=arrived, eager=eager,
            file_api=cuda_files if config.gpudirect and not devices.driver.immediate else None,
            advance=lambda n_bytes: _tell(loop, progress, n_bytes),
        )  # fmt: skip
        if total:
            await source.load(job)
        job.finish()
        clock.end("load")
    except BaseException:
        await threads.run(_give_back, lending)
        raise
    await threads.run(lending.__exit__, None, None, None)
    clock.end("unpin")
    return _report(job, total, arena, clock)


def _give_back(lending: AbstractContextManager[Arena]) -> None:
    """After an error, which matters more than what a device that is gone says to this."""
    try:
        lending.__exit__(None, None, None)
    except ImageError as error:
        _log.warning("while cleaning up: %s", str(error))


def _tell(loop: asyncio.AbstractEventLoop, progress: Progress, n_bytes: int) -> None:
    if not isinstance(progress, Silent):
        loop.call_soon_threadsafe(progress.advance, n_bytes)


def _report(job: LoadJob, n_bytes: int, arena: Arena, clock: PhaseClock) -> LoadReport:
    return LoadReport(
        tensors=len(job.specs),
        n_bytes=n_bytes,
        read_bytes=job.read_bytes,
        direct_bytes=job.direct_bytes,
        gpudirect_bytes=job.gpudirect_bytes,
        cpu_checked_bytes=job.cpu_checked_bytes,
        device_checked_bytes=job.device_checked_bytes,
        verified=job.verified,
        n_threads=job.n_threads,
        pinned_bytes=arena.size_bytes,
        stages=job.stages,
        seconds=clock.total(),
        warnings=tuple(job.warnings),
        from_cache=job.from_cache,
    )


def host_device(pinned_by: Driver | None = None) -> Devices:
    """The device `cpu`, whose tensors are page-locked by a GPU's driver if there is one."""
    return Devices(HostDriver(pinned_by), (0,))
