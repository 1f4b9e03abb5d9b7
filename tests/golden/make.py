"""Makes the golden stores. Run it once for a new format version; never for one that was released.

    python tests/golden/make.py tests/golden/v1

Each store under the folder was written by the version of its name, is committed, and is read again
by `test_golden.py` for ever. Beside the stores, `expected.json` says what a pull of them gives.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

from blake3 import blake3

from imgfmt.store_record import NewChunks, StoreRecord
from transfer import references
from transfer.catalog import init_store, open_catalog
from transfer.config import TransferConfig
from transfer.push import DirectorySource, PushRequest, push
from transfer.store.posix import PosixStore


def make_directory(root: Path) -> None:
    """One of everything that a tree can hold, in about 90 kB of data."""
    (root / "empty-dir").mkdir(parents=True)
    (root / "sub").mkdir()
    stream = blake3(b"golden").digest(length=90_000)
    (root / "sub" / "pages-1.img").write_bytes(stream[:80_000])
    with open(root / "sparse.img", "wb") as file:
        file.write(stream[80_000:])
        file.seek(1_000_000)
        file.write(b"end")
    (root / "text").write_bytes(b"compressible " * 1000)
    (root / "empty").write_bytes(b"")
    os.link(root / "text", root / "same-text")
    os.symlink("../outside", root / "sub" / "link")
    Path(os.fsdecode(bytes(root) + b"/name-\xff\xfe")).write_bytes(b"not UTF-8")
    os.chmod(root / "text", 0o640)
    os.setxattr(root / "text", "user.note", b"kept")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        when = (1_700_000_000 + number) * 10**9 + 123_456_789
        os.utime(path, ns=(when, when), follow_symlinks=False)
    os.utime(root, ns=(1_700_000_000 * 10**9, 1_700_000_000 * 10**9))


def describe(root: Path) -> dict[str, list[object]]:
    """Type, mode, size, time, content digest or target, and hard-link count of each path."""
    found: dict[str, list[object]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        name = os.fsencode(path.relative_to(root)).decode("latin-1")
        links = status.st_nlink if path.is_file() else 0
        mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
        found[name] = [stat.S_IFMT(status.st_mode), mode, status.st_mtime_ns, content, links]
    return found


async def make_store(folder: Path, source: Path, codec: NewChunks) -> str:
    """Push `source` into a new store; returns the image's digest."""
    references.whoami = lambda: "golden"
    store = PosixStore(str(folder))
    record = StoreRecord(blake3(folder.name.encode()).digest()[:16], True, codec=codec)
    await init_store(store, record)
    catalog = await open_catalog(store, write=True)
    request = PushRequest([DirectorySource("main", str(source))], reference=("golden/image", "v1"))
    report = await push(catalog, request, config=TransferConfig())
    store.close()
    for name in ("tmp", "leases"):
        if (folder / name).exists():
            (folder / name).rmdir()
    return str(report.digest)


def main() -> None:
    """Make all stores of one version."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        source = Path(name) / "source"
        make_directory(source)
        digests = {
            codec.value: asyncio.run(make_store(target / codec.value, source, codec))
            for codec in (NewChunks.RAW, NewChunks.ZSTD)
        }
        expected = {"digests": digests, "entries": describe(source)}
        (target / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
