"""How the engine says what it is doing. Displays live above; the engine only calls these."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of phases and bytes, from the event loop's thread only. Calls must return at once."""

    def phase(self, name: str, total_bytes: int) -> None:
        """A phase begins: "scan", "read", "publish", "fetch", ... `total_bytes` is 0 if unknown."""

    def advance(self, n_bytes: int) -> None:
        """`n_bytes` more of the phase are done."""


class Silent:
    """No progress display."""

    def phase(self, name: str, total_bytes: int) -> None:
        """Ignore."""

    def advance(self, n_bytes: int) -> None:
        """Ignore."""


class PhaseClock:
    """Seconds spent in each phase; phases follow each other, so they sum to the total."""

    def __init__(self, now_s: Clock) -> None:
        self._now_s = now_s
        self._begun_s = self._mark_s = now_s()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """The time since the last call, or since the start, belongs to `phase`."""
        now = self._now_s()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._mark_s
        self._mark_s = now

    def total(self) -> dict[str, float]:
        """Seconds per phase and under "total"."""
        return {**self.seconds, "total": self._mark_s - self._begun_s}


class Clock(Protocol):
    """A monotonic clock in seconds."""

    def __call__(self) -> float:
        """Seconds since some fixed moment."""
