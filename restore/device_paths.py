"""Which way files of each disk take to each GPU: read by the device itself, or through host memory.

Told by trying, as a load with `gpudirect` does. For `snapcask doctor`. All of it blocks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imgfmt.errors import ImageError
from restore.cuda_driver import cuda_driver, cuda_is_installed
from restore.cuda_files import cuda_files
from restore.direct_storage import (
    DEVICE_NODE,
    STATISTICS,
    TRIAL_BYTES,
    DirectStorage,
    FileApi,
    why_not_here,
)
from restore.driver import Driver
from restore.tensor import read_back
from transfer.filesystems import filesystem_type


@dataclass(frozen=True, slots=True)
class DiskPath:
    """How files below `directory` come to a device. `why_not_direct` is "" if it reads them."""

    directory: str
    filesystem: str
    why_not_direct: str


@dataclass(frozen=True, slots=True)
class DevicePaths:
    """One device ("cuda:0"), and each disk. `problem`: why it can't be used, or ""."""

    device: str
    name: str
    problem: str
    disks: tuple[DiskPath, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where files are loaded from. `sample` is a file there to try; without one it is made."""

    directory: str
    sample: str | None = None


def paths_here(places: Sequence[Place]) -> list[DevicePaths] | None:
    """`device_paths` of this machine; None where the extra `gpu` is not installed.

    Raises Unsupported where no GPU can be used.
    """
    return device_paths(cuda_driver(), places) if cuda_is_installed() else None


def device_paths(
    driver: Driver,
    places: Sequence[Place],
    *,
    api: Callable[[], FileApi] = cuda_files,
    node: Path = DEVICE_NODE,
    statistics: Path = STATISTICS,
) -> list[DevicePaths]:
    """How files come to each device; of places on one filesystem the first is looked at.

    Nothing is left of what it writes and allocates. A device or a place that fails is told of.
    """
    places, nowhere = list(_one_a_filesystem(places)), why_not_here(node, statistics)
    with ExitStack() as stack:
        tried = [] if nowhere else [(p.directory, _sample(p, stack)) for p in places]
        found = []
        for device in range(driver.device_count()):
            storage, name, problem = DirectStorage(api, node, statistics), "", ""
            why = {place.directory: nowhere or "" for place in places}
            try:
                name = driver.describe(device).name
                why.update(_try(driver, device, storage, tried))
            except ImageError as error:
                problem = str(error)
            finally:
                storage.close()
            disks = () if problem else tuple(_described(where, why[where]) for where in why)
            found.append(DevicePaths(f"{driver.kind}:{device}", name, problem, disks))
        return found


def _try(
    driver: Driver, device: int, storage: DirectStorage, tried: Sequence[tuple[str, str | OSError]]
) -> dict[str, str]:
    """Why files of each directory are not read by the device, or "".

    Of a device that is lost meanwhile the memory can't be freed, which raises DeviceFailed.
    """
    with _room(driver, device) as pointer:
        back = partial(read_back, driver, device)
        return {where: _prove(storage, sample, pointer, back) for where, sample in tried}


def _one_a_filesystem(places: Iterable[Place]) -> Iterator[Place]:
    seen = set()
    for place in places:
        try:
            filesystem: object = os.stat(place.sample or place.directory).st_dev
        except OSError:
            filesystem = place.directory
        if filesystem not in seen:
            seen.add(filesystem)
            yield place


def _described(directory: str, why: str) -> DiskPath:
    try:
        kind = filesystem_type(directory)
    except OSError:
        kind = ""
    return DiskPath(directory, kind, why)


def _sample(place: Place, stack: ExitStack) -> str | OSError:
    """A file to try, there until `stack` ends; or why none could be made."""
    if place.sample is not None:
        return place.sample
    try:
        file = stack.enter_context(
            tempfile.NamedTemporaryFile(prefix=".snapcask-doctor-", dir=place.directory)  # noqa: SIM115
        )
        file.write(os.urandom(TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        return error
    return file.name


@contextmanager
def _room(driver: Driver, device: int) -> Iterator[int]:
    pointer = driver.allocate(device, TRIAL_BYTES)
    try:
        driver.activate(device)
        yield pointer
    finally:
        driver.free(device, pointer)


def _prove(
    storage: DirectStorage,
    sample: str | OSError,
    pointer: int,
    back: Callable[[int, int], bytes],
) -> str:
    if isinstance(sample, OSError):
        return f"no file can be made there to try it: {sample.strerror}"
    return storage.prove(sample, pointer, back) or ""
