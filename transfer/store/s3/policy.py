"""When to wait, when to try again and when to give up. Pure, with the time handed in.

What carries these out is elsewhere: `reader` and `calls` retry, `http` watches its connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

KIB, MIB = 1024, 1024 * 1024


class Action(StrEnum):
    """What to do about a request that failed."""

    FAIL = "fail"  # a repeat would fail in the same way
    RETRY = "retry"  # a repeat may succeed
    THROTTLE = "throttle"  # it may, but all should ask for less
    RENEW = "renew"  # it may, with new credentials


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a request may do nothing. There is no limit to what makes progress.

    A body is stalled if less than `stall_bytes_per_s` came over a whole `stall_window_s`.
    """

    connect_s: float = 5.0
    first_byte_s: float = 15.0
    stall_bytes_per_s: int = 64 * KIB
    stall_window_s: float = 10.0
    idle_s: float = 10.0  # for which an unused connection is kept


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """How often one request is repeated.

    `attempts` are those in a row that gain less than `progress_bytes`. Being told to slow down
    does not count, but only for `throttle_patience_s` without any progress. `budget` repeats may
    be spent in all, and every `refund_every` successes give one back.
    """

    attempts: int = 5
    base_s: float = 0.1
    cap_s: float = 20.0
    progress_bytes: int = MIB
    throttle_patience_s: float = 120.0
    budget: int = 200
    refund_every: int = 10


class RetryBudget:
    """Repeats that all requests of one store may spend, so that a broken server ends a transfer."""

    def __init__(self, config: RetryConfig) -> None:
        self._refund = 1 / config.refund_every
        self._most = float(config.budget)
        self._left = self._most

    def spend(self) -> bool:
        """Take one repeat; False if none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def succeeded(self) -> None:
        """Give a part of a repeat back."""
        self._left = min(self._most, self._left + self._refund)


class Retries:
    """The repeats of one request. `uniform(a, b)` is a random number between a and b."""

    def __init__(
        self,
        config: RetryConfig,
        budget: RetryBudget,
        now_s: Callable[[], float],
        uniform: Callable[[float, float], float],
    ) -> None:
        self._config = config
        self._budget = budget
        self._now_s = now_s
        self._uniform = uniform
        self._fruitless = 0
        self._throttled = 0
        self._throttled_since_s: float | None = None
        self._renewed = False
        self.n_failures = 0

    def pause_s(
        self, action: Action, *, gained_bytes: int = 0, retry_after_s: float | None = None
    ) -> float | None:
        """Seconds to wait before the next attempt, or None to give up."""
        self.n_failures += 1
        if gained_bytes >= self._config.progress_bytes:
            self._fruitless = self._throttled = 0
            self._throttled_since_s = None
        match action:
            case Action.FAIL:
                return None
            case Action.RENEW:
                renewed, self._renewed = self._renewed, True
                return None if renewed else 0.0
            case Action.THROTTLE:
                return self._throttle_pause_s(retry_after_s)
            case Action.RETRY:
                self._fruitless += 1
                if self._fruitless >= self._config.attempts or not self._budget.spend():
                    return None
                return self._jittered_s(self._fruitless, retry_after_s)

    def _throttle_pause_s(self, retry_after_s: float | None) -> float | None:
        now_s = self._now_s()
        if self._throttled_since_s is None:
            self._throttled_since_s = now_s
        self._throttled += 1
        if now_s - self._throttled_since_s > self._config.throttle_patience_s:
            return None
        return self._jittered_s(self._throttled, retry_after_s)

    def _jittered_s(self, n: int, retry_after_s: float | None) -> float:
        """Full jitter over a range that doubles; never less than the server asked for."""
        most_s = min(self._config.cap_s, self._config.base_s * 2 ** min(n - 1, 16))
        return max(self._uniform(0.0, most_s), min(retry_after_s or 0.0, self._config.cap_s))


class ProgressWatch:
    """Tells when a body has become too slow to wait for. Call `check` every `period_s`."""

    _PERIODS = 4

    def __init__(self, patience: Patience) -> None:
        self.period_s = patience.stall_window_s / self._PERIODS
        self._least_bytes = patience.stall_bytes_per_s * patience.stall_window_s
        self._periods: deque[int] = deque(maxlen=self._PERIODS)
        self._now_bytes = 0

    def note(self, n_bytes: int) -> None:
        """`n_bytes` more have come."""
        self._now_bytes += n_bytes

    def check(self) -> bool:
        """End a period. True if the last window brought too little."""
        self._periods.append(self._now_bytes)
        self._now_bytes = 0
        full = len(self._periods) == self._PERIODS
        return full and sum(self._periods) < self._least_bytes

    def excuse(self) -> None:
        """Begin anew: what was missing was not the other side's fault."""
        self._periods.clear()


class RateLimit:
    """A token bucket over all connections: whoever moved bytes waits as long as it is told."""

    def __init__(
        self, bytes_per_s: float, now_s: Callable[[], float], *, burst_s: float = 0.05
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now_s = now_s
        self._burst_s = burst_s
        self._paid_until_s = now_s()

    def charge(self, n_bytes: int) -> float:
        """Account for `n_bytes` that were moved; returns the seconds to pause now."""
        now_s = self._now_s()
        self._paid_until_s = max(self._paid_until_s, now_s) + n_bytes / self._bytes_per_s
        pause_s = self._paid_until_s - now_s
        return pause_s if pause_s > self._burst_s else 0.0
