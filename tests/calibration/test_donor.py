"""The donors' part of a profile: what differs is predicted from what differs, and a codec made of it loses nothing."""

from __future__ import annotations

from pathlib import Path

import calibrated
import numpy as np
import pytest
import torch
from calibrated import LENGTH, WINDOWS

from kvstore.calibration.calibrate import calibrate
from kvstore.calibration.donor import fit, passages, quality
from kvstore.calibration.dump import KVDump
from kvstore.codecs.donor.groups.model import groups_model, model_of_section

MODEL, TOKENIZER = calibrated.model(), calibrated.tokenizer()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> KVDump:
    folder = tmp_path_factory.mktemp("dump")
    return KVDump.make(MODEL, TOKENIZER, calibrated.text(), folder, windows=WINDOWS, length=LENGTH)


def test_the_same_tokens_are_run_behind_two_beginnings(dump: KVDump) -> None:
    pairs = list(passages.passages(MODEL, dump, list(dump.fit_windows)))
    assert [pair.window for pair in pairs] == list(dump.fit_windows)
    assert {pair.position for pair in pairs} == {LENGTH // 2, 16, LENGTH // 2 - 4}
    for pair in pairs:
        stored, own = pair.numbers(dump, 0, 1)
        # V of the first layer is a function of the token alone: this shows that the tokens are the same.
        assert stored.shape == own.shape == (LENGTH - LENGTH // 2, own.shape[1])
        assert torch.allclose(stored, own, atol=1e-6)
        keys, turned = pair.numbers(dump, 0, 0)
        assert torch.allclose(keys, turned, atol=0.02 * float(keys.abs().max()))
    deep = [pair.numbers(dump, 1, 1) for pair in pairs]
    assert all(not torch.allclose(stored, own, atol=1e-3) for stored, own in deep)


def test_the_part_is_a_model_that_the_codec_takes(dump: KVDump, tmp_path: Path) -> None:
    arrays = fit.fit(MODEL, dump, tmp_path)
    model = model_of_section(dump.layout, arrays)
    assert all(np.any(part.weight) for pair in model.parts[1:] for part in pair)
    report = quality.report(MODEL, dump, arrays, block=8)
    assert set(report) == {"bits_per_value", "without"}
    assert 1 < report["bits_per_value"] < 16


def test_a_profile_with_the_part(tmp_path: Path) -> None:
    made = calibrate(
        MODEL, TOKENIZER, calibrated.text(), tmp_path / "p", windows=WINDOWS, length=LENGTH, parts=("donor",)
    )
    assert made.sections == ("donor",)
    assert groups_model(made) is not None
    assert made.report["parts"]["donor"]["without"] > 0
    assert len(repr(made)) < 20_000  # its numbers are not shown


def test_a_model_of_one_layer_is_calibrated(tmp_path: Path) -> None:
    """Where the keys and values have no context to differ by."""
    model = calibrated.model(num_hidden_layers=1)
    sizes = {"windows": WINDOWS, "length": LENGTH}
    parts = ("lossless", "levels", "lossy", "aqua", "donor")
    made = calibrate(model, TOKENIZER, calibrated.text(), tmp_path / "p", **sizes, parts=parts)
    assert made.sections == ("donor", "levels", "lossless", "lossy")
    assert made.report["parts"]["levels"]["bits_per_value"] < 16
