"""A breaker opens after failures in a row, lets trials through ever more rarely, and closes at the first answer."""

from __future__ import annotations

from kvstore.tiers.remote.breaker import Breaker

FAILURES = 3
MENDS_WITHIN_S = 5.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _opened(clock: Clock) -> Breaker:
    breaker = Breaker(clock)
    assert [breaker.failed() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    return breaker


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(Clock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert not breaker.is_open


def test_one_trial_at_a_time() -> None:
    clock = Clock()
    breaker = _opened(clock)
    assert not breaker.is_due()
    clock.now += 10
    assert [breaker.is_due() for _ in range(3)] == [True, False, False]


def test_however_long_it_was_down_it_closes_soon_after() -> None:
    clock = Clock()
    breaker = _opened(clock)
    for _ in range(100):  # trials of half a second each that fail
        while not breaker.is_due():
            clock.now += 0.05
        clock.now += 0.5
        assert not breaker.failed()
    back = clock.now
    while not breaker.is_due():
        clock.now += 0.05
    assert breaker.succeeded()
    assert not breaker.is_open
    assert clock.now - back < MENDS_WITHIN_S


def test_a_call_that_began_before_the_last_answer_says_nothing() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    begun = clock.now
    clock.now += 1
    breaker.succeeded()
    for _ in range(2 * FAILURES):
        assert not breaker.failed(since=begun)
    assert not breaker.is_open


def test_a_trial_that_never_ends_does_not_keep_it_open() -> None:
    clock = Clock()
    breaker = _opened(clock)
    clock.now += 1
    assert breaker.is_due()
    clock.now += MENDS_WITHIN_S
    assert breaker.is_due()
