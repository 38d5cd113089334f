"""The fit of what reuse loses: constants that are known come back, and a small model gets a section and a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import calibrated
import numpy as np
import pytest
import torch
from movable_models import model_of
from tiny_models import tiny

from kvstore.approximate.estimates import from_arrays
from kvstore.calibration.approximate.cases import cases, check_cases
from kvstore.calibration.approximate.fit import MARGIN, SHARE, fit, fit_bound, fit_errors, report
from kvstore.calibration.approximate.measure import Seen, assembled, measured, prefill
from kvstore.calibration.calibrate import calibrate
from kvstore.core.approximate import Candidate, Estimates
from kvstore.errors import ConfigError, UnsupportedModel
from kvstore.integrations.transformers import layout_from_config

LENGTH = 256
MODELS = ("llama", "deepseek_v3")


class Windows:
    """Of random tokens, as `KVDump` gives them."""

    length, windows = LENGTH, 8
    held_out = range(6, 8)

    def __init__(self, model: Any) -> None:
        self.layout = layout_from_config(model.config, torch.bfloat16)

    def some(self, count: int) -> list[int]:
        return list(range(6))[:count]

    def tokens(self, window: int) -> Any:
        return np.random.default_rng(window).integers(1, 96, LENGTH)


def made_of(name: str) -> Any:
    return (tiny(name) if name == "llama" else model_of(name)).to(torch.bfloat16)


def test_the_curve_of_known_errors_comes_back() -> None:
    true = Estimates(0.35, 64.0, 1.4, 0.0, 1.0)
    seen = []
    for changed in (6, 40, 300):
        errors = true.errors(np.arange(400), changed)
        seen.append(Seen(400, 0, (Candidate(0, 400, 0, 0, 1, 0),), (changed,), errors, ()))
    level, reach, fall = fit_errors(seen)
    for changed in (6, 40, 300):
        found = Estimates(level, reach, fall, 0.0, 1.0).errors(np.arange(200), changed)
        assert np.abs(np.log(found / true.errors(np.arange(200), changed))).max() < 0.2


def test_the_bound_is_above_everything_by_its_margin() -> None:
    rng = np.random.default_rng(0)
    error = rng.uniform(0, 0.1, 60)
    kl = 0.001 + 0.3 * error * rng.uniform(0.3, 1, 60)
    floor, slope = fit_bound(np.stack([error, kl], 1))
    kept = kl <= (floor + slope * error) / MARGIN * (1 + 1e-9)
    assert SHARE <= kept.mean() < 1
    assert floor / MARGIN < 0.003
    assert slope / MARGIN < 0.4


def test_a_case_that_no_error_explains_does_not_set_the_bound() -> None:
    error = np.linspace(0, 0.1, 100)
    kl = 0.001 + 0.3 * error
    want = fit_bound(np.stack([error, kl], 1))
    kl[[3, 60, 97]] += 0.5
    assert fit_bound(np.stack([error, kl], 1)) == pytest.approx(want, rel=0.2)


def test_cases_of_each_kind_share_tokens_with_what_was_computed_before() -> None:
    windows: Any = Windows(tiny("llama"))
    for case in cases(windows, [0, 1, 2]):
        held = {tuple(x[i : i + 32]) for x in case.before for i in range(len(x) - 31)}
        found = [tuple(case.prompt[i : i + 32]) in held for i in range(len(case.prompt) - 31)]
        assert np.mean(found) > 0.5
        assert all(tuple(x[:32]) != tuple(case.prompt[:32]) and (x[:8] == case.prompt[:8]).all() for x in case.before)
        assert len(case.after) == LENGTH // 8


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_donors_are_put_where_the_prompt_has_their_tokens(name: str) -> None:
    """In the first layer a row follows from its token and position alone."""
    model = made_of(name)
    windows: Any = Windows(model)
    content, turned = (0, 1) if windows.layout.is_latent else (1, 0)
    for case in cases(windows, [0, 1, 2]):
        before = [prefill(model, tokens) for tokens in case.before]
        made, exact = assembled(windows.layout, case, before)[0], prefill(model, case.prompt)[0]
        for piece in case.pieces:
            rows = slice(piece.start, min(piece.start + piece.count, len(case.prompt) - 1))
            assert torch.equal(made[content][:, :, rows], exact[content][:, :, rows])
            found, want = made[turned][:, :, rows], exact[turned][:, :, rows]
            assert (found - want).abs().max() < 2**-6 * want.abs().max()
        assert torch.equal(made[turned][:, :, :8], exact[turned][:, :, :8])


def test_errors_of_latents_are_those_of_the_latents() -> None:
    """In the last of two layers, the first of which every donor has as it is."""
    model = model_of("deepseek_v3", num_hidden_layers=2).to(torch.bfloat16)
    windows: Any = Windows(model)
    case = next(cases(windows, [1]))
    (seen,) = measured(model, windows.layout, iter([case]))
    before = [prefill(model, tokens) for tokens in case.before]
    made, exact = assembled(windows.layout, case, before)[1][0], prefill(model, case.prompt)[1][0]
    exact = exact[:, :, : made.shape[2]]
    want = (made - exact).float().square().sum((0, 1, 3)) / exact.float().square().sum((0, 1, 3))
    rows = [row for x in seen.spans for row in range(x.start, x.start + x.count)]
    assert seen.errors[rows] == pytest.approx(want[rows].numpy() / 2, rel=0.05, abs=1e-4)
    assert max(seen.errors[rows]) > 0.01


def test_windows_that_are_too_short_are_refused_before_the_model_runs() -> None:
    model = tiny("llama").to(torch.bfloat16)
    layout = layout_from_config(model.config, model.dtype)
    check_cases(model, layout, LENGTH)
    with pytest.raises(ConfigError, match="length"):
        check_cases(model, layout, LENGTH - 1)


def test_what_keeps_a_model_from_it_is_named_before_anything_is_written(tmp_path: Path) -> None:
    reasons = {
        "gemma3": "layers with windows hold no rows of the middle of a sequence, .*; leave approximate out",
        "gemma3-full": "keys with the rotary embedding .* cannot be moved; leave approximate out",
    }
    text = calibrated.text(9 * LENGTH)
    given: dict[str, Any] = {"length": LENGTH, "windows": 8, "parts": ["approximate"]}
    for name, reason in reasons.items():
        with pytest.raises(UnsupportedModel, match=f"approximate: .*{reason}"):
            calibrate(calibrated.model(name), calibrated.tokenizer(), text, tmp_path / "p", **given)
    assert list(tmp_path.iterdir()) == []


def test_calibration_fits_the_section_to_latents(tmp_path: Path) -> None:
    model = model_of("deepseek_v3", num_hidden_layers=2, vocab_size=256).to(torch.bfloat16)
    text, sizes = calibrated.text(3 * LENGTH + 100), {"windows": 3, "length": LENGTH}
    made = calibrate(model, calibrated.tokenizer(), text, tmp_path / "p", parts=["approximate"], **sizes)
    assert made.sections == ("approximate",)
    assert from_arrays(made.section("approximate")).slope > 0
    assert made.report["parts"]["approximate"]["cases"] == 1


def test_a_small_model_gets_a_section_and_a_report() -> None:
    model = made_of("llama")
    windows: Any = Windows(model)
    told: list[str] = []
    arrays = fit(model, windows, lambda what, *_: told.append(what))
    found = from_arrays(arrays)
    assert found.floor > 0
    assert found.slope > 0
    assert set(told) == {"approximate: running the model"}
    row = report(model, windows, arrays)
    assert row["cases"] == 2
    assert 0 <= row["within"] <= 1
