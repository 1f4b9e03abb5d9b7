"""Tensors one after the other, each as soon as it is complete."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from restore.tensor import Tensor
from snapcask.load_source import SourceName
from snapcask.loading import load_replicas

_Item = Tensor | BaseException | None


class _Background:
    """A load on a thread of its own. It ends with None, or with what it raised."""

    def __init__(self, source: SourceName, device: str, given: dict[str, Any]) -> None:
        self.items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._source = source
        self._device = device
        self._given = given
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="snapcask-stream")
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._load())
        except BaseException as error:
            self.items.put(error)
        else:
            self.items.put(None)

    async def _load(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if not self._stop.is_set():
            await load_replicas(
                self._source, devices=[self._device], deliver=self._deliver, **self._given
            )

    def _deliver(self, tensors: Sequence[Tensor]) -> None:
        self.items.put(tensors[0])

    def close(self) -> None:
        """Stop the load if it runs, and wait for its end."""
        self._stop.set()
        if self._loop is not None and self._task is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


def iter_tensors(source: SourceName, *, device: str = "cuda:0", **given: Any) -> Iterator[Tensor]:
    """The tensors that `load` would return, each as soon as it is complete and verified.

    Arguments and errors are those of `load`. Tensors that were handed out before an error are good,
    others are not handed out. Closing the iterator stops the load. Device memory for all tensors is
    taken at the start.
    """
    background = _Background(source, device, given)
    try:
        while (item := background.items.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        background.close()
