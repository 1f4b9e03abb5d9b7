"""A progress bar on standard error, for people. Loads rich, so load this only for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Display
from rich.text import Text

from snapcask.render import human_bytes


class Bar:
    """A `transfer.progress.Progress`: the phase and, where there are bytes to tell of, how many."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._task: TaskID | None = None

    def phase(self, name: str, total_bytes: int) -> None:
        """See `Progress.phase`."""
        if self._task is not None:
            self._display.remove_task(self._task)
        self._task = self._display.add_task(name, total=total_bytes or None)

    def advance(self, n_bytes: int) -> None:
        """See `Progress.advance`."""
        if self._task is not None:
            self._display.advance(self._task, n_bytes)


class _Speed(ProgressColumn):
    """Bytes per second."""

    def render(self, task: Task) -> Text:
        """Nothing until it is known."""
        speed = task.finished_speed or task.speed
        return Text(f"{human_bytes(int(speed))}/s" if speed else "")


@contextmanager
def progress_bar() -> Iterator[Bar]:
    """Show a bar that vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        _Speed(),
        TimeRemainingColumn(),
    )
    with Display(*columns, console=Console(stderr=True), transient=True) as display:
        yield Bar(display)
