"""The fit of the lossy mode: what it makes is a model, predicts, and its ladder says what the model loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch

from kvstore.calibration.dump import KVDump
from kvstore.calibration.lossy import closed_loop, costs, fit, quality
from kvstore.calibration.lossy.costs import _focus
from kvstore.calibration.lossy.quality import code_window
from kvstore.calibration.lossy.tables import frequencies, laplace
from kvstore.calibration.predictive import fit as exact
from kvstore.codecs.predictive.lossy_model import CLASSES, LARGEST, LossyModel, input_groups, input_widths
from kvstore.codecs.predictive.lossy_quantiser import Steps
from kvstore.codecs.predictive.lossy_rows import Engine
from kvstore.codecs.predictive.model import PredictiveModel

MIDDLE = (0.3, 10.0)  # of a model whose weights are random


class Fitted:
    def __init__(self, folder: Path) -> None:
        self.model = calibrated.model()
        self.dump = KVDump.make(
            self.model,
            calibrated.tokenizer(),
            calibrated.text(),
            folder,
            windows=calibrated.WINDOWS,
            length=calibrated.LENGTH,
        )
        self.base = PredictiveModel.from_arrays(self.dump.layout, exact.fit(self.dump))
        self.arrays = fit.fit(self.dump, self.base, middle=MIDDLE)

    def bits(self, arrays: dict[str, Any], scale: float = 1.0) -> float:
        level = MIDDLE[0] * scale, MIDDLE[1] * scale
        return quality.bits_per_value(self.dump, self.base, arrays, self.dump.held_out, level)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    return Fitted(tmp_path_factory.mktemp("dump"))


def test_what_is_fitted_is_a_model(fitted: Fitted) -> None:
    model = LossyModel.from_arrays(fitted.base, fitted.arrays)
    assert model.ladder.shape == (0, 5)
    with pytest.raises(ValueError, match="ladder"):
        model.steps_for(bits=1.0)


def test_smaller_steps_take_more_bits(fitted: Fitted) -> None:
    found = [fitted.bits(fitted.arrays, scale) for scale in (0.25, 1.0, 4.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > 1.5 * found[2] > 0


def test_prediction_is_worth_bits(fitted: Fitted) -> None:
    without = dict(fitted.arrays)
    for name, array in fitted.arrays.items():
        if name.endswith("weight"):
            without[name] = np.zeros_like(array)
    assert fitted.bits(fitted.arrays) < 0.9 * fitted.bits(without)


def test_inputs_that_are_not_used_are_not_there(fitted: Fitted) -> None:
    token = np.array([[0, 0], [1, 1], [1, 1]], np.uint8)
    arrays = fit.fit(fitted.dump, fitted.base, middle=MIDDLE, uses=token)
    assert (arrays["uses"] == token).all()
    assert arrays["2.v.weight"].shape[0] == fitted.base.token_kv.shape[1]
    assert fitted.bits(arrays) > 0


def test_inputs_that_are_not_worth_their_price_are_left_out(fitted: Fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for price in (-1e3, 1e3):
        monkeypatch.setattr(fit, "INPUT_PRICE", price)
        arrays = fit.fit(fitted.dump, fitted.base, middle=MIDDLE)
        sizes.append(len(arrays["2.k.weight"]))
        assert fitted.bits(arrays) > 0
    assert sizes[0] == sum(input_widths(fitted.base, 2, 0).values())
    assert sizes[1] < sizes[0]


def test_gram_matrices_put_together_are_those_of_the_inputs(fitted: Fitted, tmp_path: Path) -> None:
    loop = closed_loop.ClosedLoop(fitted.dump, fitted.base, Steps.of(*MIDDLE), tmp_path)
    arrays = {name: x for name, x in fitted.arrays.items() if not name[0].isdigit()}
    arrays["uses"] = arrays["uses"].copy()
    wanted = costs.attention_costs(fitted.dump)
    for number in range(len(fitted.base.parts)):
        for which in range(2):
            fit._fit_part(loop, number, which, arrays, wanted[number][which])
            if not number:
                continue
            keys = list(input_groups(fitted.base, number, which).values())
            gram, sums = loop.gram(keys)
            rows = torch.cat([loop.inputs(keys, window) for window in fitted.dump.fit_windows]).double()
            assert torch.equal(gram, rows.T @ rows)
            assert torch.equal(sums, rows.sum(0))


def test_ladder_says_what_is_lost(fitted: Fitted) -> None:
    levels = [(MIDDLE[0] * s, MIDDLE[1] * s) for s in (1e-3, 1.0, 8.0)]
    ladder = quality.measure(fitted.model, fitted.dump, fitted.base, fitted.arrays, levels)
    assert np.allclose(ladder[:, :2], levels)
    assert (np.diff(ladder[:, 2]) < 0).all()
    assert (np.diff(ladder[:, 3]) > 0).all()
    assert 0 <= ladder[0, 3] < ladder[2, 3] / 10
    model = LossyModel.from_arrays(fitted.base, quality.with_ladder(fitted.arrays, ladder[::-1]))
    assert model.steps_for(bits=float(ladder[1, 2])) == pytest.approx(levels[1], rel=1e-4)


def test_costs_by_gradients_are_those_of_the_divergence(fitted: Fitted) -> None:
    """An error that costs much is one that changes what the model predicts."""
    wanted = [p.requires_grad for p in fitted.model.parameters()]
    grams, focus = costs.gradient_costs(fitted.model, fitted.dump, fitted.dump.fit_windows)
    assert [p.requires_grad for p in fitted.model.parameters()] == wanted
    assert all(p.grad is None for p in fitted.model.parameters())
    for pair in grams:
        for cost in pair:
            assert np.allclose(cost, cost.T)
            assert np.linalg.eigvalsh(cost).min() > -1e-6 * np.trace(cost)
            assert np.trace(cost) > 0
    arrays = fit.fit(fitted.dump, fitted.base, costs=grams, focus=focus, middle=(20.0, 20.0))
    LossyModel.from_arrays(fitted.base, arrays)
    windows = list(fitted.dump.fit_windows)[:2]
    even = costs.balanced(fitted.model, fitted.dump, fitted.base, arrays, windows, (20.0, 20.0))
    changed = [name for name in arrays if not np.array_equal(arrays[name], even[name])]
    assert {name.split(".")[-1] for name in changed} <= {"component", "scale"}
    for number in range(3):
        for name in ("k", "v"):
            ratio = arrays[f"{number}.{name}.component"] / even[f"{number}.{name}.component"]
            quarters = even[f"{number}.{name}.scale"] - arrays[f"{number}.{name}.scale"]
            assert np.allclose(4 * np.log2(ratio), quarters[0], atol=1e-3)
    LossyModel.from_arrays(fitted.base, even)


def test_ideal_bits_are_those_of_the_stream(fitted: Fitted) -> None:
    from kvstore.codecs.predictive.lossy_reference import HEADER, Block, encode_blocks

    engine = Engine(LossyModel.from_arrays(fitted.base, fitted.arrays))
    steps, window = Steps.of(MIDDLE[0] / 16, MIDDLE[1] / 16), fitted.dump.held_out[0]
    bits, _ = code_window(engine, steps, fitted.dump, window)
    layers = [
        tuple(torch.from_numpy(x.astype(np.int64)) for x in fitted.dump.layer(i, window))
        for i in range(len(engine.parts))
    ]
    block = Block(torch.from_numpy(fitted.dump.tokens(window)), 0, layers)  # type: ignore[arg-type]
    sections = encode_blocks(engine, steps, [block])[0]
    width = sum(x.shape[1] for pair in layers for x in pair)
    values = (fitted.dump.length - 4) * width
    assert len(sections[0]) > HEADER.size
    assert 8 * (sum(map(len, sections)) - 2 * 4 * width) / values == pytest.approx(bits, rel=0.03)


def test_with_the_model_everything_is_fitted_by_its_gradients(fitted: Fitted) -> None:
    arrays = fit.fit(fitted.dump, fitted.base, model=fitted.model, middle=(20.0, 20.0))
    LossyModel.from_arrays(fitted.base, arrays)
    assert not np.array_equal(arrays["1.k.basis"], fitted.arrays["1.k.basis"])


def test_steps_follow_rows_whose_gradients_are_large() -> None:
    rng = np.random.default_rng(3)
    rows = [np.concatenate([rng.standard_normal((200, 6)), np.ones((200, 1))], 1) for _ in range(8)]
    large = [2.0 ** (3 * x[:, 2] - x[:, 4]) for x in rows]
    found, left = _focus(rows, large)
    shifts = np.rint(rows[0] @ found)
    assert np.corrcoef(shifts, np.log2(large[0]))[0, 1] > 0.9
    assert left < 0.3 * np.mean(np.square(large))
    none, same = _focus(rows, [rng.random(200) for _ in rows])
    assert not none.any()
    assert same == pytest.approx(1 / 3, rel=0.1)


@pytest.mark.parametrize("zero", [0.01, 0.3, 0.9, 0.99999, 1.0])
def test_frequencies_are_a_table_for_any_shares(zero: float) -> None:
    for decay in (0.1, 0.5, 0.9, 1.0):
        shares = decay ** np.arange(LARGEST + 2)
        shares *= (1 - zero) / shares[1:].sum()
        shares[0] = zero
        freqs = frequencies(shares).astype(int)
        assert freqs.sum() == 4096
        assert (freqs[:255] == freqs[254::-1]).all()
        assert freqs[LARGEST] == pytest.approx(4096 * zero, abs=3)


def test_tables_before_anything_was_seen_are_by_class() -> None:
    found = laplace()
    zeros = found["freqs"][:CLASSES, LARGEST].astype(int)
    assert (np.diff(zeros) <= 2).all()
    assert zeros[0] > 4000 > 100 > zeros[-1]
