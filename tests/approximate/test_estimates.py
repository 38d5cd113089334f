"""The section "approximate" of a profile, and probes where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.approximate.estimates import from_arrays, to_arrays
from kvstore.approximate.plan import plan
from kvstore.approximate.probes import FLOOR, SLOPE, probed, probes
from kvstore.core.approximate import Approximate, Candidate, Estimates, ReusedSpan
from kvstore.errors import ProfileError

GOOD = to_arrays(Estimates(0.4, 45.0, 1.45, 0.002, 0.8))


def test_the_arrays_give_the_estimates_back() -> None:
    found = from_arrays(GOOD)
    assert (found.seam_error, found.reach, found.fall, found.floor, found.slope) == pytest.approx(
        (0.4, 45.0, 1.45, 0.002, 0.8)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"errors": None},
        {"errors": np.ones(4, np.float32)},
        {"errors": np.ones(3, np.float64)},
        {"kl": np.array([1, -1], np.float32)},
        {"kl": np.array([np.nan, 1], np.float32)},
        {"kl": np.array([1e7, 1], np.float32)},
    ],
)
def test_a_section_that_cannot_be_is_refused_by_name(change: dict[str, Any]) -> None:
    arrays = {name: x for name, x in {**GOOD, **change}.items() if x is not None}
    with pytest.raises(ProfileError, match=f"approximate/{next(iter(change))}"):
        from_arrays(arrays)


def spans_of(*runs: tuple[int, int]) -> list[Candidate]:
    """Runs of (start, count), in donors of 64 rows."""
    return [
        Candidate(at, min(64, start + count - at), at - start, 0, at, 0)
        for start, count in runs
        for at in range(start, start + count, 64)
    ]


def test_every_run_is_probed_near_its_seam_and_at_its_end() -> None:
    assert probes(spans_of((10, 300), (400, 5))) == [10, 11, 14, 26, 74, 266, 309, 400, 401, 404]


def test_a_plan_of_probes_is_made_on_request_alone_and_within_the_limit() -> None:
    spans = spans_of((10, 300))
    assert plan(Approximate(), 0, 310, spans, None) is None
    found = plan(Approximate(probe=True), 0, 310, spans, None)
    assert found is not None
    assert found.recompute == (*range(10), 10, 11, 14, 26, 74, 266, 309)
    assert found.tokens == 310
    assert plan(Approximate(probe=True, recompute=16), 0, 310, spans, None) is None
    assert plan(Approximate(probe=True), 0, 40, spans_of((30, 10)), None) is None


def test_rows_between_probes_are_as_bad_as_the_worse_of_them() -> None:
    spans = [ReusedSpan(0, 100, 0, 5, 1, 0, 0.0, 0.0)]
    found = probed(spans, [0, 50, 99], [0.3, 0.1, 0.2])
    assert found == pytest.approx(FLOOR + SLOPE * (49 * 0.3 + 48 * 0.2) / 100)
    assert probed(spans, [], []) == np.inf
    assert probed(spans, [0, 50, 99], [np.nan, 0.1, 0.2]) < found
    other = [*spans, ReusedSpan(100, 20, 0, 9, 2, 0, 0.0, 0.0)]
    assert probed(other, [0, 50, 99], [0.3, 0.1, 0.2]) == np.inf
