"""Slots of pinned memory: each is filled with one read, and devices copy from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from imgfmt.errors import OutOfResources
from restore.driver import STATUS_BYTES, Driver, Event
from restore.host_driver import address_of
from restore.pinned import PAGE_BYTES, Arena


@dataclass(slots=True, eq=False)
class Slot:
    """A buffer, an event for each device, and a status word, which devices write at `status_at`."""

    view: memoryview
    address: int
    status: memoryview
    status_at: int
    events: dict[int, Event]


def make_slots(
    driver: Driver, arena: Arena, slot_bytes: int, events: Callable[[], dict[int, Event]]
) -> list[Slot]:
    """As many slots as the arena holds. `events` makes those of one slot."""
    words = arena.allocate(PAGE_BYTES)
    words_at = driver.mapped(address_of(words))
    slots: list[Slot] = []
    n_slots = min((arena.size_bytes - PAGE_BYTES) // slot_bytes, PAGE_BYTES // STATUS_BYTES)
    for index in range(n_slots):
        try:
            view, at = arena.allocate(slot_bytes), index * STATUS_BYTES
        except OutOfResources:  # what is left is in pieces that hold none
            break
        word = words[at : at + STATUS_BYTES]
        slots.append(Slot(view, address_of(view), word, words_at + at, events()))
    return slots
