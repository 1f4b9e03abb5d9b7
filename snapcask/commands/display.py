"""Progress for verbs that take long: a bar where a person looks at standard error, else nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer.progress import Progress


@contextmanager
def progress(*, quiet: bool) -> Iterator[Progress | None]:
    """The progress to hand to a call of the API."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from snapcask.progress import progress_bar

    with progress_bar() as bar:
        yield bar
