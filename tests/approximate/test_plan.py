"""What is assembled of donors, what is recomputed of it, and what that is estimated to lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from length import part

from kvstore.approximate.plan import SPREAD, WORTH, Plan, plan, sharpened
from kvstore.core.approximate import Approximate, Candidate, Estimates

ANY = Approximate(max_kl=10.0)
ESTIMATES = Estimates(0.4, 45.0, 1.45, 0.0012, 0.19)
FLOOR = ESTIMATES.floor


def chain(start: int, count: int, shift: int, run: int = 0, donor: int = 1) -> list[Candidate]:
    """A run of `count` tokens, in donors' blocks of 64."""
    spans, at = [], start
    while at < start + count:
        row = (at - shift) % 64
        size = min(64 - row, start + count - at)
        spans.append(Candidate(at, size, run + at - start, shift, donor + len(spans), row))
        at += size
    return spans


def assembled(found: Plan | None) -> Plan:
    assert found is not None
    return found


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "0.1", None, True])
def test_a_limit_of_the_kl_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="max_kl"):
        Approximate(max_kl=value)


@pytest.mark.parametrize("value", [-1, 1.5, "8", True])
def test_a_number_of_positions_that_is_none_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="recompute"):
        Approximate(recompute=value)


def test_errors_fall_with_the_distance_and_rise_with_what_changed() -> None:
    distance = np.arange(2000)
    for changed in (1, 14, 400, 5000):
        assert (np.diff(ESTIMATES.errors(distance, changed)) < 0).all()
    assert (ESTIMATES.errors(distance[1:], 14) < ESTIMATES.errors(distance[1:], 400)).all()
    assert not ESTIMATES.errors(distance, 0).any()


def test_without_donors_there_is_no_plan() -> None:
    assert plan(ANY, 10, 500, [], ESTIMATES) is None


def test_a_document_behind_another_prompt_is_reused_but_for_the_prompt_and_its_first_rows() -> None:
    found = assembled(plan(ANY, 5, 2048, chain(19, 2029, shift=11), ESTIMATES))
    assert found.tokens == 2048
    assert found.recompute[:14] == tuple(range(5, 19))
    behind = found.recompute[14:]
    assert behind == tuple(range(19, 19 + len(behind)))
    assert 0 < len(behind) < 32
    assert found.kl == pytest.approx(FLOOR + sum(span.kl for span in found.spans))


def test_the_list_is_of_the_rows_that_are_worth_it() -> None:
    found = assembled(plan(ANY, 10, 1034, chain(10, 512, -512) + chain(522, 512, 512), ESTIMATES))
    for seam in (10, 522):
        listed = sum(seam <= x < seam + 512 for x in found.recompute)
        errors = ESTIMATES.errors(np.arange(512), found.spans[0 if seam == 10 else -1].changed)
        assert listed == np.count_nonzero(errors >= WORTH[0])
        assert listed > 0


def test_what_goes_on_with_a_long_run_needs_no_list() -> None:
    span = Candidate(300, 64, 250, 20, 7, 0)
    found = assembled(plan(ANY, 300, 364, [span], ESTIMATES))
    assert found.recompute == ()
    assert found.spans[0].error < ESTIMATES.errors(100, 10**6)


def test_a_seam_behind_more_change_is_worse() -> None:
    few, many = (assembled(plan(ANY, 0, x + 512, chain(x, 512, x - 3), ESTIMATES)) for x in (8, 400))
    assert few.spans[0].changed == 8
    assert many.spans[0].changed == 400
    assert few.spans[-1].error < many.spans[-1].error
    assert len(few.recompute) - 8 < len(many.recompute) - 400 or few.kl < many.kl


def test_the_limit_takes_the_worst_rows_and_what_no_donor_has() -> None:
    spans = chain(16, 512, 3)
    free = assembled(plan(ANY, 10, 528, spans, ESTIMATES))
    some = len(free.recompute) - 2
    found = assembled(plan(Approximate(max_kl=10, recompute=some), 10, 528, spans, ESTIMATES))
    assert found.recompute == free.recompute[:some]
    assert found.kl > free.kl
    assert plan(Approximate(max_kl=10, recompute=5), 10, 528, spans, ESTIMATES) is None
    assert assembled(plan(Approximate(max_kl=10, recompute=0), 16, 528, spans, ESTIMATES)).recompute == ()


def test_it_ends_before_a_gap_that_costs_more_than_follows() -> None:
    near, far = chain(10, 256, 3), chain(1500, 64, 3, donor=50)
    assert assembled(plan(ANY, 10, 1564, near + far, ESTIMATES)).tokens == 266
    limited = Approximate(max_kl=10, recompute=100)
    assert assembled(plan(limited, 10, 1000, near + chain(400, 600, 3, donor=50), ESTIMATES)).tokens == 266
    assert assembled(plan(ANY, 10, 1000, near + chain(400, 600, 3, donor=50), ESTIMATES)).tokens == 1000


def test_nothing_is_reused_where_most_would_be_computed() -> None:
    assert plan(ANY, 0, 1000, chain(900, 100, 3), ESTIMATES) is None


def test_a_span_that_would_be_computed_whole_is_left_out() -> None:
    spans = [Candidate(400, 8, 0, -400, 99, 0), *chain(408, 1024, 7)]
    found = assembled(plan(ANY, 400, 1432, spans, ESTIMATES))
    assert 99 not in [x.donor for x in found.spans]
    assert set(range(400, 408)) <= set(found.recompute)


