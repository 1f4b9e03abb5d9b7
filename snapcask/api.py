"""The public API for programs that block: the calls of `snapcask.aio`, which documents them.

Each runs on an event loop on a thread of its own, so it works where a loop is running already. A
call that is interrupted (Ctrl-C) cleans up before it raises.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from imgfmt.errors import InvalidInput
from snapcask import aio
from snapcask.handles import AsyncImageHandle, EntryStat, PathText
from snapcask.running import LoopThread, blocking
from snapcask.stores import StoreName
from transfer.reader import ChunkSpan

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

T = TypeVar("T")

init_store = blocking(aio.init_store)
push = blocking(aio.push)
plan_pull = blocking(aio.plan_pull)
pull = blocking(aio.pull)
verify = blocking(aio.verify)
gc = blocking(aio.gc)
check = blocking(aio.check)


def open_image(
    reference: str,
    *,
    store: StoreName | None,
    member: str | None = None,
    facts: Mapping[str, str] | None = None,
    max_memory_bytes: int | None = None,
) -> ImageHandle:
    """Read files of an image from the store. Close it, or use it as a context manager.

    `member` may be left out where there is only one. Only the chunks that cover what is read are
    fetched, and each is verified. Nothing is kept for later reads. Errors are those of
    `aio.open_image`.
    """
    return ImageHandle(
        reference, store=store, member=member, facts=facts, max_memory_bytes=max_memory_bytes
    )


class ImageHandle:
    """One member of an open image, made by `open_image`. May be used from several threads.

    Paths are relative to the member's root, as str (other bytes than UTF-8 as `os.fsdecode` gives
    them) or bytes. Symbolic links are not followed.
    """

    def __init__(
        self,
        reference: str,
        *,
        store: StoreName | None,
        member: str | None,
        facts: Mapping[str, str] | None,
        max_memory_bytes: int | None,
    ) -> None:
        self._context = aio.open_image(
            reference, store=store, member=member, facts=facts, max_memory_bytes=max_memory_bytes
        )
        self._handle: AsyncImageHandle | None = None
        self._loop = LoopThread()
        try:
            self._handle = self._loop.run(_as_coroutine(self._context.__aenter__()))
        finally:
            if self._handle is None:
                self._loop.close()

    @property
    def _image(self) -> AsyncImageHandle:
        if self._handle is None:
            raise InvalidInput("the image was closed")
        return self._handle

    def paths(self) -> list[str]:
        """All entries below the root, a directory before what it holds."""
        return self._image.paths()

    def stat(self, path: PathText) -> EntryStat:
        """What is recorded of a path; "" is the root. Raises NotFound."""
        return self._image.stat(path)

    def chunks(self, path: PathText) -> list[ChunkSpan]:
        """See `AsyncImageHandle.chunks`."""
        return self._image.chunks(path)

    def read(self, path: PathText, offset: int = 0, length: int = -1) -> bytes:
        """See `AsyncImageHandle.read`."""
        return self._loop.run(self._image.read(path, offset, length))

    def read_into(self, path: PathText, offset: int, buffer: WriteableBuffer) -> int:
        """See `AsyncImageHandle.read_into`."""
        return self._loop.run(self._image.read_into(path, offset, buffer))

    def close(self) -> None:
        """Let go of the store; no read may be under way. Does nothing the second time."""
        if self._handle is None:
            return
        self._handle = None
        self._loop.run(_as_coroutine(self._context.__aexit__(None, None, None)))
        self._loop.close()

    def __enter__(self) -> ImageHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


async def _as_coroutine(step: Awaitable[T]) -> T:
    return await step
