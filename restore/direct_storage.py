"""GPUDirect Storage, an optional way from files to a device: only where it is proven to be real.

A file is read so only if the kernel's module counted a trial as a read between peers, and the trial
brought what an ordinary read brings. Whatever fails later, the file is read as others are.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from imgfmt.errors import ImageError, Unsupported

DEVICE_NODE = Path("/dev/nvidia-fs0")
STATISTICS = Path("/proc/driver/nvidia-fs/stats")
TRIAL_BYTES = 1 << 20
PAGE_BYTES = 4096

_READS = re.compile(r"^Reads\s*:.*\bn=(\d+).*\bok=(\d+)", re.MULTILINE)

_log = logging.getLogger(__name__)


class FileApi(Protocol):
    """cuFile as far as it is needed. Errors are ImageError."""

    def open(self, descriptor: int) -> int:
        """Register an open file; returns its handle."""

    def close(self, handle: int) -> None:
        """Undo `open`."""

    def read(self, handle: int, pointer: int, n_bytes: int, offset: int) -> int:
        """Bytes that were read to device memory, as cuFile returned it: negative for an error."""


ReadBack = Callable[[int, int], bytes]
"""Bytes of device memory, from a pointer on."""


def why_not_here(node: Path = DEVICE_NODE, statistics: Path = STATISTICS) -> str | None:
    """Why no file can be read so on this machine; None if it may be tried.

    cuFile must not even be opened without the module: it then copies through host memory, and some
    releases close a descriptor that is not theirs.
    """
    if not node.exists():
        return f"the module nvidia-fs is not loaded: there is no {node}"
    if peer_reads(statistics) is None:
        return f"{statistics} does not tell how many reads there were between peers"
    return None


def peer_reads(statistics: Path = STATISTICS) -> int | None:
    """How many reads between peers the module has made, or None if it does not tell."""
    try:
        found = _READS.search(statistics.read_text())
    except OSError:
        return None
    return None if found is None else int(found[2])


class DirectStorage:
    """Reads files to device memory, each only after a trial of its own. For many threads.

    `api` is called for the first time when a file may be tried. To be closed.
    """

    def __init__(
        self, api: Callable[[], FileApi], node: Path = DEVICE_NODE, statistics: Path = STATISTICS
    ) -> None:
        self._make_api = api
        self._statistics = statistics
        self._lock = threading.Lock()
        self._api: FileApi | None = None
        self._open: dict[str, tuple[int, int]] = {}
        self._why_nowhere = why_not_here(node, statistics)
        self.reasons: dict[str, str] = {}
        self.n_bytes = 0

    def prove(self, path: str, pointer: int, read_back: ReadBack) -> str | None:
        """Try a file, with room for `TRIAL_BYTES` at `pointer`; why it is not read so, or None."""
        with self._lock:
            if path not in self.reasons and path not in self._open:
                try:
                    self._try(path, pointer, read_back)
                except ImageError as error:
                    self._give_up(path, str(error))
                except OSError as error:
                    why = f"it can't be read past the page cache: {error.strerror or error}"
                    self._give_up(path, why)
            return self.reasons.get(path)

    def _try(self, path: str, pointer: int, read_back: ReadBack) -> None:
        if self._why_nowhere is not None:
            raise Unsupported(self._why_nowhere)
        if self._api is None:
            try:
                self._api = self._make_api()
            except ImageError as error:
                self._why_nowhere = str(error)
                raise
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            handle = self._api.open(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._open[path] = descriptor, handle
        size_bytes = os.fstat(descriptor).st_size
        length = min(TRIAL_BYTES, size_bytes // PAGE_BYTES * PAGE_BYTES)
        if not length:
            raise Unsupported("it has less than a page")
        before = peer_reads(self._statistics) or 0
        got = self._api.read(handle, pointer, length, 0)
        if got != length:
            raise Unsupported(f"a trial of {length} bytes returned {got}")
        if (peer_reads(self._statistics) or 0) <= before:
            raise Unsupported("a trial was not a read between peers: host memory was in between")
        with open(path, "rb") as file:
            if read_back(pointer, length) != file.read(length):
                raise Unsupported("a trial brought other bytes than the file has")

    def read(self, path: str, pointer: int, n_bytes: int, offset: int) -> bool:
        """Read to device memory; False if the file is to be read as others are, now and later."""
        found = self._open.get(path)
        if found is None or self._api is None:
            return False
        done = 0
        while done < n_bytes:
            try:
                got = self._api.read(found[1], pointer + done, n_bytes - done, offset + done)
            except ImageError as error:
                got, why = -1, str(error)
            else:
                why = f"a read of {n_bytes - done} bytes returned {got}"
            if got <= 0:
                with self._lock:
                    self.reasons.setdefault(path, why)
                _log.warning("%s: GPUDirect is given up: %s", path, why)
                return False
            done += got
        with self._lock:
            self.n_bytes += n_bytes
        return path not in self.reasons

    def _give_up(self, path: str, why: str) -> None:
        self.reasons[path] = why
        _log.debug("%s is not read by GPUDirect: %s", path, why)
        self._forget(path)

    def _forget(self, path: str) -> None:
        descriptor, handle = self._open.pop(path, (None, None))
        if descriptor is None or handle is None or self._api is None:
            return
        try:
            self._api.close(handle)
        except ImageError as error:
            _log.warning("%s: %s", path, str(error))
        os.close(descriptor)

    def close(self) -> None:
        """Let go of all files. No read may be under way."""
        for path in list(self._open):
            self._forget(path)
