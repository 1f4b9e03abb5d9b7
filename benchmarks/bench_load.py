"""How fast tensors reach a GPU, beside what the machine can do.

Cases: the pinned copy alone; threads that only read and copy; files in tmpfs, in the page cache,
in a mounted image and in a store to device memory, unverified, verified by the CPU and by the
device; cold files by O_DIRECT beside bare O_DIRECT threads; the path of the wire; other loaders on
the same files; host memory.
Run: `make bench BENCH=load`. Needs an NVIDIA GPU, and root for the mounted image.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import write_model
from benchmarks.peer_loaders import LOADERS
from benchmarks.report import PeakMemory, Report, Samples, anonymous_bytes, machine
from imgfmt.reference import parse_reference
from imgfmt.tree import Tree
from restore.cuda_driver import cuda_driver
from restore.driver import Driver, owned_memory, owned_stream
from restore.files import Files, Route
from restore.host_driver import address_of
from restore.image_source import ImageSource
from restore.load import Devices, Loaded, load
from restore.load_config import LoadConfig, Verify, Workers
from restore.pinned import PinnedPool
from restore.sources import DirectorySource, Source
from transfer.catalog import MemberContent, open_catalog
from transfer.config import TransferConfig
from transfer.pull import choose_image
from transfer.store.base import Store
from transfer.store.posix import PosixStore
from transfer.testing.interpose import InterposedStore
from transfer.threads import Threads

GIB = 1 << 30
MIB = 1 << 20
MODES = (Verify.OFF, Verify.CPU, Verify.DEVICE)


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases use."""

    driver: Driver
    pool: PinnedPool
    config: LoadConfig
    rounds: int
    report: Report


