"""The learner works while nobody calls the store, and ends when it is told to."""

from __future__ import annotations

import pytest

from kvstore.learning.pace import IDLE_S, Pace, Stopped
from kvstore.residency.lifecycle import CallGuard


def test_a_step_waits_until_nobody_called_for_long_enough() -> None:
    idle = [0.0, 0.9 * IDLE_S, IDLE_S]
    pace = Pace(lambda: idle.pop(0))
    pace.step()
    assert idle == []


def test_a_step_does_not_wait_where_somebody_waits_for_the_work() -> None:
    pace = Pace(lambda: 0.0)
    pace.waits = False
    pace.step()


def test_a_step_that_waits_ends_when_it_is_stopped() -> None:
    def calls() -> float:
        pace.stop()
        return 0.0

    pace = Pace(calls)
    with pytest.raises(Stopped):
        pace.step()


def test_a_store_is_not_idle_while_a_call_is_under_way() -> None:
    calls = CallGuard()
    assert calls.run(lambda: calls.idle_s) == 0.0
    before = calls.idle_s
    calls.run(int)
    assert before >= 0
    assert calls.idle_s >= 0
