"""Small profiles with random arrays in every section, and blocks that they predict: for tests of codecs that need one.

The one place where tests of all codecs get what a profile makes; nothing here is calibrated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import donorcases
import levelcases
import numpy as np
import predictcases
import torch

from kvstore import KVLayout, ModelIdentity
from kvstore.calibration.lossy.tables import laplace
from kvstore.codecs.aqua.predictors import weight_shapes
from kvstore.codecs.predictive.levels.model import LevelModel
from kvstore.codecs.predictive.lossy_model import input_widths
from kvstore.codecs.predictive.model import CLASSES, ESCAPE, OFFSET, SYMBOLS, PredictiveModel
from kvstore.codecs.profile import Profile
from kvstore.codecs.rans.coder import quantise

Arrays = dict[str, Any]
Layers = list[tuple[torch.Tensor, torch.Tensor]]

ROPE = '{"rope_theta": 10000.0, "rope_type": "default"}'
VOCABULARY = predictcases.VOCABULARY
_SPREAD = 10  # of the residuals that the frequencies expect, in bins
_UNUSED = 2  # a kind of inputs that no lossy part has


def identity_of(layout: KVLayout) -> ModelIdentity:
    return ModelIdentity("small", "1", "00", "", layout)


@lru_cache(maxsize=16)
def profile_of(layout: KVLayout, *sections: str) -> Profile:
    """A bf16 layout's profile; the same arguments give the same object. sections: all but "levels" where none is
    named."""
    makers = {"lossless": _lossless, "lossy": _lossy, "donor": _donor, "aqua": _aqua, "levels": _levels}
    named = sections or tuple(name for name in makers if name != "levels")
    return Profile.new(identity_of(layout), {name: makers[name](layout) for name in named})


def predicted_kv(profile: Profile, tokens: np.ndarray, start: int, seed: int = 0) -> Layers:
    """What the section "lossless" predicts of these tokens, with noise of the expected size."""
    model = _model(profile)
    block = predictcases.block_of(model, "near", tokens.astype(np.int64), start, seed)
    return [(k, v) for k, v in zip(*[iter(predictcases.view_of(model, block).tensors())] * 2, strict=True)]


def level_kv(profile: Profile, level: int, tokens: np.ndarray, start: int, seed: int = 0) -> Layers:
    """What a level predicts of these tokens, with noise of the expected size."""
    lossless, levels = profile.section("lossless"), profile.section("levels")
    model = LevelModel.from_arrays(profile.layout, level, lossless, levels)
    block = levelcases.block_of(model, "predicted", tokens.astype(np.int64), start, seed)
    return [(k, v) for k, v in zip(*[iter(predictcases.view_of(model, block).tensors())] * 2, strict=True)]


def _model(profile: Profile) -> PredictiveModel:
    return PredictiveModel.from_arrays(profile.layout, profile.section("lossless"))


def _shapes(layout: KVLayout) -> list[tuple[int, int, int]]:
    return [(x.heads, x.key_dim, x.value_dim) for x in layout.layers]


def _lossless(layout: KVLayout) -> Arrays:
    arrays = predictcases.arrays_of(_shapes(layout), layout.rope != "none", 5, 0.3)[1]
    likely = (1e6 * np.exp(-np.abs(np.arange(SYMBOLS) - OFFSET) / _SPREAD)).astype(np.int64) + 1
    likely[ESCAPE] = 1000
    return {**arrays, "freqs": quantise(np.tile(likely, (2 * CLASSES, 1)), 12, floor=True)}


def _levels(layout: KVLayout) -> Arrays:
    return levelcases.arrays_of(_shapes(layout), layout.rope != "none", 9)


def _donor(layout: KVLayout) -> Arrays:
    """Differences go on from layer to layer at a fiftieth of their size."""
    arrays = donorcases.arrays_of(_shapes(layout), layout.rope != "none", 6, 0.0)
    return {name: array / 50 if name.endswith("out_scale") else array for name, array in arrays.items()}


def _aqua(layout: KVLayout) -> Arrays:
    rng = np.random.default_rng(7)
    pairs = enumerate(weight_shapes(layout), 1)
    return {
        f"{name}.{number}": rng.normal(0, 0.01, shape).astype(np.float16)
        for number, pair in pairs
        for name, shape in zip(("key", "value"), pair, strict=True)
    }


def _lossy(layout: KVLayout) -> Arrays:
    return lossy_arrays(PredictiveModel.from_arrays(layout, _lossless(layout)), 8)


def lossy_arrays(base: PredictiveModel, seed: int) -> Arrays:
    """A section "lossy" to go with the exact model `base`."""
    rng = np.random.default_rng(seed)
    uses = np.zeros((len(base.parts), 2), np.uint8)
    arrays: Arrays = {
        "levels": np.array([[-20, -20], [-8, -4]], np.int16),
        "ladder": np.array([[0.1, 0.2, 3, 0.001, 0.002], [0.4, 0.8, 1, 0.01, 0.03]], np.float32),
        "uses": uses,
        **laplace(),
    }
    for number, pair in enumerate(base.parts):
        for which, part in enumerate(pair):
            prefix, width = f"{number}.{'kv'[which]}.", part.width
            kinds = {kind: size for kind, size in input_widths(base, number, which).items() if kind != _UNUSED}
            uses[number, which] = sum(1 << kind for kind in kinds)
            if number:
                arrays[prefix + "weight"] = rng.integers(-20, 20, (sum(kinds.values()), width)).astype(np.int8)
                arrays[prefix + "bias"] = rng.integers(-100, 100, width).astype(np.int32)
                arrays[prefix + "out_scale"] = np.full(width, 1e-4, np.float32)
            turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
            arrays[prefix + "basis"] = np.rint(127 * turn / np.abs(turn).max(1)[:, None]).astype(np.int8)
            arrays[prefix + "component"] = (np.abs(turn).max(1) / 127).astype(np.float32)
            arrays[prefix + "unit"] = np.full(width, 1.5, np.float32)
            arrays[prefix + "scale"] = np.stack([np.arange(width) // -2] * 2).clip(-40, 0).astype(np.int16)
            arrays[prefix + "focus"] = (rng.standard_normal(sum(p.width for p in pair) + 1) / 4).astype(np.float32)
            arrays[prefix + "adapt"] = np.array([200, 100, -3], np.int32)
    return arrays
