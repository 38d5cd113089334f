"""The record before each of a catalog's entries: found in one pass, and as it is found by sorting tags."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.tiers.disk._catalog import parents
from kvstore.tiers.disk.entry import ENTRY, parents_of

pytestmark = pytest.mark.native


def by_sorting(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """The reference."""
    order = np.argsort(rows["tag"], kind="stable")
    tags = rows["tag"][order]
    at = np.searchsorted(tags, rows["parent_tag"], side="right") - 1
    found = (at >= 0) & (rows["start"] > 0)
    found[found] = tags[at[found]] == rows["parent_tag"][found]
    result = np.where(rows["start"] > 0, rows["parent"], 0).astype(np.uint64)
    result[found] = rows["record"][order[at[found]]]
    return result


def entries(count: int, seed: int, of: int) -> npt.NDArray[np.void]:
    """Entries in chains of up to 9; their tags are of `of` numbers, so that they come twice if these are few."""
    rng = np.random.default_rng(seed)
    rows = np.zeros(count, ENTRY)
    rows["record"] = np.arange(1, count + 1) * 3
    rows["parent"] = rng.integers(0, 2**62, count)
    rows["tag"] = rng.integers(0, of, count, dtype=np.uint64)
    rows["start"] = 64 * (np.arange(count) % 9)
    rows["parent_tag"][1:] = rows["tag"][:-1]
    far = rng.random(count) < 0.2  # its parent stands elsewhere, behind it perhaps
    rows["parent_tag"][far] = rows["tag"][rng.integers(0, max(1, count), int(far.sum()))]
    gone = rng.random(count) < 0.1
    rows["parent_tag"][gone] = rng.integers(0, of, int(gone.sum()), dtype=np.uint64)
    return rows


@pytest.mark.parametrize("of", [1, 4, 200, 2**62])
@pytest.mark.parametrize("count", [0, 1, 2, 31, 33, 1000])
def test_parents_are_those_that_are_found_by_sorting(count: int, of: int) -> None:
    for seed in range(5):
        rows = entries(count, seed, of)
        assert np.array_equal(parents_of(rows), by_sorting(rows))
        assert np.array_equal(parents_of(rows[::-2]), by_sorting(rows[::-2]))


def test_tags_of_all_bits_and_of_none_are_tags() -> None:
    rows = entries(4, 0, 2**62)
    rows["tag"], rows["parent_tag"], rows["start"] = [0, 2**64 - 1, 5, 6], [9, 0, 2**64 - 1, 7], 64
    assert parents_of(rows).tolist() == [int(rows["parent"][0]), 3, 6, int(rows["parent"][3])]


def test_bytes_that_are_no_whole_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="entries"):
        parents(np.zeros(81, np.uint8))
