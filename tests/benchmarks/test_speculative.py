"""The ideal that speculative coding is compared with."""

from __future__ import annotations

import math

import pytest
import torch
from benchmodules import load

speculative = load("speculative")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_lie_in_their_bins_and_bins_meet(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.125, 1.25, -2.0, -2.25, 448.0]).to(dtype)
    low, high = speculative.bins_of(x)
    assert (low < x.double()).all()
    assert (x.double() < high).all()
    if dtype == torch.float8_e4m3fn:  # neighbours of each other
        assert high[0] == low[1] == 1.0625
        assert low[3] == high[4] == -2.125


def test_a_good_prediction_takes_the_bits_that_rounding_leaves() -> None:
    """A normal difference of one bf16 step has an entropy of log2(sqrt(2 pi e)) bits; the mixture costs some."""
    mean = torch.full((1, 4000, 1), 192.0)
    near = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
    pair = ((mean + near).bfloat16(), (mean + near).bfloat16())
    found = speculative.ideal_bits([pair], [(mean, mean)])
    assert math.log2(math.sqrt(2 * math.pi * math.e)) == pytest.approx(found, abs=0.15)