def pinned_copy(bench: Bench, size_bytes: int) -> None:
    """Copy slots again and again on four streams, with nothing else to do."""
    driver, slot_bytes = bench.driver, bench.config.slot_bytes
    rates = []
    with bench.pool.lend() as arena, owned_memory(driver, 0, size_bytes) as pointer:
        slots = [address_of(arena.allocate(slot_bytes)) for _ in range(16)]
        driver.activate(0)
        streams = [driver.create_stream(0) for _ in range(4)]
        for _ in range(bench.rounds + 1):
            begun_s = time.perf_counter()
            for i in range(size_bytes // slot_bytes):
                place = pointer + i * slot_bytes
                driver.copy_to_device(place, slots[i % 16], slot_bytes, streams[i % 4])
            for stream in streams:
                driver.synchronize(stream)
            rates.append(size_bytes / (time.perf_counter() - begun_s) / 1e9)
        for stream in streams:
            driver.destroy_stream(0, stream)
    bench.report.add("limit: pinned copy alone", gb_s=Samples(tuple(rates[1:])))


def pageable_copy(bench: Bench, size_bytes: int) -> None:
    """The same from memory that is not page-locked."""
    driver, rates = bench.driver, []
    memory = bytearray(os.urandom(64 * MIB))
    address = address_of(memoryview(memory))
    driver.activate(0)
    with owned_memory(driver, 0, len(memory)) as pointer, owned_stream(driver, 0) as stream:
        for _ in range(bench.rounds):
            begun_s = time.perf_counter()
            for _ in range(size_bytes // len(memory)):
                driver.copy_to_device(pointer, address, len(memory), stream)
            driver.synchronize(stream)
            rates.append(size_bytes // len(memory) * len(memory) / _since(begun_s) / 1e9)
    bench.report.add("limit: pageable copy", gb_s=Samples(tuple(rates)))


def threads_alone(bench: Bench, path: Path) -> None:
    """Threads that read one file and copy it, each with two slots and a stream: nothing else."""
    driver, slot_bytes = bench.driver, bench.config.slot_bytes
    n_threads, size_bytes = max(1, bench.config.n_threads * 3 // 4), path.stat().st_size
    descriptor, rates = os.open(path, os.O_RDONLY), []
    with bench.pool.lend() as arena, owned_memory(driver, 0, size_bytes) as pointer:
        pairs = [[arena.allocate(slot_bytes) for _ in range(2)] for _ in range(n_threads)]

        def work(slots: list[memoryview], offsets: Iterator[int]) -> None:
            driver.activate(0)
            with owned_stream(driver, 0) as stream:
                events = [driver.create_event(0) for _ in slots]
                for turn, offset in enumerate(offsets):
                    view, event = slots[turn % 2], events[turn % 2]
                    n_bytes = min(slot_bytes, size_bytes - offset)
                    driver.wait(event)
                    os.preadv(descriptor, [view[:n_bytes]], offset)
                    driver.copy_to_device(pointer + offset, address_of(view), n_bytes, stream)
                    driver.record(event, stream)
                driver.synchronize(stream)
                for event in events:
                    driver.destroy_event(0, event)

        for _ in range(bench.rounds + 1):
            offsets = iter(range(0, size_bytes, slot_bytes))
            begun_s = time.perf_counter()
            with ThreadPoolExecutor(n_threads) as threads:
                list(threads.map(work, pairs, [offsets] * n_threads))
            rates.append(size_bytes / _since(begun_s) / 1e9)
    os.close(descriptor)
    bench.report.add("limit: threads that only read and copy", gb_s=Samples(tuple(rates[1:])))


def _since(begun_s: float) -> float:
    return time.perf_counter() - begun_s


def run_load(bench: Bench, make: Callable[[Threads], Source], config: LoadConfig) -> Loaded:
    """One load to cuda:0 with the pool of the benchmark."""

    async def work() -> Loaded:
        with Threads("bench", max(4, config.n_threads)) as threads:
            devices = Devices(bench.driver, (0,), bench.pool)
            return await load(make(threads), devices, threads, config)

    return asyncio.run(work())


def measure(
    bench: Bench,
    case: str,
    make: Callable[[Threads], Source],
    verify: Verify,
    *,
    route: Route = Route.BUFFERED,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Add GB/s of the phase that moves bytes, and of the whole call, pinned pool apart."""
    rates, whole, reports = [], [], []
    config = replace(bench.config, verify=verify, route=route)
    for _ in range(bench.rounds + 1):
        before()
        begun_s = time.perf_counter()
        loaded = run_load(bench, make, config)
        took_s = time.perf_counter() - begun_s
        report = loaded.report
        rates.append(report.n_bytes / report.seconds["load"] / 1e9)
        whole.append(report.n_bytes / took_s / 1e9)
        reports.append(report)
        del loaded
    last = reports[-1]
    per_thread = last.n_threads or 1
    bench.report.add(
        f"{case}, {verify}",
        gb_s=Samples(tuple(rates[1:])),
        whole_gb_s=Samples(tuple(whole[1:])),
        read_s=last.stages.read_s / per_thread,
        hash_s=last.stages.hash_s / per_thread,
        send_s=last.stages.send_s,
        wait_s=last.stages.wait_s,
        direct=last.direct_bytes / max(1, last.read_bytes),
    )
    print(bench.report.table().splitlines()[-1], flush=True)


def drop(folder: Path) -> None:
    """Have the kernel forget the files' pages."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def raw_direct(bench: Bench, folder: Path) -> None:
    """Threads that read with O_DIRECT, and do nothing with what they read."""
    paths = sorted(str(path) for path in folder.glob("*.safetensors"))
    sizes = [os.path.getsize(path) for path in paths]
    step, rates = bench.config.slot_bytes, []
    for _ in range(bench.rounds):
        drop(folder)
        work = iter([(f, at) for f, size in enumerate(sizes) for at in range(0, size, step)])
        lock, files = threading.Lock(), Files(paths, paths, Route.DIRECT)
        with files, bench.pool.lend() as arena:

            def read(view: memoryview) -> None:
                while True:
                    with lock:  # noqa: B023 - threads end within the round
                        found = next(work, None)  # noqa: B023
                    if found is None:
                        return
                    file, at = found
                    files.fill(file, at, min(step, sizes[file] - at), view)  # noqa: B023

            threads = [
                threading.Thread(target=read, args=(arena.allocate(step),))
                for _ in range(bench.config.n_threads)
            ]
            begun_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates.append(sum(sizes) / _since(begun_s) / 1e9)
    bench.report.add("limit: O_DIRECT threads alone", gb_s=Samples(tuple(rates)))


def push(folder: Path, store: Path) -> MemberContent:
    """Store the model as `m:1`, and return its tree and placement."""
    for arguments in (
        ["init", str(store)],
        ["push", str(folder), "m:1", "--store", str(store), "-q", "--max-memory", "512MiB"],
    ):
        subprocess.run(
            [sys.executable, "-m", "snapcask", *arguments], check=True, stdout=subprocess.DEVNULL
        )

    async def read() -> MemberContent:
        backend = PosixStore(str(store))
        catalog = await open_catalog(backend)
        digest = await catalog.resolve(parse_reference("m:1"))
        _, image = await choose_image(catalog, digest, {})
        content = await catalog.content(image.members[0].tree)
        backend.close()
        return content

    return asyncio.run(read())


class StoreSource:
    """Makes the source of an image; `wire` hides that the packs are files."""

    def __init__(self, store: Path, content: MemberContent, *, wire: bool) -> None:
        self._store = store
        self._content = content
        self._wire = wire

    def __call__(self, threads: Threads) -> Source:
        async def nothing(operation: str, key: str) -> None:
            """Before each operation."""

        async def make() -> Source:
            store: Store = PosixStore(str(self._store), n_threads=16)
            if self._wire:
                store = InterposedStore(store, nothing)
            catalog = await open_catalog(store)
            return ImageSource(catalog, self._content, threads, TransferConfig())

        loop = asyncio.new_event_loop()
        worker = threading.Thread(target=loop.run_forever)
        worker.start()
        try:
            return asyncio.run_coroutine_threadsafe(make(), loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            worker.join()
            loop.close()


@contextmanager
def mounted(store: Path, work: Path) -> Iterator[Path | None]:
    """The image `m:1`, mounted from a cache; None where that can't be done here."""
    cache, place = work / "cache", work / "mounted"
    place.mkdir(exist_ok=True)
    options = ["--store", str(store), "--cache", str(cache), "--allow-root-filesystem"]
    base = [sys.executable, "-m", "snapcask"]
    try:
        subprocess.run([*base, "prefetch", "m:1", "--buffered", "-q", *options], check=True)
        subprocess.run([*base, "mount", "m:1", str(place), "-q", *options], check=True)
    except subprocess.CalledProcessError:
        yield None
        return
    try:
        yield place
    finally:
        with suppress(subprocess.CalledProcessError):
            umount = ["umount", str(place), "--cache", str(cache), "--allow-root-filesystem"]
            subprocess.run([*base, *umount], check=True)


def warm(folder: Path) -> None:
    """Read all files once."""
    buffer = bytearray(16 * MIB)
    for path in folder.rglob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                continue


def from_directory(folder: Path, tree: Tree | None) -> Callable[[Threads], Source]:
    """Makes the source of a directory."""
    return lambda threads: DirectorySource(str(folder), threads, tree)


def peers(bench: Bench, folder: Path, names: list[str]) -> None:
    """Other loaders, and ours as a program would call it, each in a process of its own."""
    script = Path(__file__).with_name("peer_loaders.py")
    root = str(Path(__file__).parents[1])
    search = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    for name in names:
        command = [sys.executable, str(script), name, str(folder), str(bench.rounds + 1)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "PYTHONPATH": search},
        )  # fmt: skip
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["?"])[-1][:160]
            bench.report.add(f"loader {name}", note=why)
        else:
            found = json.loads(done.stdout.splitlines()[-1])
            rates = tuple(found["bytes"] / s / 1e9 for s in found["seconds"])
            first, later = rates[0], Samples(rates[1:])
            bench.report.add(
                f"loader {name}", gb_s=later, first_gb_s=first, version=found["version"]
            )
        print(bench.report.table().splitlines()[-1], flush=True)


def memory(bench: Bench, make: Callable[[Threads], Source], case: str, verify: Verify) -> None:
    """The most anonymous host memory beyond what was there before: context and pool."""
    with PeakMemory(interval_s=0.005) as peak:
        run_load(bench, make, replace(bench.config, verify=verify, route=Route.BUFFERED))
    above = peak.peak_bytes - peak.start_bytes
    bench.report.add(f"memory: {case}, {verify}", above_mib=above / MIB)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=12.0, help="size of the model")
    parser.add_argument("--disk-gib", type=float, default=4.0, help="of the one on disk")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a folder in tmpfs")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a folder on disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=LoadConfig().n_threads)
    parser.add_argument("--slot-mib", type=int, default=LoadConfig().slot_bytes // MIB)
    parser.add_argument("--pinned-mib", type=int, default=LoadConfig().pinned_bytes // MIB)
    parser.add_argument("--workers", default="auto", help="auto, threads or processes")
    parser.add_argument("--cases", default="copy,tmpfs,store,wire,disk,mounted,peers,memory")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    options = parser.parse_args()
    before_bytes = anonymous_bytes()
    driver = cuda_driver()
    driver.context(0)
    context_bytes = anonymous_bytes() - before_bytes
    config = LoadConfig(options.slot_mib * MIB, options.pinned_mib * MIB + 4096, options.threads)
    config = replace(config, workers=Workers(options.workers))
    with (
        tempfile.TemporaryDirectory(prefix="bench-load-", dir=options.memory) as fast,
        tempfile.TemporaryDirectory(prefix="bench-load-", dir=options.disk) as slow,
        PinnedPool(driver, config.pinned_bytes, shared=True) as pool,
    ):
        report = Report("bench_load", machine(Path(slow)))
        bench = Bench(driver, pool, config, options.rounds, report)
        hashed = driver.load_hasher(0, wait=True)
        report.add(
            "set-up",
            context_mib=context_bytes / MIB,
            pool_s=pool.setup_s,
            kernel_gb_s=hashed.bytes_per_s / 1e9 if hashed else 0.0,
        )
        try:
            run_cases(bench, options, Path(fast), Path(slow))
        finally:
            report.show()
            print(f"\nwritten: {report.write(options.out) if options.out else report.write()}")


def run_cases(bench: Bench, options: argparse.Namespace, fast: Path, slow: Path) -> None:
    """All cases that were chosen."""
    cases = set(options.cases.split(","))
    model, store = fast / "model", fast / "store"
    size_bytes = write_model(model, int(options.gib * GIB))
    content = push(model, store)
    tree = content.tree
    if "copy" in cases:
        pinned_copy(bench, min(size_bytes, 8 * GIB))
        pageable_copy(bench, min(size_bytes, 2 * GIB))
    if "tmpfs" in cases:
        threads_alone(bench, min(model.glob("*.safetensors")))
        for verify in MODES:
            checked = None if verify is Verify.OFF else tree
            measure(bench, "tmpfs", from_directory(model, checked), verify)
    if "store" in cases:
        for verify in MODES[1:]:
            measure(bench, "store's packs", StoreSource(store, content, wire=False), verify)
    if "wire" in cases:
        measure(bench, "wire path", StoreSource(store, content, wire=True), Verify.CPU)
    if "memory" in cases:
        memory(bench, from_directory(model, None), "tmpfs", Verify.OFF)
        memory(bench, from_directory(model, tree), "tmpfs", Verify.DEVICE)
        memory(bench, StoreSource(store, content, wire=True), "wire path", Verify.CPU)
    if "peers" in cases:
        peers(bench, model, list(LOADERS))
    if cases & {"disk", "mounted"}:
        on_disk(bench, options, slow, cases)


def on_disk(bench: Bench, options: argparse.Namespace, slow: Path, cases: set[str]) -> None:
    """Files on a disk: in the page cache, cold, and mounted as an image."""
    model, store = slow / "model", slow / "store"
    write_model(model, int(options.disk_gib * GIB))
    content = push(model, store)
    if "disk" in cases:
        warm(model)
        for verify in MODES:
            checked = None if verify is Verify.OFF else content.tree
            measure(bench, "page cache", from_directory(model, checked), verify)
        raw_direct(bench, model)
        for verify in MODES:
            checked = None if verify is Verify.OFF else content.tree
            measure(
                bench, "cold disk", from_directory(model, checked), verify,
                route=Route.AUTO, before=lambda: drop(model),
            )  # fmt: skip
    if "mounted" in cases:
        with mounted(store, slow) as place:
            if place is None:
                bench.report.add("mounted image", note="can't be mounted here")
                return
            warm(place)
            for verify in MODES:
                checked = None if verify is Verify.OFF else content.tree
                measure(bench, "mounted image", from_directory(place, checked), verify)


if __name__ == "__main__":
    main()