def test_a_kl_that_cannot_be_kept_gives_nothing() -> None:
    spans = chain(416, 512, 16)
    assert plan(Approximate(max_kl=FLOOR / 2), 400, 928, spans, ESTIMATES) is None
    free = assembled(plan(ANY, 400, 928, spans, ESTIMATES))
    strict = plan(Approximate(max_kl=(FLOOR + free.kl) / 2), 400, 928, spans, ESTIMATES)
    assert strict is None or len(strict.recompute) > len(free.recompute)


def test_a_stricter_kl_takes_a_longer_list() -> None:
    spans = chain(416, 1024, 16)
    free = assembled(plan(ANY, 400, 1440, spans, ESTIMATES))
    strict = assembled(plan(Approximate(max_kl=free.kl * 0.98), 400, 1440, spans, ESTIMATES))
    assert strict.kl <= free.kl * 0.98
    assert set(strict.recompute) > set(free.recompute)


@pytest.mark.parametrize(
    "spans",
    [
        [Candidate(10, 8, 0, 0, 1, 0), Candidate(17, 8, 0, 0, 2, 0)],
        [Candidate(30, 8, 0, 0, 1, 0), Candidate(12, 8, 0, 0, 2, 0)],
        [Candidate(9, 8, 0, 0, 1, 0)],
        [Candidate(95, 8, 0, 0, 1, 0)],
        [Candidate(10, 0, 0, 0, 1, 0)],
        [Candidate(10, 8, 11, 0, 1, 0)],
        [Candidate(10, 8, 0, 11, 1, 0)],
    ],
)
def test_spans_that_cannot_be_are_refused(spans: list[Candidate]) -> None:
    with pytest.raises(ValueError, match="candidates"):
        plan(ANY, 10, 100, spans, ESTIMATES)
    with pytest.raises(ValueError, match="exact_tokens"):
        plan(ANY, 101, 100, [], ESTIMATES)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, int, list[Candidate]]:
    exact, spans = draw(st.integers(0, 100)), []
    at = exact
    for number in range(draw(st.integers(0, 5))):
        at += draw(st.integers(0, 90))
        count = draw(st.integers(1, 400))
        shift = draw(st.integers(-600, at))
        spans += chain(at, count, shift, draw(st.integers(0, max(0, min(at, at - shift)))), 100 * number + 1)
        at += count
    return exact, at + draw(st.integers(0, 50)), spans


@settings(max_examples=part(200), deadline=None)
@given(prompts(), st.floats(0.001, 0.5), st.none() | st.integers(0, 400))
def test_every_position_of_a_plan_is_exact_reused_or_recomputed(prompt: Any, max_kl: float, most: int | None) -> None:
    exact, total, spans = prompt
    found = plan(Approximate(max_kl, most), exact, total, spans, ESTIMATES)
    if found is None:
        return
    assert exact < found.tokens <= total
    assert list(found.recompute) == sorted(set(found.recompute))
    assert most is None or len(found.recompute) <= most
    assert FLOOR <= found.kl <= max_kl * (1 + 1e-9)
    reused: set[int] = set()
    for span in found.spans:
        assert Candidate(span.start, span.count, span.run, span.shift, span.donor, span.donor_start) in spans
        rows = set(range(span.start, span.end))
        assert not rows & reused
        assert not rows <= set(found.recompute)
        reused |= rows
    assert reused | set(found.recompute) == set(range(exact, found.tokens))
    assert 2 * len(reused - set(found.recompute)) >= found.tokens - exact


def _seams() -> tuple[Plan, np.ndarray[Any, Any]]:
    found = assembled(plan(ANY, 10, 1034, chain(10, 512, -512) + chain(522, 512, 512), ESTIMATES))
    positions = np.array(found.recompute)
    errors = np.zeros(len(positions))
    for span in found.spans:
        inside = (positions >= span.start) & (positions < span.end)
        errors[inside] = ESTIMATES.errors(span.run + positions[inside] - span.start, span.changed)
    return found, errors


def test_finding_what_was_estimated_leaves_the_estimate() -> None:
    found, errors = _seams()
    assert sharpened(found.spans, found.recompute, errors, ESTIMATES) == pytest.approx(found.kl)
    assert sharpened(found.spans, [], [], ESTIMATES) == pytest.approx(found.kl)


def test_worse_seams_raise_the_estimate_and_better_ones_lower_it_within_bounds() -> None:
    found, errors = _seams()
    values = [sharpened(found.spans, found.recompute, factor * errors, ESTIMATES) for factor in (0, 0.5, 1, 2, 1e9)]
    assert values == sorted(values)
    assert values[0] < found.kl < values[3]
    assert values[0] >= FLOOR + (found.kl - FLOOR) * SPREAD[0]
    assert values[4] <= FLOOR + (found.kl - FLOOR) * SPREAD[1] * (1 + 1e-9)


def test_a_seam_where_nothing_was_found_goes_by_the_others() -> None:
    found, errors = _seams()
    first = np.array(found.recompute) < 522
    one = sharpened(found.spans, np.array(found.recompute)[first], 3 * errors[first], ESTIMATES)
    both = sharpened(found.spans, found.recompute, 3 * errors, ESTIMATES)
    assert found.kl < one <= both * (1 + 1e-9)


def test_what_is_no_number_is_passed_over() -> None:
    found, errors = _seams()
    errors[3] = float("nan")
    assert sharpened(found.spans, found.recompute, errors, ESTIMATES) == pytest.approx(found.kl)
