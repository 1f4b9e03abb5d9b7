"""Retries, budgets, stall detection and rate limits, with a clock that the test sets."""

from __future__ import annotations

import pytest

from transfer.store.s3.policy import (
    KIB,
    MIB,
    Action,
    Patience,
    ProgressWatch,
    RateLimit,
    Retries,
    RetryBudget,
    RetryConfig,
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def most(low: float, high: float) -> float:
    """The largest that chance may give."""
    return high


def retries(config: RetryConfig, clock: Clock | None = None) -> Retries:
    return Retries(config, RetryBudget(config), clock or Clock(), most)


def test_pauses_double_up_to_a_cap_and_end() -> None:
    policy = retries(RetryConfig(attempts=6, base_s=0.1, cap_s=0.5))
    pauses = [policy.pause_s(Action.RETRY) for _ in range(6)]
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, None]
    assert policy.n_failures == 6


def test_jitter_is_full() -> None:
    asked = []

    def chance(low: float, high: float) -> float:
        asked.append((low, high))
        return low

    config = RetryConfig(base_s=0.1)
    policy = Retries(config, RetryBudget(config), Clock(), chance)
    assert policy.pause_s(Action.RETRY) == 0.0
    assert asked == [(0.0, 0.1)]


def test_what_the_server_asks_for_is_honoured_within_reason() -> None:
    policy = retries(RetryConfig(base_s=0.1, cap_s=20))
    assert policy.pause_s(Action.RETRY, retry_after_s=3.0) == 3.0
    assert policy.pause_s(Action.THROTTLE, retry_after_s=3600.0) == 20


def test_progress_starts_the_count_anew() -> None:
    policy = retries(RetryConfig(attempts=2, progress_bytes=MIB))
    for _ in range(50):
        assert policy.pause_s(Action.RETRY, gained_bytes=MIB) is not None
    assert policy.pause_s(Action.RETRY, gained_bytes=MIB - 1) is None


def test_what_would_fail_again_is_not_repeated() -> None:
    assert retries(RetryConfig()).pause_s(Action.FAIL) is None


def test_credentials_are_renewed_once() -> None:
    policy = retries(RetryConfig())
    assert policy.pause_s(Action.RENEW) == 0.0
    assert policy.pause_s(Action.RENEW) is None


def test_slowing_down_does_not_count_but_has_an_end() -> None:
    clock = Clock()
    policy = retries(RetryConfig(attempts=2, throttle_patience_s=100), clock)
    for second in range(100):
        clock.s = second
        assert policy.pause_s(Action.THROTTLE) is not None
    assert policy.pause_s(Action.RETRY) is not None
    clock.s = 101
    assert policy.pause_s(Action.THROTTLE) is None


def test_all_requests_share_a_budget_that_successes_refill() -> None:
    config = RetryConfig(budget=3, refund_every=2)
    budget = RetryBudget(config)
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]
    budget.succeeded()
    assert not budget.spend()
    budget.succeeded()
    assert budget.spend()
    for _ in range(100):
        budget.succeeded()
    assert [budget.spend() for _ in range(4)] == [True, True, True, False]


PATIENCE = Patience(stall_bytes_per_s=64 * KIB, stall_window_s=10)


def test_a_body_is_stalled_after_a_window_with_too_little() -> None:
    watch = ProgressWatch(PATIENCE)
    assert watch.period_s == 2.5
    assert [watch.check() for _ in range(4)] == [False, False, False, True]


def test_a_trickle_is_a_stall_and_a_slow_stream_is_not() -> None:
    for bytes_a_period, stalled in ((63 * KIB, True), (161 * KIB, False)):
        watch = ProgressWatch(PATIENCE)
        found = []
        for _ in range(100):
            watch.note(bytes_a_period)
            found.append(watch.check())
        assert any(found) is stalled


def test_one_burst_in_a_window_is_progress() -> None:
    watch = ProgressWatch(PATIENCE)
    for period in range(100):
        watch.note(MIB if period % 4 == 0 else 0)
        assert not watch.check()


def test_pauses_of_our_own_are_excused() -> None:
    watch = ProgressWatch(PATIENCE)
    for _ in range(3):
        watch.check()
    watch.excuse()
    assert not watch.check()


@pytest.mark.parametrize("piece_bytes", [1000, 100_000, 5_000_000])
def test_a_rate_limit_is_kept_over_all_connections(piece_bytes: int) -> None:
    clock = Clock()
    limit = RateLimit(1_000_000, clock)
    free_at_s = [0.0] * 4
    moved = 0
    while clock.s < 60:
        connection = free_at_s.index(min(free_at_s))
        clock.s = max(clock.s, free_at_s[connection])
        moved += piece_bytes
        free_at_s[connection] = clock.s + limit.charge(piece_bytes)
    assert 59e6 <= moved <= 61e6 + 8 * piece_bytes


def test_an_unused_rate_is_not_saved_up() -> None:
    clock = Clock()
    limit = RateLimit(1000, clock)
    clock.s = 3600
    assert limit.charge(1000) == pytest.approx(1.0)
