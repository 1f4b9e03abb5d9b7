"""Reading parts of files straight from an image, without writing the image anywhere."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

import numpy as np

from imgfmt.digest import Digest
from imgfmt.errors import InvalidInput, NotFound
from imgfmt.tree import Entry, EntryType, Tree
from transfer.catalog import Catalog, MemberContent
from transfer.config import TransferConfig
from transfer.execute import Executor, Strict
from transfer.oserrors import printable
from transfer.plan import Numbers
from transfer.pull import choose_image, choose_members
from transfer.threads import Threads


class ChunkSpan(NamedTuple):
    """A chunk of a file: `n_bytes` from `offset` on that have this digest."""

    offset: int
    n_bytes: int
    digest: Digest


class ImageReader:
    """Verified reading from one member of an image. Made by `open_reader`; to be closed.

    Paths are below the member's root, as bytes or as `os.fsencode` takes them. Links are not
    followed. Reads may run at the same time.
    """

    def __init__(self, executor: Executor, tree: Tree) -> None:
        self._executor = executor
        self._tree = tree

    def close(self) -> None:
        """End the reader's threads. No read may be under way."""
        self._executor.threads.close()

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @cached_property
    def _index(self) -> dict[bytes, int]:
        return {path: index for index, path in enumerate(self._tree.paths())}

    def paths(self) -> list[bytes]:
        """Paths of all entries in the order of the tree; the root's is empty."""
        return list(self._index)

    def stat(self, path: str | bytes) -> Entry:
        """What the tree says of a path. Raises NotFound."""
        return self._tree.entry(self._find(path))

    def chunks(self, path: str | bytes) -> list[ChunkSpan]:
        """Chunks of a file, ascending; what lies between them is zero. Raises as `read_into`."""
        tree = self._tree
        first, end = tree.chunk_range(self._file(path))
        offsets, lengths = tree.chunk_offset[first:end], tree.chunk_bytes[first:end]
        digests = [Digest(raw.tobytes()) for raw in tree.chunk_digest[first:end]]
        return list(map(ChunkSpan, offsets.tolist(), lengths.tolist(), digests))

    async def read(self, path: str | bytes, offset: int, length: int) -> bytes:
        """The bytes of a file in [offset, offset + length), fewer where it ends before."""
        size_bytes = int(self._tree.columns["size"][self._file(path)])
        buffer = bytearray(max(0, min(length, size_bytes - offset)))
        await self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    async def read_into(self, path: str | bytes, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `offset` of a file; returns the bytes read.

        Fewer than asked for only at the file's end. After an error `buffer` is undefined. Raises
        NotFound, InvalidInput for what is no file, CorruptData.
        """
        index = self._file(path)
        if offset < 0:
            raise InvalidInput(f"offset {offset} is negative")
        size_bytes = int(self._tree.columns["size"][index])
        buffer = buffer.cast("B")[: max(0, size_bytes - offset)]
        if not len(buffer):
            return 0
        first, end = self._tree.chunk_range(index)
        begins = self._tree.chunk_offset[first:end].astype(np.int64)
        ends = begins + self._tree.chunk_bytes[first:end]
        covering = np.flatnonzero((begins < offset + len(buffer)) & (ends > offset))
        _fill_gaps(buffer, begins[covering] - offset, ends[covering] - offset)
        if len(covering):
            sink = _IntoBuffer(buffer, first, begins - offset)
            await self._executor.read(sink, covering + first)
        return len(buffer)

    def _find(self, path: str | bytes) -> int:
        index = self._index.get(os.fsencode(path))
        if index is None:
            raise NotFound(f"the image has no {printable(path)}")
        return index

    def _file(self, path: str | bytes) -> int:
        """Index of the first name of a file."""
        index = self._find(path)
        if self._tree.columns["type"][index] != EntryType.FILE:
            raise InvalidInput(f"{printable(path)} is not a regular file")
        return int(self._tree.columns["group"][index])


class _IntoBuffer(Strict):
    """Copies chunks into a buffer, cut to its length: chunk `first + i` begins at `begins[i]`."""

    def __init__(self, buffer: memoryview, first: int, begins: Numbers) -> None:
        self._out = np.frombuffer(buffer, np.uint8)
        self._first = first
        self._begins = begins

    def accept(self, numbers: Numbers, views: Sequence[memoryview]) -> None:
        """See `Sink.accept`."""
        begins = self._begins[numbers - self._first].tolist()
        for begin, view in zip(begins, views, strict=True):
            low, high = max(0, begin), min(len(self._out), begin + len(view))
            self._out[low:high] = np.frombuffer(view, np.uint8)[low - begin : high - begin]


def _fill_gaps(buffer: memoryview, begins: Numbers, ends: Numbers) -> None:
    """Set what lies between the ranges [begins, ends) to zero."""
    out = np.frombuffer(buffer, np.uint8)
    lows = np.concatenate([[0], ends])
    highs = np.concatenate([begins, [len(out)]])
    for gap in np.flatnonzero(highs > lows).tolist():
        out[lows[gap] : highs[gap]] = 0


async def open_reader(
    catalog: Catalog,
    digest: Digest,
    member: str | None = None,
    *,
    config: TransferConfig,
    facts: Mapping[str, str],
) -> ImageReader:
    """Open one member of an image, which may be left out where there is only one.

    `facts` choose among variants. Raises NotFound, InvalidInput, CorruptData.
    """
    digest, image = await choose_image(catalog, digest, facts)
    members = choose_members(image, digest, member)
    if len(members) > 1:
        names = ", ".join(m.name for m in members)
        raise InvalidInput(f"image {digest.short} has several members, name one of {names}")
    content: MemberContent = await catalog.content(members[0].tree)
    threads = Threads("reader", config.n_threads)
    try:
        return ImageReader(Executor(catalog, [content], threads, config), content.tree)
    except BaseException:
        threads.close()
        raise
