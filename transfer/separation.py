"""What is pushed or pulled does not overlap with a store that is a directory itself. Blocks."""

from __future__ import annotations

import os

from imgfmt.errors import InvalidInput
from transfer.oserrors import printable
from transfer.store.base import Store
from transfer.store.posix import PosixStore


def check_source(store: Store, directory: str) -> None:
    """Raise InvalidInput if the store lies in what is to be pushed: it would never be at rest."""
    if isinstance(store, PosixStore) and _is_within(store.root, directory):
        raise InvalidInput(
            f"the store {printable(store.root)} lies in {printable(directory)}; push to a store"
            " elsewhere, or push a directory without the store"
        )
    _check_outside(store, directory, "push")


def check_target(store: Store, directory: str) -> None:
    """Raise InvalidInput if what is to be filled lies in the store."""
    _check_outside(store, directory, "pull to")


def _check_outside(store: Store, directory: str, verb: str) -> None:
    if isinstance(store, PosixStore) and _is_within(directory, store.root):
        raise InvalidInput(
            f"{printable(directory)} lies in the store {printable(store.root)}; {verb} a directory"
            " outside of it"
        )


def _is_within(inner: str, outer: str) -> bool:
    """Whether it is the same directory or below it, symbolic links resolved."""
    inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return os.path.commonpath([inner, outer]) == outer
