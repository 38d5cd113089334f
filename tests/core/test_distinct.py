"""Distinct values are what numpy's sorting finds."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.distinct import distinct


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.uint16])
@pytest.mark.parametrize("most", [1, 7, 4000, 60_000])
def test_it_finds_what_sorting_finds(dtype: type, most: int) -> None:
    rng = np.random.default_rng(most)
    for count in (0, 1, 5, 1000):
        column = rng.integers(0, most, count).astype(dtype)
        values, where = distinct(column)
        wanted, places = np.unique(column, return_inverse=True)
        assert values.dtype == dtype
        assert np.array_equal(values, wanted)
        assert np.array_equal(where, places)


def test_a_huge_number_takes_no_table() -> None:
    values, where = distinct(np.array([2**32 - 1, 3, 2**32 - 1], np.uint32))
    assert (values.tolist(), where.tolist()) == ([3, 2**32 - 1], [1, 0, 1])
