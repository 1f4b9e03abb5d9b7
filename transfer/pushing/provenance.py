"""What a snapshot directory tells of itself: CRIU's small image files and NVIDIA's manifest.

Looks at the directory itself, not below it, and at no page. All calls block: use a thread.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace

from imgfmt import criu, criu_facts
from imgfmt.criu import CriuSummary
from imgfmt.errors import ImageError, InvalidImage
from imgfmt.nvidia import MANIFEST_FILE, facts_of_manifest
from transfer.oserrors import printable

PAGEMAPS_LIMIT_BYTES = 4 << 20
"""Of all pagemaps of a dump together: reading 1 MiB takes about 1 s and 7 MiB of memory."""

FILE_LIMIT_BYTES = 1 << 20
LOG_READ_BYTES = 64 << 10
MANIFEST_LIMIT_BYTES = 256 << 10
PARENT_LINK = "parent"


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """`facts` are the provenance of a member made from the directory; `criu` is set for a dump."""

    facts: dict[str, str]
    criu: CriuSummary | None
    warnings: list[str]


def describe_directory(path: str | bytes) -> DirectoryFacts:
    """Read what the directory tells; nothing if it is no snapshot that is known here.

    What is malformed costs its facts and gives a warning. A directory that can't be listed gives
    nothing: whoever scans it will say why.
    """
    root = os.fsencode(path)
    facts: dict[str, str] = {}
    summary: CriuSummary | None = None
    warnings: list[str] = []
    try:
        names = sorted(os.fsdecode(name) for name in os.listdir(root))
    except OSError:
        return DirectoryFacts(facts, summary, warnings)
    if criu.is_criu_directory(names):
        try:
            summary, facts = _describe_dump(root, names)
            warnings += summary.warnings
        except ImageError as error:
            warnings.append(f"{printable(root)}: {error}; nothing is recorded of the CRIU dump")
    if MANIFEST_FILE in names:
        try:
            raw = _read(root, MANIFEST_FILE, MANIFEST_LIMIT_BYTES, whole=True)
            from transfer.pushing.manifest import parse_manifest  # YAML, which few directories have

            facts |= facts_of_manifest(parse_manifest(raw))
        except ImageError as error:
            warnings.append(f"{printable(root)}: {error}; nothing is recorded of the manifest")
    return DirectoryFacts(facts, summary, warnings)


def host_facts() -> dict[str, str]:
    """Facts of this machine, under the names that a snapshot's own facts have. No host name."""
    facts = {"cpu.arch": platform.machine(), "kernel.release": platform.release()}
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return facts
    return {**facts, "os": f"{release['ID']}-{release.get('VERSION_ID', '')}".rstrip("-")}


def _describe_dump(root: bytes, names: list[str]) -> tuple[CriuSummary, dict[str, str]]:
    pagemaps = [name for name in names if name.startswith("pagemap-")]
    pages_file_bytes = {n: _size_bytes(root, n) for n in names if criu.is_pages_file(n)}
    too_large = sum(_size_bytes(root, name) for name in pagemaps) > PAGEMAPS_LIMIT_BYTES
    left_out = set(pagemaps) if too_large else set()
    small_files = _small_files(root, (n for n in names if n not in left_out))
    summary = criu.summarise(
        small_files,
        pages_file_bytes={} if too_large else pages_file_bytes,
        has_parent_link=PARENT_LINK in names,
    )
    if too_large:
        summary = replace(
            summary,
            pages_files=len(pages_file_bytes),
            pages_bytes=sum(pages_file_bytes.values()),
            warnings=(
                *summary.warnings,
                f"the pagemaps have more than {PAGEMAPS_LIMIT_BYTES >> 20} MiB and were not looked"
                " at: whether pages are compressed or in a parent dump is not known",
            ),
        )
    core = criu_facts.core_file(summary)
    if core is not None and core in names:
        small_files[core] = _read(root, core, FILE_LIMIT_BYTES, whole=True)
    return summary, criu_facts.facts_of(summary, small_files)


def _small_files(root: bytes, names: Iterable[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in names:
        if name == criu.LOG_FILE:
            found[name] = _read(root, name, LOG_READ_BYTES, whole=False)
        elif criu.is_summary_file(name):
            limit = PAGEMAPS_LIMIT_BYTES if name.startswith("pagemap-") else FILE_LIMIT_BYTES
            found[name] = _read(root, name, limit, whole=True)
    return found


def _size_bytes(root: bytes, name: str) -> int:
    """Size of a regular file; 0 for anything else, also for what is gone."""
    try:
        found = os.lstat(root + b"/" + os.fsencode(name))
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _read(root: bytes, name: str, limit_bytes: int, *, whole: bool) -> bytes:
    """The first `limit_bytes` of a regular file at most; a longer one is refused if `whole`."""
    path = root + b"/" + os.fsencode(name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidImage(f"{name} is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                raw = file.read(limit_bytes + whole)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InvalidImage(f"{name} can't be read: {error.strerror}") from error
    if len(raw) > limit_bytes:
        raise InvalidImage(f"{name} has more than {limit_bytes} bytes")
    return raw
