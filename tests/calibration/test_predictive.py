"""The fit of the lossless predictor: what it makes is valid, the same each time, and worth having."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvstore.calibration import targets
from kvstore.calibration.dump import KVDump, floats
from kvstore.calibration.predictive import fit, quality
from kvstore.codecs.predictive import reference
from kvstore.codecs.predictive.model import PredictiveModel


@pytest.fixture(scope="module")
def arrays(dump: KVDump) -> fit.Arrays:
    return fit.fit(dump)


def rows(dump: KVDump, window: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for number in range(len(dump.layout.layers)):
        k, v = (torch.from_numpy(x.astype(np.int64)) for x in dump.layer(number, window))
        found.append((k, v))
    return found


def test_what_is_fitted_is_a_model_that_codes_windows_it_did_not_see(dump: KVDump, arrays: fit.Arrays) -> None:
    model = PredictiveModel.from_arrays(dump.layout, arrays)
    window = dump.held_out[0]
    tokens, block = torch.from_numpy(dump.tokens(window)), rows(dump, window)
    coded = reference.encode(model, tokens, 0, block)
    found = reference.decode(model, tokens, 0, coded)
    assert all(torch.equal(a, b) for x, y in zip(block, found, strict=True) for a, b in zip(x, y, strict=True))
    bits = 8 * sum(map(len, coded)) / sum(x.numel() for pair in block for x in pair)
    assert bits == quality.bits_per_value(dump, arrays, [window])


def test_the_first_layer_is_predicted_from_the_token_almost_exactly(dump: KVDump, arrays: fit.Arrays) -> None:
    model = PredictiveModel.from_arrays(dump.layout, arrays)
    window = dump.held_out[0]
    walk = reference.Predictor(model, torch.from_numpy(dump.tokens(window)), 0)
    for which in range(2):
        bits = rows(dump, window)[0][which]
        said = floats(walk.predict(0).numpy().astype(np.uint16))
        want = floats(bits.numpy().astype(np.uint16))
        assert np.square(said - want).mean() < 1e-3 * np.square(want).mean()
        walk.take(0, bits)


def test_prediction_beats_the_same_tables_without_it(dump: KVDump, arrays: fit.Arrays) -> None:
    blind = {name: np.zeros_like(x) if name.endswith((".weight", "token_kv")) else x for name, x in arrays.items()}
    with_it, without = (quality.bits_per_value(dump, x, dump.held_out) for x in (arrays, blind))
    assert with_it < without - 0.5


def test_the_same_dump_gives_the_same_arrays(dump: KVDump, arrays: fit.Arrays) -> None:
    again = fit.fit(dump)
    assert again.keys() == arrays.keys()
    assert all(np.array_equal(again[name], arrays[name]) for name in arrays)


def test_fewer_windows_can_be_asked_for(dump: KVDump, arrays: fit.Arrays) -> None:
    fewer = fit.fit(dump.first(2))
    assert not np.array_equal(fewer["1.k.weight"], arrays["1.k.weight"])


def test_angles_are_those_of_the_rotary_embedding(dump: KVDump) -> None:
    tables = targets.angles(dump.layout)
    positions = torch.tensor([0, 1, 127, 128, 5000, 100_000])
    cos, sin = reference.angles(tables["rope_fine"], tables["rope_coarse"], positions)
    half = cos.shape[2]
    want = positions.numpy()[:, None] * 10000.0 ** -(np.arange(half) / half)
    assert np.abs(cos[:, 0].numpy() / 16384 - np.cos(want)).max() < 2e-4
    assert np.abs(sin[:, 0].numpy() / 16384 - np.sin(want)).max() < 2e-4


def test_one_pass_gives_the_fits_to_fewer_windows_too(dump: KVDump, arrays: fit.Arrays) -> None:
    fewer, whole = fit.fits(dump, [2, len(dump.fit_windows)])
    assert all(np.array_equal(whole[name], arrays[name]) for name in arrays)
    assert not np.array_equal(fewer["1.k.weight"], whole["1.k.weight"])
    assert PredictiveModel.from_arrays(dump.layout, fewer)


def test_progress_is_told(dump: KVDump) -> None:
    told: list[tuple[str, int, int]] = []
    fit.fit(dump.first(1), lambda *what: told.append(what))
    assert told[-1] == ("lossless: tables", len(dump.layout.layers), len(dump.layout.layers))
