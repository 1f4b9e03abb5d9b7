"""Pushes of small directories into small stores, for tests; some in processes that are killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import ImageError
from imgfmt.reference import TargetKind
from imgfmt.store_record import StoreRecord
from transfer.catalog import init_store, open_catalog
from transfer.config import TransferConfig
from transfer.push import DirectorySource, PushReport, PushRequest, push
from transfer.references import next_record
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.testing.interpose import Before, InterposedStore

KIB, MIB = 1024, 1024 * 1024
CONFIG = TransferConfig(
    block_bytes=2 * MIB, max_memory_bytes=12 * MIB, n_threads=2, index_every_packs=1
)
RECORD = StoreRecord(uuid=bytes(16), concurrent_writers=True, pack_bytes=MIB, history_s=0)
MTIME_NS = 1_600_000_000_123_456_789

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one coroutine to its end."""
    return asyncio.run(work)


def noise(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that no codec shrinks and no chunk repeats."""
    return np.random.default_rng(seed).bytes(n_bytes)


def text(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes that zstd shrinks a lot, and no page is like another."""
    return (np.random.default_rng(seed).integers(0, 4, n_bytes, dtype=np.uint8) + 97).tobytes()


def write_files(root: Path, files: Mapping[str, bytes]) -> Path:
    """Files below `root`, which is made, all with the same time; returns `root`."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    settle(root)
    return root


def settle(root: Path) -> None:
    """Give everything below `root` the same time."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names, "."):
            path = os.path.join(folder, name)
            os.utime(path, ns=(MTIME_NS, MTIME_NS), follow_symlinks=False)


def new_store(place: Path, **changed: Any) -> PosixStore:
    """A store as `RECORD` says, but for what is given."""
    store = PosixStore(str(place))
    run(init_store(store, replace(RECORD, **changed)))
    return store


def request_of(*directories: Path, tag: str | None = "v1", **given: Any) -> PushRequest:
    """One directory is the member `main`, several are `m0`, `m1` and so on."""
    names = ["main"] if len(directories) == 1 else [f"m{i}" for i in range(len(directories))]
    sources = [
        DirectorySource(name, os.fspath(path))
        for name, path in zip(names, directories, strict=True)
    ]
    return PushRequest(sources, reference=("snap", tag) if tag else None, **given)


async def push_request(
    store: Store, request: PushRequest, *, config: TransferConfig = CONFIG, **given: Any
) -> PushReport:
    """Open the store for writing and push."""
    catalog = await open_catalog(store, write=True)
    return await push(catalog, request, config=config, **given)


def pushed(
    store: Store, *directories: Path, config: TransferConfig = CONFIG, **given: Any
) -> PushReport:
    """Push directories and wait for the end."""
    return run(push_request(store, request_of(*directories, **given), config=config))


async def push_interposed(
    store: Store, request: PushRequest, before: Before, **given: Any
) -> PushReport:
    """As `push_request`, with `before` called from the first operation of the push itself on."""
    catalog = await open_catalog(store, write=True)
    catalog.store = InterposedStore(store, before)
    return await push(catalog, request, config=CONFIG, **given)


async def remove_reference(store: Store, tag: str = "v1") -> None:
    """Delete `snap:<tag>`, which there is."""
    seen = await store.read_reference("snap", tag)
    record = next_record("snap", tag, seen, TargetKind.NONE, None)
    await store.change_reference(record, seen)


async def target_of(store: Store, tag: str = "v1") -> Digest | None:
    """What `snap:<tag>` points to."""
    state = await store.read_reference("snap", tag)
    return state.record.target if state is not None else None


class Operations:
    """Counts store operations. Calls `act` before number `position`; `names` has all so far."""

    def __init__(
        self, position: int = -1, act: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._position = position
        self._act = act
        self.names: list[str] = []

    async def before(self, operation: str, key: str) -> None:
        """For `InterposedStore`."""
        position = len(self.names)
        self.names.append(f"{operation} {key.partition('/')[0]}")
        if position == self._position and self._act is not None:
            await self._act()


def at_first(operation: str, act: Callable[[], object], prefix: str = "") -> Any:
    """A `before` that acts once, before the first `operation` on a key with this prefix."""
    done: list[bool] = []

    async def before(found: str, key: str) -> None:
        if found == operation and key.startswith(prefix) and not done:
            done.append(True)
            act()

    return before


def start_process(work: Callable[..., object], *args: object) -> BaseProcess:
    """Call `work(*args)` in a process of its own, which has this module loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=work, args=args)
    process.start()
    return process


def push_and_be_killed(place: str, directory: str, position: int) -> None:
    """Push; before store operation `position` this process is killed, with no chance to tidy up."""

    async def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # the kernel survives
    before = Operations(position, kill).before
    run(push_interposed(PosixStore(place), request_of(Path(directory)), before))


def push_after_meeting(place: str, directory: str, meeting: Any, answers: Any) -> None:
    """Push, but change the reference only when all others are about to; says what came of it."""

    async def before(operation: str, key: str) -> None:
        if operation == "change_reference":
            meeting.wait(30)

    store = InterposedStore(PosixStore(place), before)
    try:
        report = pushed(store, Path(directory))
    except ImageError as error:
        answers.put((directory, type(error).__name__, str(error)))
    else:
        answers.put((directory, "", str(report.digest)))


@contextmanager
def quick_folder(other: Path) -> Iterator[Path]:
    """A folder in memory where there is room for one, else below `other`."""
    memory = Path("/dev/shm")
    where = memory if os.access(memory, os.W_OK) else other
    with tempfile.TemporaryDirectory(prefix="snapcask-test-", dir=where) as folder:
        yield Path(folder)
