"""A small store whose records need a profile: contents are what one of two profiles predicts, so that it codes them.

A row follows from its token alone, so any process can say what a `get` must return.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import predictcases
import small_stores
import torch

from kvstore import KVStore
from kvstore.codecs.predictive.model import PredictiveModel
from kvstore.codecs.predictive.reference import Predictor
from kvstore.codecs.profile import Profile

PROFILES = 2
_SHAPES = [(layer.heads, layer.key_dim, layer.value_dim) for layer in small_stores.LAYOUT.layers]


def _arrays(which: int) -> Any:
    return predictcases.arrays_of(_SHAPES, False, 5 + which, 0.3)[1]


def save(which: int, folder: Path) -> Path:
    """Writes one of the profiles, as calibration would."""
    path = folder / f"profile-{which}"
    if not path.exists():
        Profile.new(small_stores.IDENTITY, {"lossless": _arrays(which)}, {}).save(path)
    return path


def open_store(path: Path, given: Path | None = None, fs: Any = None) -> KVStore:
    """given: the profile to adopt; None for what the store has."""
    settings = small_stores.config(disk=1024 * small_stores.SEGMENT, codec="predictive", profile=given, block_tokens=64)
    return KVStore(path, small_stores.IDENTITY, settings, fs=fs)


def tokens_of(number: int, count: int) -> Any:
    """Tokens that the profiles know; sequences of different numbers differ in the first six."""
    head = np.array([number // predictcases.VOCABULARY**i % predictcases.VOCABULARY for i in range(6)])
    rest = np.random.default_rng(number).integers(0, predictcases.VOCABULARY, max(0, count - 6))
    return np.concatenate([head, rest])[:count].astype(np.uint32)


@lru_cache(maxsize=1)
def _model() -> PredictiveModel:
    return PredictiveModel.from_arrays(small_stores.LAYOUT, _arrays(0))


def kv_of(tokens: Any) -> Any:
    """The cache of a sequence: what the first profile predicts."""
    model, block = _model(), []
    walk = Predictor(model, torch.from_numpy(np.asarray(tokens).astype(np.int64)), 0)
    for layer, pair in enumerate(model.parts):
        found = []
        for _ in pair:
            mean = (walk.predict(layer) << 16).int().view(torch.float32).numpy().clip(-1e30, 1e30)
            bits = predictcases.as_bits(torch.from_numpy(mean))
            walk.take(layer, torch.from_numpy(bits.astype(np.int64)))
            found.append(bits)
        block.append((found[0], found[1]))
    tensors = predictcases.view_of(model, block).tensors()
    return [(k, v) for k, v in zip(*[iter(tensors)] * 2, strict=True)]


def stored(store: KVStore, tokens: Any) -> int:
    """How many leading tokens `get` returns; fails where it returns one wrong bit."""
    hit = store.get(tokens)
    if hit is None:
        return 0
    for pair, expected in zip(hit.layers, kv_of(tokens[: hit.tokens]), strict=True):
        for a, b in zip(pair, expected, strict=True):
            assert torch.equal(a[0].contiguous().view(torch.int16), b.contiguous().view(torch.int16)), "wrong bytes"
    return hit.tokens
