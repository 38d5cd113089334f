"""The fit of the levels: valid, the same each time, and worth having."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.calibration.dump import KVDump
from kvstore.calibration.predictive import fit, levels, quality
from kvstore.calibration.predictive.rounding import rounded
from kvstore.codecs.predictive.levels.model import LEVELS, LevelModel, levels_of


@pytest.fixture(scope="module")
def lossless(dump: KVDump) -> fit.Arrays:
    return fit.fit(dump)


@pytest.fixture(scope="module")
def arrays(dump: KVDump, lossless: fit.Arrays) -> levels.Arrays:
    return levels.fit(dump, lossless)


def test_levels_code_windows_that_they_did_not_see(dump: KVDump, lossless: fit.Arrays, arrays: levels.Arrays) -> None:
    assert levels_of(arrays) == LEVELS
    bits = [quality.level_bits(dump, lossless, arrays, level) for level in LEVELS]
    assert bits[0] > bits[1]
    assert all(one < 12 for one in bits)


def test_groups_are_worth_having(dump: KVDump, lossless: fit.Arrays, arrays: levels.Arrays) -> None:
    none = {name: array * (0 if name.endswith("group") else 1) for name, array in arrays.items()}
    for level in LEVELS:
        with_groups = quality.level_bits(dump, lossless, arrays, level)
        assert with_groups < quality.level_bits(dump, lossless, none, level)


def test_some_levels_alone_are_those_of_all(dump: KVDump, lossless: fit.Arrays, arrays: levels.Arrays) -> None:
    again = levels.fit(dump, lossless, (2,))
    assert levels_of(again) == (2,)
    assert all(np.array_equal(array, arrays[name]) for name, array in again.items())
    LevelModel.from_arrays(dump.layout, 2, lossless, again)


def test_rounding_makes_up_for_its_errors() -> None:
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(500, 150)) @ rng.normal(size=(150, 150))
    weight, gram = rng.normal(0, 20, (150, 8)), inputs.T @ inputs / 500 + np.eye(150)
    found = rounded(weight, gram)
    assert np.array_equal(found, np.rint(found))
    assert np.abs(found).max() <= 127

    def error(whole: np.ndarray) -> float:
        return float(np.square(inputs @ (whole - weight)).mean())

    assert error(found) < 0.5 * error(np.rint(weight))
    assert rounded(np.zeros((0, 3)), np.zeros((0, 0))).shape == (0, 3)


def test_rounding_asks_again_and_again_whether_it_may_go_on() -> None:
    asked: list[None] = []

    def pause() -> None:
        asked.append(None)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounded(np.ones((300, 2)), np.eye(300), pause)
    assert len(asked) == 3
