"""The made-up caches that benchmarks.wide measures on are coded and come back, and its peak counts what it does."""

from __future__ import annotations

import pytest
from benchmodules import load
from cpulevels import cpu_levels

from kvstore.codecs.predictive import _levels
from kvstore.codecs.predictive.levels.model import LEVELS

pytestmark = pytest.mark.native
wide = load("wide")
WIDTH, LAYERS = 64, 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_case_is_predicted_and_comes_back(level: int) -> None:
    case = wide.Case.of(level, WIDTH, LAYERS)
    assert case.view.nbytes == 2 * 2 * WIDTH * LAYERS * wide.TOKENS
    assert case.view.nbytes > 1.5 * len(case.payload)
    assert case.encode() >= 0
    assert case.decode() >= 0  # which compares what comes back


def test_multiply_adds_are_those_of_the_weights() -> None:
    own, groups = WIDTH / 2, (0 + 1 + 2 + 3) * 16 * 16 / WIDTH  # a value of an upper layer
    share = (LAYERS - 1) / LAYERS
    assert wide.Case.of(1, WIDTH, LAYERS).multiply_adds == pytest.approx(share * (own + groups))
    assert wide.Case.of(2, WIDTH, LAYERS).multiply_adds == pytest.approx(share * (own + groups + 2 * WIDTH))


@pytest.mark.parametrize("cpu", cpu_levels())
def test_the_peak_counts_in_rounds(cpu: str) -> None:
    one = _levels.multiply(1, cpu)
    assert one % 16 == 0
    assert _levels.multiply(1000, cpu) == 1000 * one > 0
