"""The fit in passes gives what the fit in one pass gives, in less memory."""

from __future__ import annotations

import calibrated
import numpy as np
import pytest

from kvstore.calibration.dump import KVDump
from kvstore.calibration.predictive import fit, levels
from kvstore.calibration.predictive.sums import ProductSums
from kvstore.core.layout import KVLayout


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> KVDump:
    return calibrated.dump(tmp_path_factory.mktemp("dump"))


def test_the_passes_cover_every_layer_but_the_first_once() -> None:
    layout = KVLayout.uniform(9, 2, 16)
    for most in (0, 100_000, 300_000, 1 << 30):
        runs = ProductSums.passes(layout, most)
        assert [layer for run in runs for layer in run] == list(range(1, 9))
    assert len(ProductSums.passes(layout, 0)) == 8
    assert len(ProductSums.passes(layout, 1 << 30)) == 1
    assert ProductSums.passes(KVLayout.uniform(1, 2, 16), 0) == []


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_passes_give_what_one_pass_gives(dump: KVDump, most: int) -> None:
    whole = fit.fit(dump)
    base = fit.fit_in_passes(dump, dump, most)
    assert whole.keys() == base.keys()
    assert all(np.array_equal(whole[name], base[name]) for name in whole)
    level = levels.fit_in_passes(dump, dump, base, 3, most)
    wanted = levels.fit(dump, whole, [3])
    assert wanted.keys() == level.keys()
    assert all(np.array_equal(wanted[name], level[name]) for name in wanted)
