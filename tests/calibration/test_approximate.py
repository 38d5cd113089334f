"""The fit of what reuse loses: constants that are known come back, and a small model gets a section and a report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny

from kvstore.approximate.estimates import from_arrays
from kvstore.calibration.approximate.cases import cases, check_cases
from kvstore.calibration.approximate.fit import MARGIN, SHARE, fit, fit_bound, fit_errors, report
from kvstore.calibration.approximate.measure import Seen, assembled, prefill
from kvstore.core.approximate import Candidate, Estimates
from kvstore.errors import ConfigError
from kvstore.integrations.transformers import layout_from_config

LENGTH = 256


class Windows:
    """Of random tokens, as `KVDump` gives them."""

    length, windows = LENGTH, 8
    held_out = range(6, 8)

    layout = layout_from_config(tiny("llama").config, torch.bfloat16)

    def some(self, count: int) -> list[int]:
        return list(range(6))[:count]

    def tokens(self, window: int) -> Any:
        return np.random.default_rng(window).integers(1, 199, LENGTH)


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
    for case in cases(Windows(), [0, 1, 2]):  # type: ignore[arg-type]
        held = {tuple(x[i : i + 32]) for x in case.before for i in range(len(x) - 31)}
        found = [tuple(case.prompt[i : i + 32]) in held for i in range(len(case.prompt) - 31)]
        assert np.mean(found) > 0.5
        assert all(tuple(x[:32]) != tuple(case.prompt[:32]) and (x[:8] == case.prompt[:8]).all() for x in case.before)
        assert len(case.after) == LENGTH // 8


def test_rows_of_donors_are_put_where_the_prompt_has_their_tokens() -> None:
    """In the first layer a row follows from its token and position alone."""
    model: Any = tiny("llama").to(torch.bfloat16)
    for case in cases(Windows(), [0, 1, 2]):  # type: ignore[arg-type]
        before = [prefill(model, tokens) for tokens in case.before]
        made, exact = assembled(Windows.layout, case, before)[0], prefill(model, case.prompt)[0]
        for piece in case.pieces:
            rows = slice(piece.start, min(piece.start + piece.count, len(case.prompt) - 1))
            assert torch.equal(made[1][:, :, rows], exact[1][:, :, rows])
            assert torch.allclose(made[0][:, :, rows], exact[0][:, :, rows], atol=0.05)
        assert torch.equal(made[0][:, :, :8], exact[0][:, :, :8])


def test_windows_that_are_too_short_are_refused_before_the_model_runs() -> None:
    model = tiny("llama").to(torch.bfloat16)
    layout = layout_from_config(model.config, model.dtype)
    check_cases(model, layout, LENGTH)
    with pytest.raises(ConfigError, match="length"):
        check_cases(model, layout, LENGTH - 1)


def test_a_small_model_gets_a_section_and_a_report() -> None:
    model: Any = tiny("llama").to(torch.bfloat16)
    told: list[str] = []
    arrays = fit(model, Windows(), lambda what, *_: told.append(what))  # type: ignore[arg-type]
    found = from_arrays(arrays)
    assert found.floor > 0
    assert found.slope > 0
    assert set(told) == {"approximate: running the model"}
    row = report(model, Windows(), arrays)  # type: ignore[arg-type]
    assert row["cases"] == 2
    assert 0 <= row["within"] <= 1
