"""A journal of verified chunks: what an interrupted build of one tree need not fetch again.

Its format is in docs/node-cache.md. Records are appended after their chunks are in their files, so
in the same session they are true; after a power cut they are a list of what to read and hash.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from imgfmt.digest import Digest
from transfer.plan import Numbers

MAGIC = b"SNAPJRN1"
_HEAD = struct.Struct("<8s32sI16sI")
_RECORD = np.dtype([("first", "<u4"), ("count", "<u4"), ("crc", "<u4")])
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Flags = npt.NDArray[np.bool_]
"""For each chunk of a tree, whether something holds for it."""


@dataclass(frozen=True, slots=True, eq=False)
class Journaled:
    """What a journal says: for each chunk whether it is in its file, written in which session."""

    done: Flags
    session: bytes


class JournalReader:
    """Follows a journal that may be growing, or be begun anew. `done` has what was read so far."""

    def __init__(self, path: str, tree: Digest, n_chunks: int) -> None:
        self._path = path
        self._tree = tree
        self._inode = -1
        self._position = 0
        self.session = b""
        self.done: Flags = np.zeros(n_chunks, np.bool_)

    def refresh(self) -> bool:
        """Read what is new. False if there is no such journal, or it is of another tree."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            there = os.fstat(descriptor)
            if there.st_ino != self._inode:
                self._inode, self._position = there.st_ino, 0
                self.done[:] = False
                if not self._read_head(os.pread(descriptor, _HEAD.size, 0)):
                    self._inode = -1
                    return False
            begin = _HEAD.size + self._position * _RECORD.itemsize
            self._take(os.pread(descriptor, max(0, there.st_size - begin), begin))
        finally:
            os.close(descriptor)
        return True

    def _read_head(self, raw: bytes) -> bool:
        if len(raw) != _HEAD.size:
            return False
        magic, tree, n_chunks, session, crc = _HEAD.unpack(raw)
        if (magic, tree, n_chunks) != (MAGIC, self._tree.raw, len(self.done)):
            return False
        if crc != zlib.crc32(raw[:-4]):
            return False
        self.session = session
        return True

    def _take(self, raw: bytes) -> None:
        whole = raw[: len(raw) - len(raw) % _RECORD.itemsize]
        for first, count, crc in np.frombuffer(whole, _RECORD).tolist():
            if crc != _record_crc(first, count, self._position) or first + count > len(self.done):
                return
            self.done[first : first + count] = True
            self._position += 1


class Journal:
    """A journal open for appending, by one process. Its folder and lock are the caller's."""

    def __init__(self, descriptor: int, position: int) -> None:
        self._descriptor = descriptor
        self._position = position

    def append(self, numbers: Numbers) -> None:
        """Note chunks of the tree that are in their files. One caller at a time."""
        ordered = np.sort(numbers)
        edges = np.flatnonzero(np.diff(ordered, prepend=-2) != 1)
        counts = np.diff(edges, append=len(ordered)).tolist()
        records = np.array(
            [
                (first, count, _record_crc(first, count, self._position + i))
                for i, (first, count) in enumerate(
                    zip(ordered[edges].tolist(), counts, strict=True)
                )
            ],
            _RECORD,
        )
        view = memoryview(records.tobytes())
        while len(view):
            view = view[os.write(self._descriptor, view) :]
        self._position += len(edges)

    def close(self) -> None:
        """Does nothing the second time."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def begin_journal(path: str, tree: Digest, done: Flags, session: bytes) -> Journal:
    """Begin a journal that has the chunks of `done`; until then the old one stays in place."""
    temporary = path + ".new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, _APPEND | os.O_EXCL, 0o600)
    journal = Journal(descriptor, 0)
    try:
        head = _HEAD.pack(MAGIC, tree.raw, len(done), session, 0)[:-4]
        os.write(descriptor, head + struct.pack("<I", zlib.crc32(head)))
        if done.any():
            journal.append(np.flatnonzero(done))
            os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        journal.close()
        raise
    return journal


def read_journal(path: str, tree: Digest, n_chunks: int) -> Journaled | None:
    """What is in a journal, up to the first record that does not fit; None if there is none."""
    reader = JournalReader(path, tree, n_chunks)
    if not reader.refresh():
        return None
    return Journaled(reader.done, reader.session)


def _record_crc(first: int, count: int, position: int) -> int:
    return zlib.crc32(struct.pack("<III", first, count, position & 0xFFFFFFFF))
