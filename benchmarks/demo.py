"""The main job in a minute: two live processes with the same model go into a store and come back.

Starts two small inference-like processes, captures their memory in CRIU's layout, pushes both,
shows what the second one added, pulls one back and compares every byte. Needs no CRIU, no GPU and
no server. Run: `make demo`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from restore.capture import capture_process

HERE = Path(__file__).parent
READY_TIMEOUT_S = 60
MODEL_SEED = 7


@contextlib.contextmanager
def replica(folder: Path, number: int, weights_mb: int) -> Iterator[int]:
    """A running replica that has loaded its weights in an order of its own; gives its pid."""
    ready = folder / f"ready-{number}"
    command = [sys.executable, str(HERE / "replica.py"), "--model-seed", str(MODEL_SEED)]
    command += ["--order-seed", str(number), "--weights-mb", str(weights_mb)]
    with subprocess.Popen([*command, "--ready-file", str(ready)]) as process:
        try:
            deadline_s = time.monotonic() + READY_TIMEOUT_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"replica {number} did not start")
                time.sleep(0.02)
            yield process.pid
        finally:
            process.kill()


def snapcask(*arguments: str) -> str:
    """Run the command as a user would, show it, and return what it prints."""
    print(f"\n$ snapcask {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "snapcask", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def identical(left: Path, right: Path) -> int:
    """Number of files, after checking that names, modes, times and bytes are the same."""
    names = sorted(path.relative_to(left) for path in left.rglob("*"))
    if names != sorted(path.relative_to(right) for path in right.rglob("*")):
        raise SystemExit(f"{left} and {right} hold different names")
    for name in names:
        a, b = (left / name).stat(), (right / name).stat()
        if (a.st_mode, a.st_size, a.st_mtime_ns) != (b.st_mode, b.st_size, b.st_mtime_ns):
            raise SystemExit(f"{name} differs in mode, size or time")
        if (left / name).is_file() and (left / name).read_bytes() != (right / name).read_bytes():
            raise SystemExit(f"{name} differs in content")
    return len(names)


def show_dedup(pushes: dict[str, dict[str, int]]) -> None:
    """The table that this is all about: what each snapshot added to the store."""
    columns = ("logical_bytes", "zero_bytes", "reused_bytes", "new_bytes")
    print(f"\n{'snapshot':<12}" + "".join(f"{name[:-6] + ' MB':>12}" for name in columns))
    for name, found in pushes.items():
        print(f"{name:<12}" + "".join(f"{found[column] / 1e6:>12.1f}" for column in columns))


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="demo-store", help="made anew (default: ./demo-store)")
    parser.add_argument("--weights-mb", type=int, default=200, help="weights of each replica")
    options = parser.parse_args()
    store = Path(options.store)
    if store.exists() and not (store / "store.msgpack").exists():
        raise SystemExit(f"{store} is not a store of an earlier demo; remove it or use --store")
    shutil.rmtree(store, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="snapcask-demo-") as name:
        folder = Path(name)
        print(
            f"two processes load the same {options.weights_mb} MB of weights, in different orders"
        )
        weights_mb = options.weights_mb
        with replica(folder, 0, weights_mb) as first, replica(folder, 1, weights_mb) as second:
            for number, pid in enumerate((first, second)):
                stats = capture_process(pid, folder / f"replica-{number}")
                print(f"captured process {pid}: {stats.bytes / 1e6:.0f} MB of memory")
        os.environ["SNAPCASK_STORE"] = str(store)
        print(snapcask("init", str(store)), end="")
        pushes = {}
        for number in range(2):
            source = str(folder / f"replica-{number}")
            said = snapcask("push", "--json", source, f"demo/replica:{number}")
            pushes[f"replica-{number}"] = json.loads(said)
            print(pushes[f"replica-{number}"]["digest"])
        show_dedup(pushes)
        print(snapcask("pull", "demo/replica:1", str(folder / "back")), end="")
        n_files = identical(folder / "replica-1", folder / "back")
        print(f"\nreplica-1 came back byte for byte: {n_files} files, modes and times too.")
        print(f"The store is in {store}; try: snapcask ls --store {store}")


if __name__ == "__main__":
    main()
