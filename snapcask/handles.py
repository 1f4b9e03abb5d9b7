"""An open image: reading ranges of its files, without writing it anywhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from imgfmt.errors import InvalidInput
from imgfmt.tree import EntryType
from transfer.reader import ChunkSpan, ImageReader

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PathText = str | bytes


@dataclass(frozen=True, slots=True)
class EntryStat:
    """What an image records of a path. `mode` are the 12 permission bits, times since 1970."""

    type: EntryType
    size_bytes: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    link_target: str | None


class AsyncImageHandle:
    """One member of an image. Reads may run at the same time; use it while the image is open.

    Paths are relative to the member's root, as str (other bytes than UTF-8 as `os.fsdecode` gives
    them) or bytes. Symbolic links are not followed.
    """

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader

    def paths(self) -> list[str]:
        """All entries below the root, a directory before what it holds."""
        return [os.fsdecode(path) for path in self._all_paths[1:]]

    @cached_property
    def _all_paths(self) -> list[bytes]:
        return self._reader.paths()

    def stat(self, path: PathText) -> EntryStat:
        """What is recorded of a path; "" is the root. Raises NotFound."""
        entry = self._reader.stat(path)
        size_bytes = entry.size_bytes
        if not size_bytes:  # perhaps another name of something
            size_bytes = self._reader.stat(self._all_paths[entry.group]).size_bytes
        is_link = entry.type is EntryType.SYMLINK
        return EntryStat(
            type=entry.type,
            size_bytes=size_bytes,
            mode=entry.mode,
            uid=entry.uid,
            gid=entry.gid,
            mtime_ns=entry.mtime_s * 1_000_000_000 + entry.mtime_ns,
            link_target=os.fsdecode(entry.target) if is_link else None,
        )

    def chunks(self, path: PathText) -> list[ChunkSpan]:
        """Chunks of a file, ascending; what lies between them is zero. Raises as `read` does.

        With their offsets `load_ranges` brings ranges of chunks to memory of the caller.
        """
        return self._reader.chunks(path)

    async def read(self, path: PathText, offset: int = 0, length: int = -1) -> bytes:
        """Bytes of a file in [offset, offset + length), or to its end if `length` is negative.

        Fewer only where the file ends before. Raises NotFound, InvalidInput for what is no file or
        a negative offset, CorruptData.
        """
        if length < 0:
            length = max(0, self.stat(path).size_bytes - max(0, offset))
        return await self._reader.read(path, offset, length)

    async def read_into(self, path: PathText, offset: int, buffer: WriteableBuffer) -> int:
        """Fill `buffer` from byte `offset` of a file; returns the bytes read.

        Fewer than it holds only at the file's end. After an error the content of `buffer` is not
        defined. Raises as `read` does.
        """
        view = memoryview(buffer)
        if view.readonly or not view.c_contiguous:
            raise InvalidInput("the buffer to read into is read-only or not contiguous")
        return await self._reader.read_into(path, offset, view.cast("B"))
